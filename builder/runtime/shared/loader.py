"""Loading while others are answered: requests for a model that is not in memory wait here, one thread loads.

A model that could not be loaded is not tried again for a while: its requests are refused with the reason at once. A
version that could not be loaded takes the place of none that answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .host import Host, Loaded

RETRY_S = 10.0
TICK_S = 1.0
MOST = 512  # requests that wait for one model


class NotReady(RuntimeError):
    """A hosted model that cannot be loaded now."""


class Loader:
    """`answer`: gives the waiting `jobs` of a model their answers; `fail`: all of them an error; `tick`: called each
    second at most, and after each load.
    """

    def __init__(
        self,
        host: Host,
        answer: Callable[[Loaded, Sequence[Any]], None],
        fail: Callable[[Sequence[Any], Exception], None],
        tick: Callable[[], None],
    ) -> None:
        self.host, self.answer, self.fail, self.tick = host, answer, fail, tick
        self.waiting: dict[str, list[Any]] = {}
        self.failed: dict[str, tuple[str, float, str]] = {}  # by name: build, until when, why
        self.lock = threading.Lock()
        self.names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def ask(self, name: str, build: str, jobs: Sequence[Any]) -> None:
        """Have the model `name` loaded in its version `build`, and then `jobs` answered.

        Raises NotReady where that failed a short while ago, or too many wait for it.
        """
        failed = self.failed.get(name)
        if failed is not None and failed[0] == build and time.monotonic() < failed[1]:
            raise NotReady(failed[2])
        with self.lock:
            known, before = name in self.waiting, self.waiting.get(name, ())
            if before and len(before) + len(jobs) > MOST:
                raise NotReady(f"{MOST} requests wait already until {name} is loaded; send the request again later")
            self.waiting.setdefault(name, []).extend(jobs)
        if not known:
            self.names.put(name)

    def stop(self) -> None:
        """Load nothing more; what waits is refused."""
        self.names.put(None)
        self.thread.join()
        for jobs in self.waiting.values():
            self.fail(jobs, NotReady("the server is stopping"))

    def _run(self) -> None:
        while True:
            try:
                name = self.names.get(timeout=TICK_S)
                if name is None:
                    return
                self._load(name)
            except queue.Empty:
                pass
            self.tick()

    def _load(self, name: str) -> None:
        try:
            model = self.host.load(name)
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            reason = NotReady(f"the model {name} is not ready, it cannot be loaded: {type(error).__name__}: {error}")
            self._note(name, str(reason))
            self._do_without(name, reason)
            return
        self.failed.pop(name, None)
        try:
            while jobs := self._waiting(name):
                self._answer(model, jobs)
        finally:
            self.host.leave(model)

    def _do_without(self, name: str, reason: NotReady) -> None:
        """What waits is answered by the version before, where one is in memory, and refused otherwise."""
        before, jobs = self.host.take(name), self._waiting(name, last=True)
        if before is None:
            self.fail(jobs, reason)
            return
        try:
            self._answer(before, jobs)
        finally:
            self.host.leave(before)

    def _answer(self, model: Loaded, jobs: Sequence[Any]) -> None:
        try:
            self.answer(model, jobs)
        except BaseException as error:  # the thread would end, and nothing be loaded any more
            self.fail(jobs, NotReady(f"the model {model.name} failed: {type(error).__name__}: {error}"))

    def _note(self, name: str, reason: str) -> None:
        entry = self.host.listing.models.get(name)
        if entry is not None:
            until = time.monotonic() + RETRY_S
            self.failed[name] = (entry.build, until, f"{reason}; it is tried again after {RETRY_S:.0f} s")

    def _waiting(self, name: str, last: bool = False) -> list[Any]:
        """The requests that wait now; where there are none, or these are the `last`, the next has it loaded again."""
        with self.lock:
            jobs = self.waiting.pop(name)
            if jobs and not last:
                self.waiting[name] = []
        return jobs
