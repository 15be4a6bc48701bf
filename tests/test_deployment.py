"""docker-compose.yml and what it mounts: valid, of one release, and pointing at what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

from builder.engines.releases import RELEASES
from builder.spec import BuildSpec

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
SERVERS = ("triton", "triton-gpu", "triton-vllm")


def test_it_is_valid_against_the_compose_specification() -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    assert [error.message for error in Draft7Validator(schema).iter_errors(COMPOSE)] == []
    broken = {**COMPOSE, "services": {"triton": {"image": 3}}}
    assert list(Draft7Validator(schema).iter_errors(broken)), "the schema can say no"


def test_every_nvidia_image_follows_one_release_which_is_known() -> None:
    images = [service["image"] for service in SERVICES.values() if "nvcr.io" in service["image"]]
    assert len(images) == 5
    tags = {re.search(r"\$\{TRITON_RELEASE:-([\d.]+)\}", image)[1] for image in images}  # type: ignore[index]
    assert tags == {BuildSpec.model_fields["triton"].default}
    assert tags <= set(RELEASES)


def test_every_service_has_a_profile_and_is_reachable_from_this_machine_only() -> None:
    assert all(service["profiles"] for service in SERVICES.values())
    assert {"cpu", "gpu"} <= {profile for service in SERVICES.values() for profile in service["profiles"]}
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_has_shared_memory_and_says_when_it_is_ready(name: str) -> None:
    assert SERVICES[name]["shm_size"]
    assert SERVICES[name]["healthcheck"]["test"]
    assert SERVICES[name]["networks"]["default"]["aliases"] == ["server"]


@pytest.mark.parametrize("name", ["triton-gpu", "triton-vllm", "compile"])
def test_what_needs_a_gpu_asks_for_one(name: str) -> None:
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_what_is_mounted_is_there() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), source


def test_the_repository_is_written_by_compile_alone() -> None:
    writers = {n for n, s in SERVICES.items() if "./model_repository:/models" in s.get("volumes", ())}
    assert writers == {"compile"}
    assert "recipe/compile.py" in " ".join(SERVICES["compile"]["command"])


def test_prometheus_asks_the_server_and_grafana_asks_prometheus() -> None:
    folder = ROOT / "templates" / "monitoring"
    (job,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in SERVICES["triton"]["networks"]["default"]["aliases"]
    assert f"127.0.0.1:{port}:{port}" in SERVICES["triton"]["ports"]
    (source,) = yaml.safe_load((folder / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert any(place.startswith(provider["options"]["path"]) for place in mounted)


def test_every_panel_has_a_place_of_its_own_and_something_to_ask() -> None:
    dashboard = json.loads((ROOT / "templates" / "monitoring" / "dashboard.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["title"] for panel in dashboard["panels"]})
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "prometheus"
        assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])
