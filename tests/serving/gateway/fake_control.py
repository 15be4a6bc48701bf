"""A stand-in for a Triton with explicit model control, as strict as the real one about what is loaded.

A request for a model that is not loaded fails; an unload is answered at once, after it new requests fail, those that
run are finished, and the model holds its memory until then; to load a model that is loaded does nothing unless its
configuration has changed (core, model_lifecycle.cc: GetModel, AsyncUnload, AsyncLoad; model_repository_manager.cc).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import service_pb2

from builder.repository.versions import served_number
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Output
from tests.serving.gateway.fake_triton import FakeTriton, config_of

SIZE = 1000  # bytes of the files of a model


def make_models(repository: Path, *names: str, versions: int = 1, engine: bool = False) -> None:
    """Create models of a kind of fake_triton.MODELS, which is their name up to a dash; the last version is served."""
    for name in names:
        for number in range(1, versions + 1):
            (repository / name / str(number)).mkdir(parents=True)
            (repository / name / str(number) / "model.onnx").write_bytes(b"x" * SIZE)
        serve(repository, name, versions)
        if engine:
            make_models(repository, f"{name}_model", versions=versions)
            files = f'{{"name": "{name}", "files": {{"{name}": {{}}, "{name}_model": {{}}}}}}'
            (repository / name / "build.json").write_text(files)


def serve(repository: Path, name: str, number: int) -> None:
    """Serve a version by one rename, as a rollback does."""
    config = config_of(kind(name))
    config.name = name
    config.version_policy.specific.versions.append(number)
    unfinished = repository / f"{name}.new"
    unfinished.write_text(text_format.MessageToString(config))
    unfinished.replace(repository / name / "config.pbtxt")


def kind(name: str) -> str:
    """Return the kind of a model; an engine has none."""
    return name if name.endswith("_model") else name.split("-")[0]


class FakeServer(FakeTriton):
    """Triton with model control. `tried`, `loads`, `unloads`: in order. `broken`: failing loads; `dead`: no process."""

    def __init__(self, repository: Path) -> None:
        super().__init__()
        self.repository = repository
        self.may_load: asyncio.Event | None = None  # loads wait for this
        self.loaded: dict[str, str] = {}
        self.tried: list[str] = []
        self.loads: list[str] = []
        self.unloads: list[str] = []
        self.broken: dict[str, str] = {}
        self.dead: set[str] = set()
        self.hung: set[str] = set()  # their process died, and requests that it had are never answered
        self.killed: set[str] = set()  # while they are loaded, once
        self.at_once = self.most_at_once = 0
        self.in_use: Counter[str] = Counter()
        self.unloaded_in_use: list[str] = []
        self.answered: list[tuple[str, str]] = []

    async def load(self, name: str) -> None:
        self.tried.append(name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.may_load is not None:
                await self.may_load.wait()
        finally:
            self.at_once -= 1
        version = str(served_number(self.repository / name))
        if name in self.broken:
            state = f"version {version} is at UNAVAILABLE state: Internal: {self.broken[name]}"
            raise ApiError(400, f"load failed for model '{name}': {state};")
        if name in self.killed:
            self.killed.discard(name)
            raise ApiError(400, f"load failed for model '{name}': Internal: Stub process '{name}_0_0' is not healthy.;")
        if self.loaded.get(name) == version:
            return
        self.loads.append(name)
        self.dead.discard(name)
        self.hung.discard(name)
        self.loaded[name] = version

    async def unload(self, name: str) -> None:
        if self.in_use[name] and name not in self.dead:
            self.unloaded_in_use.append(name)
        self.loaded.pop(name, None)
        self.unloads.append(name)

    async def ready(self) -> bool:
        return not self.at_once

    async def reports_live(self) -> bool:
        return True

    async def is_model_ready(self, name: str, version: str) -> bool:
        return self.loaded.get(name) == version

    async def models_in_memory(self) -> set[str]:
        return set(self.loaded) | set(+self.in_use)

    async def index(self) -> list[tuple[str, str]]:
        return sorted(self.loaded.items())

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> dict[str, Output]:
        with self._using(request.model_name):
            if request.model_name in self.hung:
                await asyncio.Event().wait()
            return await super().infer(_of_kind(request), metadata)

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[dict[str, Output], None]:
        with self._using(request.model_name):
            async for outputs in super().stream(_of_kind(request), metadata):
                yield outputs

    @contextmanager
    def _using(self, name: str) -> Iterator[None]:
        if name not in self.loaded:
            raise ApiError(404, f"Request for unknown model: '{name}' has no available versions")
        if name in self.dead:
            raise ApiError(503, f"Stub process '{name}_0_0' is not healthy.", code="unavailable")
        for engine in (f"{name}_model",):
            if (self.repository / engine).is_dir() and self.loaded.get(engine) != self.loaded[name]:
                raise ApiError(500, f"this request failed inside the model: Request for unknown model: '{engine}'")
        self.answered.append((name, self.loaded[name]))
        self.in_use[name] += 1
        try:
            yield
        finally:
            self.in_use[name] -= 1


def _of_kind(request: service_pb2.ModelInferRequest) -> Any:
    copy = service_pb2.ModelInferRequest()
    copy.CopyFrom(request)
    copy.model_name = kind(request.model_name)
    return copy
