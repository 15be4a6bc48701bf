"""Loads and unloads a model and its engine on Triton, and waits until that is done.

Triton answers an unload at once, and ends the model when its last request is answered; its process takes a second more
to end (core, model_lifecycle.cc, AsyncUnload; python_backend, stub_launcher.cc, UpdateHealth).
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

from builder.common.errors import BuilderError, RepositoryError
from builder.repository.signatures import Which, to_be_loaded, unsigned
from builder.repository.versions import version_numbers
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.needs import Needs, needs_of
from builder.serving.gateway.residency.offered import Offered
from builder.serving.gateway.residency.processes import Processes, alive, size_of
from builder.serving.gateway.residency.resident import Resident
from builder.serving.server.control import Control

PROCESS_POLL_S = 0.02
INDEX_POLL_S = 0.5
GONE_S = 120.0
AWAY = ("unavailable", "timeout")  # codes that mean that Triton does not answer, not that the model fails to load
KILLED = "is not healthy"
MODE = "explicit model load / unload is not allowed"


class ModelControl(Protocol):
    """Part of Triton's API that loading needs."""

    async def load(self, name: str) -> None: ...

    async def unload(self, name: str) -> None: ...

    async def serves(self, name: str, version: str) -> bool: ...

    async def held(self) -> set[str]: ...


class TritonLoading:
    """Loads the repository of `offered` on the Triton at `url`; with `verify_key`, only models signed with that key."""

    def __init__(
        self, triton: ModelControl, offered: Offered, url: str, processes: Processes, verify_key: Path | None = None
    ) -> None:
        self.triton, self.offered, self.url, self.processes = triton, offered, url, processes
        self.verify_key = verify_key

    async def needs(self, name: str, version: str) -> Needs:
        """Return an estimate; see lifecycle.Loading. Raises ApiError."""
        try:
            return await asyncio.to_thread(needs_of, self.offered.repository, name, int(version))
        except (BuilderError, OSError, ValueError) as error:
            raise _failed(str(error)) from error

    async def load(self, resident: Resident, *, instead: bool) -> int | None:
        """Load a version; see lifecycle.Loading. Raises ApiError."""
        name, version = resident.name, resident.version
        resident.earlier = frozenset(await asyncio.to_thread(self.processes.of, [name, *resident.engines]))
        try:
            await asyncio.to_thread(self._refuse_unsigned, name, version_numbers if instead else to_be_loaded)
            if instead and resident.engines:
                await asyncio.to_thread(_switch, self.url, self.offered.repository, name)
            else:
                await self._load(resident)
        except BuilderError as error:
            raise _failed(str(error)) from error
        except ApiError as error:
            raise _explained(error) from error
        if not await self.triton.serves(name, version) and self.offered.stamp(name) == resident.stamp:
            raise _failed(
                f"Triton does not read {self.offered.repository.resolve()}, where version {version} is served"
            )
        return await asyncio.to_thread(self._size, resident)

    def _refuse_unsigned(self, name: str, which: Which) -> None:
        """Raise RepositoryError for an unsigned model. To replace a version, Triton is told to load both."""
        if self.verify_key is not None:
            repository = self.offered.repository
            problems = unsigned(repository, self.verify_key, [name], which)
            if problems:
                see = f"build-repo verify {repository} --key {self.verify_key}"
                raise RepositoryError(f"{problems[0]}. It is not loaded; see all: {see}")

    async def unload(self, name: str) -> None:
        """Unload a model; see lifecycle.Loading. Raises ApiError."""
        processes = await asyncio.to_thread(self.processes.of, [name])
        await self.triton.unload(name)
        end = time.monotonic() + GONE_S
        while time.monotonic() < end:
            if not (alive(processes) if processes else name in await self.triton.held()):
                return
            await asyncio.sleep(PROCESS_POLL_S if processes else INDEX_POLL_S)
        logging.getLogger(__name__).warning("%s still takes memory %.0f s after it was unloaded", name, GONE_S)

    async def _load(self, resident: Resident) -> None:
        for engine in resident.engines:
            if not await self.triton.serves(engine, resident.version):
                await self._load_one(engine)
        await self._load_one(resident.name)

    async def _load_one(self, name: str) -> None:
        """Load a model; retry once if its process was killed meanwhile."""
        try:
            await self.triton.load(name)
        except ApiError as error:
            if KILLED not in error.message:
                raise
            await self.triton.load(name)

    def _size(self, resident: Resident) -> int | None:
        processes = self.processes.of((resident.name, *resident.engines))
        return sum(map(size_of, processes)) or None


def _switch(url: str, repository: Path, name: str) -> None:
    with Control(url, repository) as control:
        control.switch(name)


def _failed(reason: str) -> ApiError:
    return ApiError(503, reason, code="model_failed")


def _explained(error: ApiError) -> ApiError:
    if MODE in error.message:
        return ApiError(503, "Triton loads nothing when it is told to: start it with --model-control-mode=explicit")
    return error if error.code in AWAY else _failed(error.message)
