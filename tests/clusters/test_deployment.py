"""docker-compose.yml and its mounts: valid, of one release, and pointing at existing files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft7Validator

from builder.common.releases import NEWEST, OPTIONS, RELEASES, version_tuple
from builder.options import BuildSpec
from builder.repository.config.arguments import WATCH
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.process import end_group
from tests.serving.embedded import embedded_options

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, Any] = COMPOSE["services"]
WHOLE = ("triton-vllm", "triton-trtllm")  # their engines run checkpoints as they are
SERVERS = ("triton", "triton-gpu", *WHOLE)


def test_compose_file_is_valid_against_the_specification() -> None:
    schema = get_builtin_schema("vendor.compose-spec")
    assert [error.message for error in Draft7Validator(schema).iter_errors(COMPOSE)] == []
    broken = {**COMPOSE, "services": {"triton": {"image": 3}}}
    assert list(Draft7Validator(schema).iter_errors(broken)), "the schema can say no"


def _release(image: str) -> str:
    """Return the default of an image's tag."""
    match = re.search(r"\$\{TRITON_RELEASE:-([\d.]+)\}", image)
    assert match is not None, image
    return match[1]


def test_nvidia_images_share_one_known_release() -> None:
    images = [service["image"] for service in SERVICES.values() if "nvcr.io" in service.get("image", "")]
    assert len(images) == 4
    images += [
        service["build"]["args"]["TRITON_RELEASE"]
        for service in SERVICES.values()
        if "args" in service.get("build", {})
    ]
    assert len(images) == 6
    tags = {_release(image) for image in images}
    tags |= set(re.findall(r"^ARG TRITON_RELEASE=(.*)$", DOCKERFILE, re.MULTILINE))
    assert tags == {BuildSpec.model_fields["triton"].default}
    assert tags <= set(RELEASES)


def test_services_have_a_profile_and_publish_ports_on_loopback() -> None:
    assert all(service["profiles"] for service in SERVICES.values())
    assert {"cpu", "gpu"} <= {profile for service in SERVICES.values() for profile in service["profiles"]}
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", SERVERS)
def test_servers_have_shared_memory_and_a_health_check(name: str) -> None:
    assert SERVICES[name]["shm_size"]
    assert SERVICES[name]["healthcheck"]["test"]
    assert SERVICES[name]["networks"]["default"]["aliases"] == ["server"]


@pytest.mark.parametrize("name", ["triton-gpu", *WHOLE, "compile"])
def test_gpu_services_reserve_a_gpu(name: str) -> None:
    (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def test_mounted_paths_exist() -> None:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            if source in ("./vllm_repository", "./trtllm_repository"):  # the user's, as --output of their builds
                continue
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), source


def test_only_compile_mounts_the_repository_writable() -> None:
    writers = {n for n, s in SERVICES.items() for volume in s.get("volumes", ()) if volume.endswith(":/models")}
    assert writers == {"compile"}
    assert "recipe/compile.py" in " ".join(SERVICES["compile"]["command"])


def test_prometheus_scrapes_the_server_and_grafana_reads_prometheus() -> None:
    folder = ROOT / "templates" / "monitoring"
    job, gateway = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    assert gateway["static_configs"] == [{"targets": ["gateway:9000"]}]
    assert SERVICES["gateway"]["ports"] == ["127.0.0.1:9000:9000"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in SERVICES["triton"]["networks"]["default"]["aliases"]
    assert f"127.0.0.1:{port}:{port}" in SERVICES["triton"]["ports"]
    (source,) = yaml.safe_load((folder / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert any(path.startswith(provider["options"]["path"]) for path in mounted)


def test_dashboard_panels_do_not_overlap_and_have_valid_queries() -> None:
    dashboard = json.loads((ROOT / "templates" / "monitoring" / "dashboard.json").read_text())
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["title"] for panel in dashboard["panels"]})
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "prometheus"
        assert all(target["expr"].count("(") == target["expr"].count(")") for target in panel["targets"])


def test_dashboard_shows_what_triton_says_of_gpus() -> None:
    """The names are those of Triton's docs/user_guide/metrics.md; a server without a GPU has none of them."""
    said = {f"nv_gpu_{name}" for name in ("utilization", "memory_used_bytes", "memory_total_bytes")}
    said |= {"nv_gpu_power_usage", "nv_gpu_power_limit"}
    assert set(re.findall(r"nv_gpu_\w+", (ROOT / "templates/monitoring/dashboard.json").read_text())) == said


def test_server_images_install_requirements_at_build_time() -> None:
    for name in ("triton", "triton-gpu"):
        service = SERVICES[name]
        assert "pip" not in " ".join(service["command"]), "nothing is installed at a start"
        assert (ROOT / "builder" / "runtime" / service["build"]["args"]["REQUIREMENTS"]).is_file()
        assert any(argument.startswith("--cache-config=local,") for argument in service["command"])
        assert service["read_only"]
    assert "install --directory --owner=1000 --group=1000 /engines" in DOCKERFILE, "of whoever writes there"


def test_gateway_image_has_the_requirements_of_the_project() -> None:
    """Its packages are those of the extras `gateway` and `limits`, and the dependencies that it needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.replace("; platform_system == 'Linux'", "") for line in project["dependencies"]}
    named |= {line for extra in ("gateway", "limits") for line in project["optional-dependencies"][extra]}
    lines = (ROOT / "builder" / "serving" / "gateway" / "requirements.txt").read_text().splitlines()[1:]
    assert set(lines) <= named
    assert set(project["optional-dependencies"]["gateway"]) <= set(lines)
    dockerfile = (ROOT / SERVICES["gateway"]["build"]["dockerfile"]).read_text()
    for source in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / name).exists() for name in source.split())
    assert 'ENTRYPOINT ["build-repo", "gateway"]' in dockerfile


def test_pages_name_build_arguments_requirements_and_variables() -> None:
    page = "".join((ROOT / "docs" / name).read_text() for name in ("guides/deployment.md", "reference/containers.md"))
    taken = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
    assert set(re.findall(r"--build-arg (\w+)=", page)) == taken
    for name, service in SERVICES.items():
        assert set(service.get("build", {}).get("args", taken)) == taken, name
    files = set(re.findall(r"\brequirements[\w-]*\.txt", page))
    assert files == {path.name for path in (ROOT / "builder" / "runtime").glob("requirements*.txt")}
    variables = set(re.findall(r"\$\{(\w+):-", (ROOT / "docker-compose.yml").read_text()))
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == variables


def test_servers_of_other_engines_mount_different_repositories() -> None:
    mounted = [SERVICES[name]["volumes"][0] for name in (*WHOLE, "triton-gpu")]
    assert all(volume.endswith(":/models:ro") for volume in mounted)
    assert len({volume.split(":/models")[0] for volume in mounted}) == 3


@pytest.mark.parametrize("name", WHOLE)
def test_server_of_whole_checkpoints_has_hub_token_and_kept_cache(name: str) -> None:
    service = SERVICES[name]
    assert service["environment"]["HF_TOKEN"] == "${HF_TOKEN:-}"
    assert "huggingface:/root/.cache/huggingface" in service["volumes"]
    assert "huggingface" in COMPOSE["volumes"]


def test_containers_run_unprivileged_and_read_only() -> None:
    for name, service in SERVICES.items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        if name != "compile":  # it writes plans into the repository
            assert service["cap_drop"] == ["ALL"], name
            assert service["read_only"] is (name not in WHOLE), name
    assert {SERVICES[name]["user"] for name in ("triton", "triton-gpu")} == {"1000:1000"}
    assert "USER 1000:1000" in DOCKERFILE
    assert "USER nobody" in (ROOT / "Dockerfile.gateway").read_text()


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("key", ["", "of the user"])
def test_server_starts_with_restricted_admin_protocols(name: str, key: str, tmp_path: Path) -> None:
    """Run the shell command of the service with a tritonserver that prints its options."""
    (tmp_path / "tritonserver").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "tritonserver").chmod(0o755)
    command = [word.replace("$$", "$") for word in SERVICES[name]["command"]]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRITON_ADMIN_KEY": key}
    outputs = [_output_of(command, environment, tmp_path / "output") for _ in "ab"]
    restricted = re.findall(r"^--(.*)=shared-memory,trace,logging:triton-admin-key=(.+)$", outputs[0], re.MULTILINE)
    assert [option for option, _ in restricted] == ["grpc-restricted-protocol", "http-restricted-api"]
    assert [secret == key or len(secret) == 36 for _, secret in restricted] == [True, True]
    assert (outputs[0] == outputs[1]) is bool(key), "another secret at each start, where none is given"
    assert "--model-control-mode=none" in outputs[0]
    assert ("--disable-auto-complete-config" in outputs[0]) is (name not in WHOLE)


def _output_of(command: list[str], environment: dict[str, str], file: Path) -> str:
    """Return the output of a command until its end; then kill the processes that it started, as in a container."""
    with (
        file.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, text=True, start_new_session=True) as process,
    ):
        try:
            assert process.wait(60) == 0
        finally:
            end_group(process)
    return file.read_text()


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize(("status", "killed"), [(28, True), (7, False), (0, False), (92, False)])
def test_watchdog_kills_a_server_only_on_timeout(name: str, status: int, killed: bool, tmp_path: Path) -> None:
    """Regression: a hung server stayed up. Exit status of curl: 28 is a timeout, 7 a refused connection."""
    asked = tmp_path / "asked"
    enough = 'while [ "$(wc -l <"$ASKED")" -lt 9 ]; do sleep 0.02; done'
    for program, text in (("curl", f'echo >>"$ASKED"; exit {status}'), ("tritonserver", enough)):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    asked.touch()
    command = [word.replace("$$", "$").replace("sleep 2", "sleep 0.02") for word in SERVICES[name]["command"]]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "ASKED": str(asked)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            assert process.wait(60) == (-signal.SIGKILL if killed else 0)
        finally:
            end_group(process)
    assert SERVICES[name]["init"] is True, "the first process of a container cannot be killed from inside it"
    assert SERVICES[name]["restart"] == "unless-stopped"


def test_server_options_are_known_to_the_release() -> None:
    """Check the options of docker-compose.yml and the guide against the server's help or the table of releases."""
    written = " ".join(word.replace("$$", "$") for name in SERVERS for word in SERVICES[name]["command"])
    written = written.replace(WATCH, "")  # those of curl
    page = (ROOT / "docs" / "guides" / "deployment.md").read_text()
    written += " ".join(re.findall(r"^  tritonserver .*?(?=^```)", page, re.MULTILINE | re.DOTALL))
    used = set(re.findall(r"--([a-z-]+)", written))
    assert len(used) >= 7
    later = used - embedded_options()
    assert later == set(OPTIONS) & used
    for option in later:
        assert version_tuple(EMBEDDED) < version_tuple(OPTIONS[option]) <= version_tuple(NEWEST), option


@pytest.mark.parametrize("name", SERVERS)
def test_servers_have_start_and_stop_grace_periods(name: str) -> None:
    assert SERVICES[name]["healthcheck"]["start_period"] == ("60s" if name == "triton" else "30m")
    assert SERVICES[name]["stop_grace_period"] == "40s"
