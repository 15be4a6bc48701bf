"""Fixtures: checkpoints and repositories are made once a worker, in folders that pytest removes."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from builder.engines.gpu import gpus
from builder.serve.client import Client
from builder.serve.triton import Server, running
from builder.spec import make_spec
from builder.stages import build
from tests.models import GENERATORS, READERS, REAL, SERVED, checkpoint_of, minilm

settings.register_profile("here", deadline=None, derandomize=True, database=None)  # the same on every machine
settings.load_profile("here")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a model in tests/models.py, made at its first use."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = checkpoint_of(name, tmp_path_factory.mktemp("checkpoints"))
        return made[name]

    return get


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path], worker_id: str) -> Path:
    """All models of tests/models.py and the real MiniLM in fp32 and int8, built by the product itself.

    One repository for all workers: the first to need it builds it, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    folder, done = shared / "served" / "model_repository", shared / "served-is-built"
    with (shared / "served-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _build_all(folder, checkpoint)
            done.touch()
    return folder


def _build_all(folder: Path, checkpoint: Callable[[str], Path]) -> None:
    for name, model in SERVED.items():
        build(make_spec(model=str(checkpoint(name)), name=name, task=model.task, output=folder, **model.spec))
    for name, (_, options) in GENERATORS.items():
        build(make_spec(model=str(checkpoint(name)), name=name, output=folder, **options))
    for name, (_, _, options) in READERS.items():
        build(make_spec(model=str(checkpoint(name)), name=name, output=folder, **options))
    for name, options in REAL.items():
        build(make_spec(model=str(minilm()), name=name, output=folder, **options))


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[Server]:
    """A real Triton on `repository`."""
    with running(repository) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Callable[[str], Client]]:
    """A gRPC client of one of the served models."""
    clients: list[Client] = []

    def connect(name: str) -> Client:
        clients.append(Client(server.url, name))
        return clients[-1]

    yield connect
    for one in clients:
        one.__exit__()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked gpu runs where there is one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpus():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
