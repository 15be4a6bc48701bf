"""Progress of long steps: the stages of a build, and the bytes of downloads."""

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
