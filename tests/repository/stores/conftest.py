"""Real servers of object stores, each started once for the tests of a worker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import boto3
import pytest
from google.auth.compute_engine import _metadata

from builder.repository import versions
from builder.repository.stores.store import Store, open_store
from tests.repository.stores.emulators import HOST, SERVERS, environment

NUMBERS = itertools.count()
OTHERS = ("AWS_", "AZURE_", "GOOGLE_", "GCSFS_", "STORAGE_")
Port = Callable[[str], int]
Reach = Callable[[str, str], None]


@pytest.fixture(scope="session")
def port_of() -> Iterator[Port]:
    """Return a function that returns the port of a scheme's server, started at the first call."""
    with ExitStack() as servers:
        ports: dict[str, int] = {}

        def port(scheme: str) -> int:
            if scheme not in ports:
                ports[scheme] = servers.enter_context(SERVERS[scheme]())
            return ports[scheme]

        yield port


@pytest.fixture(autouse=True)
def _no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the overlap of versions to zero, because no server reads these repositories."""
    monkeypatch.setattr(versions, "OVERLAP_S", 0.0)


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> Reach:
    """Point a scheme to an endpoint, and hide all other store settings of this environment."""
    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(_metadata, "_NO_GCE_CHECK", True)  # read from the environment at import

    def at(scheme: str, endpoint: str) -> None:
        for name, value in environment(scheme, endpoint).items():
            monkeypatch.setenv(name, value)

    return at


@pytest.fixture
def make_bucket(port_of: Port, reach: Reach) -> Callable[[str], str]:
    """Return a function that creates a bucket on a scheme's server, sets the environment, and returns the name."""

    def make(scheme: str) -> str:
        reach(scheme, f"http://{HOST}:{port_of(scheme)}")
        name = f"models-{next(NUMBERS)}"
        open_store(f"{scheme}://{name}").files.mkdir(name)
        return name

    return make


@pytest.fixture
def bucket(make_bucket: Callable[[str], str]) -> str:
    """Return a new bucket of the S3 server."""
    return make_bucket("s3")


@pytest.fixture
def store(bucket: str) -> Store:
    return open_store(f"s3://{bucket}/fleet")


@pytest.fixture(params=["s3", "gs", "az"])
def cloud(request: pytest.FixtureRequest, make_bucket: Callable[[str], str]) -> Store:
    """Return a store of each kind but folders."""
    return open_store(f"{request.param}://{make_bucket(request.param)}/fleet")


@pytest.fixture
def raw(bucket: str) -> Callable[[str], bytes | None]:
    """Return the content of an object by its key; None if it does not exist."""
    client = boto3.client("s3")

    def read(key: str) -> bytes | None:
        try:
            body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        return body

    return read


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return the repository that builds publish to."""
    return tmp_path / "built" / "model_repository"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the repository that is served."""
    (tmp_path / "served").mkdir()
    return tmp_path / "served" / "model_repository"
