"""Start of a local Ray cluster, with a stand-in for ray."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from builder.clusters.ray.cluster import START_ATTEMPTS, connected
from builder.common.errors import ServeError


class FakeRay(ModuleType):
    """Module that fails to start a node `failures` times."""

    def __init__(self, failures: int) -> None:
        super().__init__("ray")
        self.failures, self.calls = failures, list[str]()

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: Any) -> None:
        self.calls.append("init")
        if self.calls.count("init") <= self.failures:
            raise RuntimeError("the agent has not written its port")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


def test_local_cluster_is_started_again_if_its_node_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on a busy machine two of three starts of `serve --ray` failed."""
    ray = FakeRay(START_ATTEMPTS - 1)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with connected(None):
        assert ray.calls == [*["init", "shutdown"] * (START_ATTEMPTS - 1), "init"]
    assert ray.calls[-1] == "shutdown"


@pytest.mark.parametrize(("address", "starts"), [(None, START_ATTEMPTS), ("10.0.0.1:6379", 1)])
def test_cluster_that_does_not_start_is_an_error(
    address: str | None, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(99)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ServeError, match=r"no Ray cluster at .*: the agent has not written"), connected(address):
        pass
    assert ray.calls == ["init", "shutdown"] * starts
