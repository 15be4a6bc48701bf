"""The arguments of the application, and the loaded models of a replica."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import pytest

from builder.clusters.ray import replica
from builder.clusters.ray.cluster import LOOPBACK, RAY_SETTINGS, RAY_TIMEOUTS, connected, read_options
from builder.clusters.ray.replica import LoadedModel
from builder.commands import serve
from builder.common.errors import ServeError, SpecError
from builder.serving.server.triton import Ports, TritonServer


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({}, "repository: Field required"),
        ({"repository": "r", "replicas": 2}, "replicas: Extra inputs"),
        ({"repository": "r", "min_replicas": 3, "max_replicas": 2}, "max_replicas is 2, less than min_replicas, 3"),
        ({"repository": "r", "busy": 0}, "busy: .* greater than 0"),
    ],
)
def test_read_options_names_invalid_arguments(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(SpecError, match=wrong):
        read_options(arguments)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ray"], "--ray needs --openai-port"),
        (["--ray", "--openai-port", "9000", "--strict"], "leave out --load-on-demand, --strict"),
        (["--replicas", "2"], "--replicas and --models-per-replica are of --ray"),
        (["--ray", "--openai-port", "9000", "--replicas", "3:2"], "max_replicas is 2, less than min_replicas, 3"),
    ],
)
def test_serve_refuses_options_that_exclude_one_another(arguments: list[str], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        serve.run(serve.parser().parse_args(arguments))


def test_connect_reports_a_cluster_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception then."""

    def init(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    for name, value in {**RAY_SETTINGS, **LOOPBACK}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ray.init", init)
    with (
        pytest.raises(ServeError, match="no Ray cluster at this machine, in 3 attempts: The current node timed out"),
        connected(None),
    ):
        pass


def test_ray_timeouts_are_longer_unless_the_user_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsaid, *stated = RAY_TIMEOUTS
    longer = {name: f"{RAY_TIMEOUTS[name]}0" for name in stated}
    for name, value in {**RAY_SETTINGS, **LOOPBACK, **RAY_TIMEOUTS, **longer}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(unsaid)
    environment: dict[str, str] = {}
    monkeypatch.setattr("ray.init", lambda **options: environment.update(os.environ))
    monkeypatch.setattr("ray.shutdown", lambda: None)
    with connected(None):
        pass
    assert environment.items() >= {**longer, unsaid: RAY_TIMEOUTS[unsaid]}.items()


class FakeControl(AbstractContextManager["FakeControl"]):
    """serve.control.Control that only records its calls."""

    calls: list[tuple[str, str]]

    def __init__(self, url: str, repository: Path) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def again(self, name: str) -> None:
        self.calls.append(("load", name))

    def unload(self, name: str) -> None:
        self.calls.append(("unload", name))


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Return a model that is loaded on a running server."""
    monkeypatch.setattr(FakeControl, "calls", [], raising=False)
    monkeypatch.setattr(replica, "Control", FakeControl)
    process = cast("subprocess.Popen[str]", type("Running", (), {"poll": lambda self: None})())
    return LoadedModel(TritonServer("", Ports(), process, [], True, tmp_path), "topics")


def test_loaded_model_is_unloaded_after_its_last_lease(loaded: LoadedModel) -> None:
    lease = loaded.lease()
    lease.__enter__()
    deleting = threading.Thread(target=loaded.__del__)
    deleting.start()
    deleting.join(0.1)
    assert deleting.is_alive()
    assert FakeControl.calls == [("load", "topics")]
    lease.__exit__(None, None, None)
    deleting.join(300)
    assert FakeControl.calls == [("load", "topics"), ("unload", "topics")]


def test_loaded_model_is_unloaded_only_once(loaded: LoadedModel) -> None:
    loaded.__del__()
    loaded.__del__()
    assert FakeControl.calls == [("load", "topics"), ("unload", "topics")]
