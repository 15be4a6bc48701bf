"""Show what loads and, while files of it are downloaded, their bytes and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.filesize import decimal

from builder.commands import screen
from builder.common.progress import duration, reporting_downloads


@contextmanager
def loading(title: Callable[[], str]) -> Iterator[None]:
    """Show a spinner with a title, which is asked for whenever it is drawn, and the downloads within the block."""
    line = LoadingLine(title)
    with screen.status(line), reporting_downloads(line.report) if screen.is_terminal else nullcontext():
        yield


class LoadingLine:
    """Title and, while something is downloaded, its bytes and the time that is left at the speed so far."""

    def __init__(self, title: Callable[[], str]) -> None:
        self.title = title
        self.started: tuple[float, float] | None = None  # the first report: when, and how much was here
        self.bytes = (0.0, 0.0)  # here, and all

    def report(self, done: float, total: float) -> None:
        if self.started is None or done < self.bytes[0] or total != self.bytes[1]:  # another download
            self.started = time.perf_counter(), done
        self.bytes = done, total

    def __rich__(self) -> str:
        done, total = self.bytes
        if done >= total or self.started is None:
            return self.title()
        since, before = self.started
        line = f"downloading, {decimal(int(done))} of {decimal(int(total))}"
        if done == before:
            return line
        return f"{line}, about {duration((time.perf_counter() - since) * (total - done) / (done - before))} left"
