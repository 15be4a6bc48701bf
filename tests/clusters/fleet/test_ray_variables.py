"""Environment variables that a task on Ray inherits."""

from __future__ import annotations

import pytest

from builder.clusters.fleet.ray import forwarded_variables


def test_ray_tasks_do_not_get_the_gateways_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: every task of a fleet on Ray had the gateway's secrets in its environment."""
    monkeypatch.setenv("BUILD_REPO_GATEWAY_KEYS", "secret")
    monkeypatch.setenv("BUILD_REPO_GATEWAY_ADMIN_KEY", "secret")
    monkeypatch.setenv("BUILD_REPO_CACHE_GB", "5")
    variables = forwarded_variables()
    assert "secret" not in variables.values()
    assert variables["BUILD_REPO_CACHE_GB"] == "5"
