"""Refuse to start the embedded Triton where it cannot work, each time with the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tritonclient.grpc import model_config_pb2

from builder.common.addresses import is_loopback
from builder.common.engines import ENGINES
from builder.common.errors import RepositoryError, ServeError
from builder.engines import missing
from builder.engines.gpu import gpus
from builder.engines.tensorrt_llm import engine as tensorrt_llm
from builder.engines.vllm import engine as vllm
from builder.repository.check import pending
from builder.repository.config.render import parse
from builder.repository.lint.repository import Repository
from builder.repository.signatures import unsigned
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.stubs import SHARED_MEMORY

SHARED_MEMORY_NEEDED = 256 << 20
KIND_GPU = model_config_pb2.ModelInstanceGroup.KIND_GPU


def refuse_host(host: str) -> None:
    """Raise ServeError for an address that other machines reach."""
    if not is_loopback(host):
        raise ServeError(
            f"the embedded Triton, {EMBEDDED}, does not listen on {host}: whoever reaches it can run code in it "
            "(CVE-2025-23319, mended in 25.07). Put the gateway on that address, build-repo gateway --host, use the "
            "container, or say that everybody there may: --insecure-bind"
        )


def refuse_unsigned(repository: Path, key: Path, names: Sequence[str] = ()) -> None:
    """Raise ServeError if a model, or one of `names`, differs from what was signed with `key`."""
    problems = unsigned(repository, key, names)
    if problems:
        see = f"build-repo verify {repository} --key {key}"
        nothing = f"No new process of {', '.join(names)}" if names else f"Nothing of {repository}"
        raise ServeError(f"{problems[0]}. {nothing} is served; see all: {see}")


def refuse_repository(repository: Path, backends: Path, strict: bool) -> None:
    """Raise ServeError for a repository that this machine, or the server with `backends`, cannot run.

    `strict`: every model must load, and an unreadable configuration raises RepositoryError.
    """
    if not repository.is_dir() or not any(repository.glob("*/config.pbtxt")):
        raise ServeError(f"{repository} holds no model; build one first: build-repo MODEL --output {repository}")
    refused = [*pending(repository).values(), *_unsupported_models(repository, _backend_names(backends), strict)]
    refused += _models_without_engine(repository)
    if refused:
        raise ServeError(refused[0])
    refuse_machine()


def refuse_machine() -> None:
    """Raise ServeError if Python models do not run here, whatever the repository."""
    if int(np.__version__.split(".")[0]) >= 2:
        raise ServeError(f"numpy {np.__version__} corrupts tensors in this server's Python backend: install numpy<2")
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < SHARED_MEMORY_NEEDED:
        free = shutil.disk_usage(SHARED_MEMORY).free >> 20
        raise ServeError(
            f"{SHARED_MEMORY} has {free} MB free; the Python backend needs {SHARED_MEMORY_NEEDED >> 20} MB: enlarge it "
            "(docker: --shm-size 1g) or remove what fills it"
        )


def _models_without_engine(repository: Path) -> list[str]:
    """Return the problems of models whose engine is an extra that is not installed."""
    reasons = {facts.model_file: reason for name, facts in ENGINES.items() if (reason := missing(name)) is not None}
    return [
        f"{version.model.name}: {reason}"
        for version in (Repository(repository).versions if reasons else ())
        for file, reason in reasons.items()
        if version.is_served and (version.path / file).is_file()
    ]


def _backend_names(backends: Path) -> set[str]:
    """Return the names of the backends in `backends`. Raises ServeError if there are none."""
    libraries = {path.parent.name for path in backends.glob("*/libtriton_*.so")}
    names = libraries | {path.parent.name for path in backends.glob("*/model.py")}
    if not names:
        raise ServeError(f"{backends} holds no backend: expected NAME/libtriton_NAME.so in it")
    return names


def _unsupported_models(repository: Path, backends: set[str], strict: bool) -> list[str]:
    """Return the problems of models that this machine, or the embedded Triton with `backends`, cannot run.

    Raises RepositoryError for an unreadable configuration if every model must load (`strict`).
    """
    missing = []
    here = backends | {"python"}
    for path in sorted(repository.glob("*/config.pbtxt")):
        name = path.parent.name
        try:
            config = parse(path.read_text("utf-8", "replace"), name)
        except RepositoryError:
            if strict:
                raise
            continue  # Triton does not load it either
        if config.backend and config.backend not in here:
            profile = "vllm" if config.backend == vllm.BACKEND else "gpu"
            missing.append(
                f"{name}: the embedded Triton has no {config.backend}; serve it in the container: "
                f"docker compose --profile {profile} up"
            )
        elif any(path.parent.glob(f"*/{tensorrt_llm.MODEL_FILE}")):
            missing.append(
                f"{name}: the embedded Triton has no TensorRT-LLM; serve it in the trtllm-python-py3 container"
            )
        elif any(group.kind == KIND_GPU for group in config.instance_group) and not gpus():
            missing.append(
                f"{name} runs on a GPU and none is here; serve it where there is one, or build it for the CPU"
            )
    return missing
