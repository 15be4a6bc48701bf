"""Progress of long steps: the stages of a build, the bytes of downloads, and durations in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

Stage = Callable[[str], AbstractContextManager[Any]]  # entered with the name of each stage, and left when it is done
OnProgress = Callable[[float, float], None]  # called with what is done, and all of it

on_download: ContextVar[OnProgress | None] = ContextVar("on_download", default=None)


@contextmanager
def reporting_downloads(on_progress: OnProgress) -> Iterator[None]:
    """Within the block, downloads call `on_progress` with the bytes that are here, and all of them."""
    token = on_download.set(on_progress)
    try:
        yield
    finally:
        on_download.reset(token)


def duration(seconds: float) -> str:
    """Return a duration such as "3.2 s", "4 min 05 s" and "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
