"""The arguments of the application, and the start of a cluster."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from builder.clusters.ray.cluster import (
    LOOPBACK,
    NAME,
    RAY_SETTINGS,
    RAY_TIMEOUTS,
    connected,
    read_options,
    serving,
)
from builder.commands import serve
from builder.commands.gateway import parser
from builder.common.errors import ServeError, SpecError


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


def test_gateways_get_the_keys_and_limits_of_the_arguments() -> None:
    """Regression: gateways that Ray runs could not share limits, and each counted its own."""
    limits = {"requests_per_minute": 600, "tokens_per_minute": 9000, "limits": "valkey://10.0.0.9:6379"}
    words = read_options({"repository": "r", "keys_file": "keys", **limits}).gateway_options
    given = parser().parse_args(words)
    assert str(given.keys) == "keys"
    assert {name: getattr(given, name) for name in limits} == limits
    assert read_options({"repository": "r"}).gateway_options == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--ray"], "--ray needs --openai-port"),
        (["--ray", "--openai-port", "9000", "--strict"], "leave out --strict"),
        (["--ray", "--openai-port", "9000", "--load-on-demand"], "--memory-gb N"),
        (["--replicas", "2"], "--replicas is of --ray"),
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


@pytest.mark.parametrize(("others", "ends"), [([], ["shutdown"]), (["translator"], ["delete"])])
def test_serving_leaves_other_applications_of_a_cluster(
    others: list[str], ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the end of `serve --ray` ended every application of the cluster."""
    ended: list[str] = []
    status = SimpleNamespace(applications=dict.fromkeys([NAME, *others]))
    for name, stand_in in {
        "ray.serve.start": lambda **options: None,
        "ray.serve.run": lambda *application, name: None,
        "ray.serve.status": lambda: status,
        "ray.serve.delete": lambda name, _blocking: ended.append("delete"),
        "ray.serve.shutdown": lambda: ended.append("shutdown"),
        "builder.clusters.ray.application.application": lambda arguments: None,
        "builder.clusters.ray.gateway.ray_gateway": lambda *arguments, say: nullcontext(),
    }.items():
        monkeypatch.setattr(name, stand_in)
    with serving(read_options({"repository": "r"}), "127.0.0.1", 9000):
        assert not ended
    assert ended == ends


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
