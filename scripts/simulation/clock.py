"""Run asyncio on a simulated clock: a loop that waits for a timer moves its clock there at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SimulatedSelector(selectors.SelectSelector):
    """Selector that passes the time instead of waiting. No file becomes ready, so all events are timers."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock. Raises RuntimeError if nothing is due, ever."""
        if timeout is None:
            raise RuntimeError("the simulation waits for something that no timer brings about")
        self.now += max(0.0, timeout)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time` is simulated, in seconds from 0."""

    def __init__(self) -> None:
        self.selector = SimulatedSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run a function at once, in this thread: it takes no simulated time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a clock of its own."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)
