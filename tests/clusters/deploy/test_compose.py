"""Manifests for a cluster agree with docker-compose.yml and the Dockerfiles."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.clusters.deploy.image import containerfile, image_files
from builder.clusters.deploy.pod import GATEWAY_PORT, MIN_KUBERNETES, NOBODY_UID, pod
from builder.clusters.deploy.sizes import as_planned
from builder.common.errors import SpecError
from builder.common.releases import NEWEST
from builder.options import load_specs
from builder.repository.config.arguments import EXIT_TIMEOUT_S, arguments, command
from builder.repository.liveness import FILES, REPOSITORY
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.plan import machine
from builder.serving.plan.lines import ModelPlan
from tests.clusters.deploy.deployments import DECODER, ENCODER, IN_IMAGE, STORED, WITH_GPU

ROOT = Path(__file__).parents[3]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize("name", ["triton", "triton-gpu"])
def test_pod_starts_triton_as_compose_does(name: str) -> None:
    words = [word.replace("$$", "$") for word in SERVICES[name]["command"]]
    assert words == [*command(watched=True), *arguments(NEWEST)]
    (container,) = [c for c in pod(STORED)["initContainers"] if c["name"] == "triton"]
    assert [*container["command"], *container["args"]] == [*command(), *arguments(NEWEST)], "a probe watches it there"
    assert container["securityContext"]["runAsUser"] == int(SERVICES[name]["user"].split(":")[0])
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment.items() <= SERVICES[name]["environment"].items()
    assert SERVICES[name]["stop_grace_period"] == f"{EXIT_TIMEOUT_S + 10}s"
    assert "grpc-max-response-pool-size" not in " ".join(arguments("25.02")), "25.03 is the first that knows it"


def test_pod_runs_the_gateway_as_compose_does() -> None:
    (gateway,) = pod(STORED)["containers"]
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:{GATEWAY_PORT}:{GATEWAY_PORT}"]
    assert "--host=0.0.0.0" in gateway["args"]
    assert SERVICES["gateway"]["stop_grace_period"] == f"{GatewaySettings().drain_s + 10:.0f}s"
    assert f"EXPOSE {GATEWAY_PORT}" in (ROOT / "Dockerfile.gateway").read_text()
    assert gateway["securityContext"]["runAsUser"] == NOBODY_UID, (
        "a name means nothing to a cluster that asks for nobody"
    )


def test_vllm_may_load_what_it_compiles_in_tmp() -> None:
    """Regression: Docker mounts a tmpfs with noexec, and vLLM's compiler loads its libraries from /tmp."""
    mounts = {name: service.get("tmpfs") for name, service in SERVICES.items()}
    assert mounts["triton-vllm"] == mounts["triton-trtllm"] == ["/tmp:exec"]
    assert mounts["triton"] == mounts["triton-gpu"] == ["/tmp"], "nothing else runs what it wrote"


@pytest.mark.parametrize("deployment", [STORED, WITH_GPU], ids=["cpu", "gpu"])
def test_containerfile_has_the_steps_of_the_dockerfile(deployment: Any) -> None:
    requirements = "requirements-gpu.txt" if deployment.on_gpu else "requirements.txt"
    steps = (ROOT / "Dockerfile").read_text()
    steps = re.sub(r"^ARG .*\n", "", steps, flags=re.MULTILINE).replace("${TRITON_RELEASE}", deployment.release)
    steps = steps.replace("builder/runtime/${REQUIREMENTS}", requirements)
    steps = steps.replace("builder/repository/liveness/repository", "liveness")
    assert containerfile(deployment) == steps
    written = image_files(deployment)
    assert written[f"image/{requirements}"] == files("builder.runtime").joinpath(requirements).read_text()
    for source in re.findall(r"^COPY (?!--)(\S+)", written["image/Containerfile"], re.MULTILINE):
        assert any(Path(file).is_relative_to(f"image/{source}") for file in written)
    assert {file: (REPOSITORY / file).read_text() for file in FILES} == {
        file.removeprefix("image/liveness/"): text for file, text in written.items() if "liveness/" in file
    }
    assert f"FROM nvcr.io/nvidia/tritonserver:{deployment.release}-py3\n" in written["image/Containerfile"]


def test_replica_installs_nothing_at_start() -> None:
    for deployment in (STORED, IN_IMAGE, WITH_GPU):
        spec = pod(deployment)
        for container in (*spec["initContainers"], *spec["containers"]):
            assert "pip" not in " ".join([*container.get("command", ()), *container["args"]])


def test_planned_replica_has_the_resources_of_compose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read the models and their load from one models.yaml."""
    text = """
defaults: {machine: {cores: 8, memory_gb: 16}}
models:
  - {model: org/minilm, name: minilm, load: {requests_per_s: 10, distinct_texts: 1000}}
  - {model: org/writes, name: writes, load: {requests_per_s: 1}}
"""
    (tmp_path / "models.yaml").write_text(text)
    plans = {
        "minilm": ModelPlan("minilm", (), {}, 400_000_000, 300 << 20, 1.5, response_cache=8 << 20),
        "writes": ModelPlan("writes", (), {}, 2_000_000_000, 100 << 20, 2.0),
    }
    monkeypatch.setattr(machine, "needs_of", lambda spec: None)
    monkeypatch.setattr(machine, "_plan", lambda capacity, load, needs: plans[capacity.name])
    models, size = as_planned((ENCODER, DECODER), tmp_path / "models.yaml", 1, None)
    assert [model.plan for model in models] == list(plans.values())
    planned = machine.plan(load_specs(tmp_path / "models.yaml"))[1]
    compose = yaml.safe_load(planned.compose("triton"))["services"]["triton"]
    replica = pod(replace(STORED, models=models, size=size))
    (triton,) = [container for container in replica["initContainers"] if container["name"] == "triton"]
    sizes = {name: int(compose[name].removesuffix("b")) for name in ("mem_limit", "shm_size")}
    assert triton["resources"]["limits"] == {"cpu": compose["cpus"], "memory": sizes["mem_limit"]}
    assert replica["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": sizes["shm_size"]}}
    assert f"--cache-config=local,size={8 << 20}" in triton["args"]
    with pytest.raises(
        SpecError, match="has no load for other, which is to be deployed; it has one for minilm, writes"
    ):
        as_planned((replace(ENCODER, name="other"),), tmp_path / "models.yaml", 1, None)
    (tmp_path / "models.yaml").write_text(text.replace("memory_gb: 16", "memory_gb: 1"))
    with pytest.raises(SpecError, match="the load cannot be held"):
        as_planned((ENCODER, DECODER), tmp_path / "models.yaml", 1, None)


def test_kubernetes_guide_names_the_oldest_supported_version() -> None:
    assert f"Kubernetes {MIN_KUBERNETES} or later" in (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
