"""A real S3 server, started once for the tests of a worker."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from builder.stores.store import Store, open_store
from builder.triton import versions

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture(autouse=True)
def _no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server reads what is published here."""
    monkeypatch.setattr(versions, "OVERLAP_S", 0.0)


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new bucket, and an environment in which s3:// is that server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    name = f"models-{next(NUMBERS)}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture
def store(bucket: str) -> Store:
    return open_store(f"s3://{bucket}/fleet")


@pytest.fixture
def raw(bucket: str) -> Callable[[str], bytes | None]:
    """What is in an object of the bucket, by its key; None where there is none."""
    client = boto3.client("s3")

    def read(key: str) -> bytes | None:
        try:
            body: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        return body

    return read
