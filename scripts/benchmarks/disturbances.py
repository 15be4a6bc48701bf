"""Disturbances of a server under load: its model's process is killed, it is flooded, its versions change.

Each kind takes its turn, evenly spread. Their times are recorded, to tell requests that failed because of one from
those that failed by themselves.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2

from builder.repository.settings import publish_settings
from builder.runtime.fields import Field
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import add_tensor
from builder.serving.gateway.triton import Triton
from builder.serving.server.control import Control
from builder.serving.server.stubs import Stub, Stubs
from builder.serving.server.triton import TritonServer
from builder.serving.server.watch import Watcher

AT_ONCE = 800  # requests of a flood: more than a queue accepts
PREFILLS = (24, 32, 48)  # of the versions that take turns: the answers are the same
REFUSALS = (429, 503, 504)
RECOVERY_S = 60.0
TYPES = {str: "TYPE_STRING", bool: "TYPE_BOOL", int: "TYPE_INT32", float: "TYPE_FP32"}


@dataclass
class Disturbances:
    """Disturbances of a server. `samples`, the answer to each `alone`, and `wrong`: incorrect answers."""

    server: TritonServer
    name: str
    samples: Sequence[Mapping[str, Any]]
    alone: Sequence[str]
    wrong: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    windows: list[tuple[float, float]] = field(default_factory=list)  # of kills and floods
    recovered_s: list[float] = field(default_factory=list)

    def run(self, seconds: float, kinds: Mapping[str, int]) -> None:
        """Run that many disturbances of each kind in that many seconds."""
        order = [kind for kind, count in kinds.items() for _ in range(count)]
        random.Random(0).shuffle(order)
        started = time.monotonic()
        for number, kind in enumerate(order, 1):
            time.sleep(max(0.0, started + number * seconds / (len(order) + 1) - time.monotonic()))
            try:
                getattr(self, f"_{kind}")(number)
            except Exception as error:  # runs in a thread: the reader of `wrong` reports it
                self.wrong.append(f"{kind}: {error!r}")
            self.counts[kind] += 1

    def explains(self, started: float, ended: float) -> bool:
        """Return True if a request of that time may have failed because of a kill or a flood."""
        return any(begin <= ended and started <= end for begin, end in tuple(self.windows))

    def _kill(self, turn: int) -> None:
        stub = max(self.processes(), key=lambda stub: stub.process.create_time())  # of the version that answers
        started = time.monotonic()
        self.windows.append((started, started + RECOVERY_S))
        stub.process.kill()
        while time.monotonic() < started + RECOVERY_S:
            time.sleep(0.2)
            if self.processes() != [] and asyncio.run(self._answers()):
                self.recovered_s.append(time.monotonic() - started)
                self.windows[-1] = (started, time.monotonic())
                return
        self.wrong.append(f"the model did not come back within {RECOVERY_S:g} s")

    def processes(self) -> list[Stub]:
        """Return the processes of the model: more than one while an earlier version has not ended."""
        stubs = Stubs(self.server.process.pid).find()
        return [stub for stub in stubs if stub.model == self.name and stub.is_alive]

    async def _answers(self) -> bool:
        triton = Triton(self.server.url)
        try:
            return await asyncio.wait_for(self._one(triton, 0), 5) == self.alone[0]
        except (ApiError, TimeoutError):
            return False
        finally:
            await triton.close()

    def _flood(self, turn: int) -> None:
        started = time.monotonic()
        self.windows.append((started, float("inf")))
        asyncio.run(self._all_at_once())
        self.windows[-1] = (started, time.monotonic())

    async def _all_at_once(self) -> None:
        triton = Triton(self.server.url)
        indices = [turn % len(self.samples) for turn in range(AT_ONCE)]
        outcomes = await asyncio.gather(*(self._one(triton, index) for index in indices), return_exceptions=True)
        await triton.close()
        for index, answer in zip(indices, outcomes, strict=True):
            if isinstance(answer, ApiError) and answer.status in REFUSALS:
                self.counts["refused_in_a_flood"] += 1
            elif answer != self.alone[index]:
                self.wrong.append(f"in a flood: {answer!r} instead of {self.alone[index]!r}")

    async def _one(self, triton: Triton, index: int) -> str:
        request = service_pb2.ModelInferRequest(model_name=self.name)
        for name, value in {**self.samples[index], "stream": True}.items():
            add_tensor(request, Field(name, TYPES[type(value)]), [value], (1,))
        return "".join([text async for out in triton.stream(request) for text in out["text_output"].strings()])

    def _publish(self, turn: int) -> None:
        """Publish the same files with another setting as a new version that replaces the old one while requests run."""
        assert self.server.repository is not None
        settings = {"serving.prefill_tokens": PREFILLS[turn % len(PREFILLS)]}
        publish_settings(self.server.repository, self.name, settings, "a soak")
        with Control(self.server.url, self.server.repository) as control:
            control.switch(self.name)


def watched(server: TritonServer, ended: threading.Event) -> Watcher:
    """Watch a server as `build-repo serve` does, until `ended`."""
    watcher = Watcher(server, lambda text: print(f"serve: {text}", flush=True))

    def look() -> None:
        while not ended.wait(1.0):
            watcher.look()

    threading.Thread(target=look, daemon=True).start()
    return watcher
