"""The served repository of this folder's tests, on the backend libraries in the folder that BACKENDS names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.options import make_spec
from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer, running
from tests.models import REAL, SERVED, minilm

EMBEDDED = "24.10"  # the release of the embedded server, and so of backends that it can open


@pytest.fixture(scope="session")
def backends() -> Path:
    return Path(os.environ["BACKENDS"]).resolve()


@pytest.fixture(scope="session")
def repository(backends: Path, checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the encoders of tests/models.py whose engine is in the folder, built for the embedded server's release."""
    folder = tmp_path_factory.mktemp("stock") / "model_repository"
    models = {name: ({"model": str(checkpoint(name)), "task": m.task, **m.spec}) for name, m in SERVED.items()}
    models |= {name: {"model": str(minilm()), **options} for name, options in REAL.items()}
    for name, options in models.items():
        if (backends / options.get("engine", "onnxruntime")).is_dir():
            build(make_spec(name=name, output=folder, triton=EMBEDDED, **{**options, "executor": "bls"}))
    return folder


@pytest.fixture(scope="session")
def server(repository: Path, backends: Path) -> Iterator[TritonServer]:
    with running(repository, backends=backends) as server:
        yield server


@pytest.fixture
def client(server: TritonServer, repository: Path, backends: Path) -> Iterator[Callable[[str], Client]]:
    """Return a gRPC client of one of the served models; skip tests of other models."""
    clients: list[Client] = []

    def connect(name: str) -> Client:
        if not (repository / name).is_dir():
            pytest.skip(f"the engine of {name} is not in {backends}")
        clients.append(Client(server.url, name))
        return clients[-1]

    yield connect
    for one in clients:
        one.__exit__()
