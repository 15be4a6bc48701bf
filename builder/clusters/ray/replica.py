"""Run a replica: a Triton of its own, in which a model is loaded when a request for it comes.

Ray unloads the least recently used model (ray.serve.multiplexed), once its last request is answered. A replica ends
with its Triton, so that Ray starts another and sends requests elsewhere meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2

from builder.clusters.ray.replicas import Answer, to_refusal
from builder.common.errors import BuilderError
from builder.repository.versions import entry_names, served_number
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.triton import Triton
from builder.serving.server.control import Control
from builder.serving.server.heartbeat import heartbeat
from builder.serving.server.triton import TritonServer, running
from builder.serving.server.watch import POLL_S, Watcher

TRITON_ENDED = 70  # exit status of a replica whose Triton ended by itself: EX_SOFTWARE of sysexits.h


class LoadedModel:
    """Model that a server has loaded; unloaded when Ray deletes this object, as soon as no request uses it.

    It is used on one event loop, deleted on another thread, and once more by Python: only the first deletion counts.
    """

    def __init__(self, server: TritonServer, name: str) -> None:
        assert server.repository is not None
        self.server, self.repository, self.name = server, server.repository, name
        self.users, self.unloaded, self.changed = 0, True, threading.Condition()
        with Control(server.url, self.repository) as control:
            control.again(name)
        self.unloaded = False

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Keep the model loaded within this context."""
        with self.changed:
            self.users += 1
        try:
            yield
        finally:
            with self.changed:
                self.users -= 1
                self.changed.notify_all()

    def __del__(self) -> None:
        with self.changed:
            unloaded, self.unloaded = self.unloaded, True
            self.changed.wait_for(lambda: unloaded or not self.users)
        if unloaded or self.server.process.poll() is not None:
            return
        number = served_number(self.repository / self.name)
        with Control(self.server.url, self.repository) as control:
            for model in entry_names(self.repository, self.name, number) if number else [self.name]:
                control.unload(model)


class Replica:
    """One of a deployment's replicas, which answers requests for models of `repository`.

    Ray keeps what `load` returns: see `limited`.
    """

    def __init__(self, repository: str) -> None:
        self.stopping = False
        self.stack = ExitStack()
        # On this thread, which lives as long as the process: Triton ends with the thread that started it.
        self.server = self.stack.enter_context(running(Path(repository), strict=False, on_demand=True, liveness=True))
        self.triton = Triton(self.server.url)
        threading.Thread(target=self._watch, daemon=True).start()

    async def load(self, name: str) -> LoadedModel:
        """Load a model. Raises ServeError with Triton's reason if it does not load."""
        return await asyncio.to_thread(LoadedModel, self.server, name)

    async def ready(self) -> bool:
        """Return True if its Triton answers."""
        return await self.triton.ready()

    async def infer(self, request: bytes, metadata: Metadata = ()) -> Answer:
        """Return the answer to a ModelInferRequest."""
        message = service_pb2.ModelInferRequest.FromString(request)
        try:
            with (await self._model(message.model_name)).lease():
                return await self.triton.infer(message, metadata)
        except ApiError as error:
            return to_refusal(error)

    async def stream(self, request: bytes, metadata: Metadata = ()) -> AsyncGenerator[Answer, None]:
        """Yield the answers to a ModelInferRequest as they come; a refusal is the last."""
        message = service_pb2.ModelInferRequest.FromString(request)
        try:
            with (await self._model(message.model_name)).lease():
                async for outputs in self.triton.stream(message, metadata):
                    yield outputs
        except ApiError as error:
            yield to_refusal(error)

    async def _model(self, name: str) -> LoadedModel:
        try:
            return await self.load(name)
        except BuilderError as error:
            raise ApiError(500, str(error), code="not_loaded") from error

    def _watch(self) -> None:
        """Monitor the processes of its models until its Triton ends, and then end this process."""
        watcher = Watcher(self.server, _log)
        with heartbeat(self.server, _log):
            while (status := self.server.process.poll()) is None:
                watcher.look()
                time.sleep(POLL_S)
        if not self.stopping:
            _log(f"Triton ended by itself, with status {status}: this replica ends too")
            self.stack.close()  # its models' processes, and their shared memory, outlive a server that is killed
            os._exit(TRITON_ENDED)

    def __del__(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.stack.close()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def replica_class(models: int, multiplexed: Any) -> type[Replica]:
    """Return a class of replicas that have at most `models` loaded; `multiplexed`: ray.serve's."""

    class Limited(Replica):
        load = multiplexed(max_num_models_per_replica=models)(Replica.load)

    return Limited
