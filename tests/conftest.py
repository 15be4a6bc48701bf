"""Fixtures: checkpoints and repositories are created once for all workers, in folders that pytest removes.

Tests that share an expensive fixture run on one worker (`--dist loadgroup`); tests/sharing.py assigns them.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from builder.building.pipeline import build
from builder.building.variants import timing, traffic
from builder.clusters.ray.cluster import LOOPBACK, RAY_TIMEOUTS
from builder.common.cache import entries
from builder.engines.gpu import gpus
from builder.options import make_spec
from builder.serving.client.client import Client
from builder.serving.server.triton import TritonServer, running
from tests.cached_exports import cached_exports, user_folder
from tests.cached_probes import cached_probes
from tests.models import NAMES, REAL, checkpoint_of, join, minilm, options_of
from tests.once import changed, once
from tests.sharing import Sharing

settings.register_profile(  # the same on every machine, however slow
    "here", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")

os.environ["BUILD_REPO_CACHE"] = "off"  # every stage runs; commands that tests start inherit this
os.environ.update({**LOOPBACK, **RAY_TIMEOUTS})  # Ray reads them as it is imported, and some test modules import Ray
torch.set_num_threads(1)  # each worker is a separate process
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands that tests start
gc.set_threshold(50_000, 20, 20)  # exports create millions of objects, nearly all of which stay


@pytest.fixture(scope="session", autouse=True)
def _short_timings() -> Iterator[None]:
    """Measure latencies with the fewest possible runs.

    Use one core per worker: a second thread of ONNX Runtime would spin on the core of another worker.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0})
        patch.setattr(timing, "MEASURED_S", 0.0)
        patch.setattr(traffic, "MAX_MEASURED_S", 0.0)
        patch.setattr(timing, "WARM_UP_RUNS", 1)
        patch.setattr(timing, "MIN_RUNS", 2)
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache_on_a_full_disk() -> Iterator[None]:
    """Let the build cache keep stages however full the disk is; tests of its limit set their own share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "FREE_DISK_SHARE", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_flushes() -> Iterator[None]:
    """Leave writing to the disk to the system: a test cannot lose power, and waits for the writes of other workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return a folder of this run, the same for every worker."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Return a function that creates folders, removed after the tests of a module to save gigabytes."""
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(tmp_path_factory.mktemp(name))
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def _nobody_changes_what_is_shared(shared: Path) -> Iterator[None]:
    yield
    folders = [done.parent for where in ("checkpoints/*", "built/*", "served") for done in shared.glob(f"{where}/done")]
    assert [file for folder in folders for file in changed(folder)] == [], "a test wrote to what others share"


@pytest.fixture(scope="session", autouse=True)
def _exports_once(shared: Path) -> Iterator[None]:
    """Export each model once: an export of a known model returns the earlier graph."""
    with cached_exports(user_folder(), shared / "exports"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _probes_once(shared: Path) -> Iterator[None]:
    """Try each tokenizer and chat template once in a process with limits."""
    with cached_probes(shared / "probes"):
        yield


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> Callable[[str], Path]:
    """Return the checkpoint of a model in tests/models.py, created at its first use. Tests must not change it."""

    def get(name: str) -> Path:
        folder = shared / "checkpoints" / name
        once(folder, lambda: checkpoint_of(name, folder))
        return folder / f"{name}-checkpoint"

    return get


@pytest.fixture(scope="session")
def built(shared: Path, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """Build a repository of one model of tests/models.py at its first use. Tests must not change it."""

    def get(name: str) -> Path:
        folder = shared / "built" / name / "model_repository"
        model, options = str(minilm() if name in REAL else checkpoint(name)), options_of(name)
        once(folder.parent, lambda: build(make_spec(model=model, name=name, output=folder, **options)))
        return folder

    return get


@pytest.fixture(scope="session")
def repository(shared: Path, built: Callable[[str], Path]) -> Path:
    """Return all models of tests/models.py: the generated ones, and the real MiniLM in several precisions."""
    folder = shared / "served" / "model_repository"
    once(folder.parent, lambda: join([built(name) for name in NAMES], folder))
    return folder


@pytest.fixture(scope="session")
def small_repository(built: Callable[[str], Path]) -> Path:
    """Return one model, `topics`: a server on it starts in a fraction of the time that `repository` takes."""
    return built("topics")


@pytest.fixture(scope="session")
def server(repository: Path) -> Iterator[TritonServer]:
    """Run a real Triton on `repository`."""
    with running(repository) as server:
        yield server


@pytest.fixture
def client(server: TritonServer) -> Iterator[Callable[[str], Client]]:
    """Return a gRPC client of one of the served models."""
    clients: list[Client] = []

    def connect(name: str) -> Client:
        clients.append(Client(server.url, name))
        return clients[-1]

    yield connect
    for one in clients:
        one.__exit__()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_report_header() -> str:
    """Report the free disk space: a full disk causes hundreds of unrelated errors."""
    folder = tempfile.gettempdir()
    return f"disk: {shutil.disk_usage(folder).free / 1e9:.1f} GB free in {folder}; a run takes 2"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing | None:
    """Schedule `--dist loadgroup` by the fixtures that tests share."""
    return Sharing(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_finish() -> None:
    """Freeze the objects of imported modules, so that the garbage collector skips them.

    A full collection took a second, and a build of large weights runs one at each stage.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the slow tests first if there are several workers, so that all finish at about the same time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that need the served repository, and skip tests that need a GPU on a machine without one."""
    if "repository" in _fixtures(item):
        item.add_marker(pytest.mark.served)
    if item.get_closest_marker("gpu") and not gpus():
        item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


def _fixtures(item: pytest.Item) -> dict[str, str]:
    """Return the scopes of a test's fixtures by name; `repository` only if it is the one of this file."""
    assert isinstance(item, pytest.Function)
    definitions = {
        name: definitions_of_name[-1] for name, definitions_of_name in item._fixtureinfo.name2fixturedefs.items()
    }
    return {
        name: definition.scope
        for name, definition in definitions.items()
        if name != "repository" or definition.scope == "session"
    }
