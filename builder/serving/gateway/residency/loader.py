"""Load and unload a model and its engine on Triton, and wait until that is done.

Triton answers an unload at once, and ends the model when its last request is answered; its process takes a second more
to end (core, model_lifecycle.cc, AsyncUnload; python_backend, stub_launcher.cc, UpdateHealth).
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from builder.common.errors import BuilderError, RepositoryError
from builder.repository.signatures import VersionSelector, to_be_loaded, unsigned
from builder.repository.versions import version_numbers
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.memory import MemoryEstimate, TritonProcesses, estimate_memory, size_of
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.residency.resident_model import ResidentModel
from builder.serving.gateway.served_model import read_model
from builder.serving.gateway.triton import Triton
from builder.serving.server.control import Control

PROCESS_POLL_S = 0.02
INDEX_POLL_S = 0.5
UNLOAD_TIMEOUT_S = 120.0
TRITON_CODES = ("unavailable", "timeout")  # Triton does not answer, which need not be the model's fault
PROCESS_KILLED = "is not healthy"
CONTROL_DISABLED = "explicit model load / unload is not allowed"


class TritonLoader:
    """Loads models of a repository on the Triton at `url`; with `verify_key`, only models signed with that key.

    `has_copy`: Triton may read a copy of the repository, in which models have other versions while they are rolled out.
    """

    def __init__(
        self,
        triton: Triton,
        repository_models: RepositoryModels,
        url: str,
        processes: TritonProcesses,
        verify_key: Path | None = None,
        has_copy: bool = False,
    ) -> None:
        self.triton, self.repository_models, self.url, self.processes = triton, repository_models, url, processes
        self.verify_key, self.has_copy = verify_key, has_copy

    async def estimate(self, name: str, version: str) -> MemoryEstimate:
        """Return an estimate of a version's needs. Raises ApiError."""
        try:
            return await asyncio.to_thread(estimate_memory, self.repository_models.repository, name, int(version))
        except (BuilderError, OSError, ValueError) as error:
            raise _model_failed(str(error)) from error

    async def load(self, resident: ResidentModel, *, replace: bool) -> int | None:
        """Load a version; `replace`: replace the version that answers, which does so until then.

        Returns the measured bytes; None if they cannot be measured. Raises ApiError.
        """
        name, version = resident.name, resident.version
        stubs = await asyncio.to_thread(self.processes.of, [name, *resident.engines])
        resident.earlier = frozenset(stub.pid for stub in stubs)
        try:
            await asyncio.to_thread(self._refuse_unsigned, name, version_numbers if replace else to_be_loaded)
            if replace and resident.engines:
                await asyncio.to_thread(_switch, self.url, self.repository_models.repository, name)
            else:
                for engine in resident.engines:
                    if not await self.triton.is_model_ready(engine, version):
                        await self._load_one(engine)
                await self._load_one(name)
        except BuilderError as error:
            raise _model_failed(str(error)) from error
        except ApiError as error:
            if CONTROL_DISABLED in error.message:
                advice = "start it with --model-control-mode=explicit"
                raise ApiError(503, f"Triton refuses to load models on request: {advice}") from error
            raise (error if error.code in TRITON_CODES else _model_failed(error.message)) from error
        if not await self.triton.is_model_ready(name, version) and self.repository_models.stamp(name) == resident.stamp:
            loaded = [other for model, other in await self.triton.index() if model == name]
            if not (loaded and await self.stands_in(name, loaded[-1])):
                where = self.repository_models.repository.resolve()
                raise _model_failed(f"Triton does not read {where}, where version {version} is served")
        return await asyncio.to_thread(self._size, resident)

    async def stands_in(self, name: str, version: str) -> bool:
        """Return True if `version`, which Triton has loaded, is one of a copy alone and has the same interface.

        The interface is all that a configuration says but for the measurements of the build. With `verify_key` it is
        False: the signature of that version is not here. Raises ApiError.
        """
        served, folder = self.repository_models.configured(name).model, self.repository_models.repository / name
        may_differ = self.has_copy and self.verify_key is None
        if not may_differ or served is None or int(version) in version_numbers(folder):
            return False
        loaded = read_model(await self.triton.config(name, version), version)
        if loaded is None or loaded.interface != served.interface:
            return False
        message = "Triton at %s answers for %s with version %s of its copy of the repository; version %s is served here"
        logging.getLogger(__name__).warning(message, self.url, name, version, served.version)
        return True

    def _refuse_unsigned(self, name: str, which: VersionSelector) -> None:
        """Raise RepositoryError for an unsigned model. To replace a version, Triton loads both."""
        if self.verify_key is not None:
            repository = self.repository_models.repository
            problems = unsigned(repository, self.verify_key, [name], which)
            if problems:
                see = f"build-repo verify {repository} --key {self.verify_key}"
                raise RepositoryError(f"{problems[0]}. It is not loaded; see all: {see}")

    async def unload(self, name: str) -> None:
        """Unload a front or an engine. Returns once its memory is free. Raises ApiError."""
        stubs = await asyncio.to_thread(self.processes.of, [name])
        await self.triton.unload(name)
        end = time.monotonic() + UNLOAD_TIMEOUT_S
        while time.monotonic() < end:
            if not (any(stub.is_alive for stub in stubs) if stubs else name in await self.triton.models_in_memory()):
                return
            await asyncio.sleep(PROCESS_POLL_S if stubs else INDEX_POLL_S)
        message = "%s still uses memory %.0f s after it was unloaded"
        logging.getLogger(__name__).warning(message, name, UNLOAD_TIMEOUT_S)

    async def _load_one(self, name: str) -> None:
        """Load a model; retry once if its process was killed meanwhile."""
        try:
            await self.triton.load(name)
        except ApiError as error:
            if PROCESS_KILLED not in error.message:
                raise
            await self.triton.load(name)

    def _size(self, resident: ResidentModel) -> int | None:
        stubs = self.processes.of((resident.name, *resident.engines))
        return sum(size_of(stub.pid) for stub in stubs) or None


def _switch(url: str, repository: Path, name: str) -> None:
    with Control(url, repository) as control:
        control.switch(name)


def _model_failed(reason: str) -> ApiError:
    return ApiError(503, reason, code="model_failed")
