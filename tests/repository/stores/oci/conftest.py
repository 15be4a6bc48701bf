"""Registries, and the settings of docker that a test starts with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.repository.stores.opening import VersionStore, open_versions
from tests.repository.stores.emulators import HOST
from tests.repository.stores.oci.registries import StandIn, docker_registry, stand_in


@pytest.fixture(autouse=True)
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point to a file of docker's settings that does not exist, and return it."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker" / "config.json"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("client", "store"):
        monkeypatch.setattr(f"builder.repository.stores.oci.{module}.PAUSE_S", 0.0)


@pytest.fixture
def registry() -> Iterator[StandIn]:
    with stand_in() as started:
        yield started


@pytest.fixture
def url(registry: StandIn) -> str:
    return f"oci://{HOST}:{registry.port}/org/front"


@pytest.fixture
def store(url: str) -> VersionStore:
    return open_versions(url)


@pytest.fixture(params=["stand-in", "docker-registry"])
def any_port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """Return the port of each kind of registry."""
    if request.param == "stand-in":
        with stand_in() as started:
            yield started.port
    else:
        (tmp_path / "registry").mkdir()
        with docker_registry(tmp_path / "registry") as port:
            yield port


@pytest.fixture
def any_store(any_port: int) -> VersionStore:
    return open_versions(f"oci://{HOST}:{any_port}/org/front")
