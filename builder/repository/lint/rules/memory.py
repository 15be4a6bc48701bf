"""Memory

Weights, caches and tensors against the memory of this machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from builder.common.machine import total_memory
from builder.common.memory import BYTES_PER_VALUE, cache_bytes, state_bytes
from builder.engines import onnxruntime, openvino, session_engine
from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import ModelVersion, Repository
from builder.repository.lint.rule import WARNING, rule
from builder.runtime.contract import GenerationServing

SHARED_MEMORY = Path("/dev/shm")
SHM_PER_PROCESS = 1 << 20  # bytes that the Python backend takes for each instance at its start
DOCKER_SHM = 64 << 20  # bytes of /dev/shm in a container by default (--shm-size)


@rule(
    "TR451",
    WARNING,
    wrong="eight instances of a graph of 4 GB, on a machine of 16 GB",
    right="instance_group { count: 2 kind: KIND_CPU }",
)
def weights_and_caches_have_memory(repository: Repository) -> Iterator[Problem]:
    """Check that the weights of all instances and the caches of generating models fit into the machine's memory.

    Each instance of the ONNX Runtime backend, and each process of a Python model, has weights of its own; instances of
    OpenVINO share them. A model that generates reserves its cache when it loads. The check compares with this machine's
    memory.
    """
    needs = {model.name: sum(map(_bytes, model.versions)) for model in repository.by_name.values()}
    total = total_memory()
    if sum(needs.values()) > total:
        largest = max(needs, key=lambda name: needs[name])
        yield Problem(
            f"weights and caches of all models are {sum(needs.values()) / 1e9:.1f} GB and this machine has "
            f"{total / 1e9:.1f} GB; {needs[largest] / 1e9:.1f} GB are {largest}'s",
            "take fewer instances or slots, or serve fewer models from it",
            model=largest,
            file=repository.by_name[largest].file,
        )


def _bytes(version: ModelVersion) -> int:
    """Return the bytes of memory that a version takes at least; 0 if it is not served or uses a GPU's memory."""
    model = version.model
    if not version.is_served or model.is_on_gpu:
        return 0
    if version.serving is not None:
        graphs = sum(_size(folder / served.model) for folder, served in version.documents if served.model is not None)
        generating = [served for _, served in version.documents if isinstance(served, GenerationServing)]
        # A draft reads hidden states of each token that its target caches.
        read = sum(served.hidden_size for served in generating) * BYTES_PER_VALUE["float32"]
        states = sum(read * _cached_tokens(served) for served in generating if not served.hidden_size)
        return model.instances * (graphs + sum(map(_cache, generating)) + states)
    if model.config.backend == openvino.BACKEND:
        return _size(version.graph)
    return model.instances * _size(version.graph) if model.config.backend == onnxruntime.BACKEND else 0


def _size(graph: Path) -> int:
    """Return the bytes of a graph with its weights, which may lie in files beside it."""
    return sum(file.stat().st_size for file in graph.parent.glob(f"{graph.stem}.*") if file.is_file())


def _cache(served: GenerationServing) -> int:
    """Return the bytes of the keys, values and states of all slots, or of the blocks that they share."""
    arena = served.arena
    if arena.blocks is None:
        pairs = cache_bytes(arena.layers, arena.slots, arena.length, BYTES_PER_VALUE[arena.dtype])
        return pairs + arena.slots * state_bytes(arena.layers)
    engine = session_engine(served.session)
    return arena.blocks * engine.block_bytes(arena.layers, arena.dtype) + arena.slots * engine.state_bytes(arena.layers)


def _cached_tokens(served: GenerationServing) -> int:
    """Return how many tokens the cache has places for."""
    arena = served.arena
    if arena.blocks is None:
        return arena.slots * arena.length
    return arena.blocks * session_engine(served.session).block_tokens(arena.layers)


@rule(
    "TR452",
    WARNING,
    wrong="docker run --gpus all nvcr.io/nvidia/tritonserver",
    right="docker run --gpus all --shm-size 1g nvcr.io/nvidia/tritonserver",
    source="python_backend, README.md, shm-default-byte-size",
)
def processes_have_shared_memory(repository: Repository) -> Iterator[Problem]:
    """Check that /dev/shm has memory for the tensors of every process of a Python model.

    Triton and a process of a model exchange tensors in shared memory. Docker gives a container 64 MB by default; a
    large batch then fails, or ends the server with a bus error. If Triton runs in another container than this check,
    look there.
    """
    processes = sum(model.instances for model in repository.by_name.values() if model.config.backend == "python")
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None
    if processes and size is not None and size < max(DOCKER_SHM + 1, processes * SHM_PER_PROCESS):
        yield Problem(
            f"{SHARED_MEMORY} has {size >> 20} MB, for {processes} processes of Python models",
            "enlarge it: docker run --shm-size 1g",
        )
