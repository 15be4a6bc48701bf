"""Load models in one thread, while others are answered; requests for a model that is not in memory wait here.

A model that could not be loaded is not tried again for a while: its requests are refused with the reason at once. A
version that could not be loaded does not replace one that answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .host import Host, LoadedModel

RETRY_S = 10.0
TICK_INTERVAL_S = 1.0
MAX_WAITING = 512  # requests that may wait for one model


class NotReady(RuntimeError):
    """A hosted model cannot be loaded now."""


class Loader:
    """Thread that loads models, and the requests that wait for them.

    `answer` answers the waiting `jobs` of a model; `fail` sends all of them an error; `tick` is called each second
    while idle, and after each load.
    """

    def __init__(
        self,
        host: Host,
        answer: Callable[[LoadedModel, Sequence[Any]], None],
        fail: Callable[[Sequence[Any], Exception], None],
        tick: Callable[[], None],
    ) -> None:
        self.host, self.answer, self.fail, self.tick = host, answer, fail, tick
        self.waiting: dict[str, list[Any]] = {}
        self.failed: dict[str, tuple[str, float, str]] = {}  # by name: build, time until the next try, reason
        self.lock = threading.Lock()
        self.names: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def request(self, name: str, build: str, jobs: Sequence[Any]) -> None:
        """Load the model `name` in its version `build`, and then answer `jobs`.

        Raises NotReady if that recently failed, or too many requests wait for the model.
        """
        failed = self.failed.get(name)
        if failed is not None and failed[0] == build and time.monotonic() < failed[1]:
            raise NotReady(failed[2])
        with self.lock:
            known, before = name in self.waiting, self.waiting.get(name, ())
            if before and len(before) + len(jobs) > MAX_WAITING:
                raise NotReady(
                    f"{MAX_WAITING} requests wait already until {name} is loaded; send the request again later"
                )
            self.waiting.setdefault(name, []).extend(jobs)
        if not known:
            self.names.put(name)

    def stop(self) -> None:
        """Stop loading; refuse the waiting requests."""
        self.names.put(None)
        self.thread.join()
        for jobs in self.waiting.values():
            self.fail(jobs, NotReady("the server is stopping"))

    def _run(self) -> None:
        while True:
            try:
                name = self.names.get(timeout=TICK_INTERVAL_S)
                if name is None:
                    return
                self._load(name)
            except queue.Empty:
                pass
            self.tick()

    def _load(self, name: str) -> None:
        try:
            model = self.host.load(name)
        except BaseException as error:  # a panic of the tokenizers library is not an Exception
            reason = NotReady(f"the model {name} is not ready, it cannot be loaded: {type(error).__name__}: {error}")
            self._note_failure(name, str(reason))
            self._answer_with_previous(name, reason)
            return
        self.failed.pop(name, None)
        try:
            while jobs := self._take_waiting(name):
                self._answer(model, jobs)
        finally:
            self.host.release(model)

    def _answer_with_previous(self, name: str, reason: NotReady) -> None:
        """Answer waiting requests with the previous version, if one is in memory; refuse them otherwise."""
        before, jobs = self.host.acquire(name), self._take_waiting(name, last=True)
        if before is None:
            self.fail(jobs, reason)
            return
        try:
            self._answer(before, jobs)
        finally:
            self.host.release(before)

    def _answer(self, model: LoadedModel, jobs: Sequence[Any]) -> None:
        try:
            self.answer(model, jobs)
        except BaseException as error:  # otherwise the thread would end and load no further models
            self.fail(jobs, NotReady(f"the model {model.name} failed: {type(error).__name__}: {error}"))

    def _note_failure(self, name: str, reason: str) -> None:
        entry = self.host.listing.models.get(name)
        if entry is not None:
            until = time.monotonic() + RETRY_S
            self.failed[name] = (entry.build, until, f"{reason}; it is tried again after {RETRY_S:.0f} s")

    def _take_waiting(self, name: str, last: bool = False) -> list[Any]:
        """Return the requests that wait now; if none, or with `last`, the next request loads the model again."""
        with self.lock:
            jobs = self.waiting.pop(name)
            if jobs and not last:
                self.waiting[name] = []
        return jobs
