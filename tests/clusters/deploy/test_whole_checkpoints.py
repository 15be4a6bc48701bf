"""Deployments of models whose engine runs a checkpoint as it is: image, arguments, resources, what they may reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.building.pipeline import build
from builder.cli import main
from builder.clusters.deploy.contents import read_deployed_models
from builder.clusters.deploy.deployment import DeployedModel, Deployment, SecretNames, check_deployment
from builder.clusters.deploy.image import containerfile, image_files
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.pod import pod
from builder.clusters.deploy.sizes import as_built
from builder.clusters.deploy.targets import find_target
from builder.clusters.deploy.whole_checkpoint import BESIDE_WEIGHTS, SHARED_MEMORY
from builder.common.errors import SpecError
from builder.options import PodOptions, make_spec
from builder.repository.stores.store import open_store
from builder.repository.stores.transfer import push
from builder.serving.plan.lines import SERVER
from tests.clusters.deploy.deployments import ALL, DECODER, STORED
from tests.clusters.deploy.restricted import violations
from tests.clusters.deploy.schemas import refuse_invalid
from tests.clusters.deploy.test_targets import VERSIONS, documents
from tests.decoders import make_decoder_checkpoint

ROOT = Path(__file__).parents[3]
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.fixture(scope="module")
def repository(module_folder: Callable[[str], Path]) -> Path:
    """Return a repository for vLLM, with a copy of a local checkpoint, for two cards."""
    folder = module_folder("vllm")
    checkpoint = make_decoder_checkpoint(folder / "writer", "llama")
    parallel = {"tensor_parallel_size": 2}
    build(make_spec(model=str(checkpoint), output=folder / "repository", engine="vllm", gpu="l4", vllm=parallel))
    return folder / "repository"


@pytest.fixture(scope="module")
def model(repository: Path) -> DeployedModel:
    (model,) = read_deployed_models(str(repository))
    return model


@pytest.fixture
def deployment(model: DeployedModel) -> Deployment:
    size = as_built([model], 8)
    return check_deployment(replace(STORED, name="llm", models=(model,), size=size, monitored=True))


def _triton(spec: dict[str, Any]) -> dict[str, Any]:
    (container,) = [one for one in spec["initContainers"] if one["name"] == "triton"]
    return dict(container)


def test_vllm_model_is_read_alike_from_folder_and_store(model: DeployedModel, repository: Path, tmp_path: Path) -> None:
    """Regression: deploy refused every model of vLLM."""
    assert (model.name, model.container, model.card, model.generates) == ("writer", "vllm-python-py3", "l4", True)
    assert not model.downloads, "its checkpoint was copied into the repository"
    weights = sum(path.stat().st_size for path in repository.rglob("*.safetensors"))
    assert (model.plan.memory, model.plan.shm) == (weights + BESIDE_WEIGHTS, SHARED_MEMORY)
    url = f"file://{tmp_path / 'store'}"
    push(repository, "writer", open_store(url))
    assert read_deployed_models(url) == (model,)


def test_vllm_pod_starts_triton_of_the_vllm_image_as_compose_does(deployment: Deployment) -> None:
    assert f"\nFROM nvcr.io/nvidia/tritonserver:{deployment.release}-vllm-python-py3\n" in containerfile(deployment)
    assert not [name for name in image_files(deployment) if "requirements" in name], "nothing that was emitted runs"
    spec = pod(deployment)
    assert violations(spec) == []
    triton = _triton(spec)
    service = SERVICES["triton-vllm"]
    assert triton["args"] == service["command"][4:], "without what its backend or its image does not have"
    assert triton["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert triton["resources"]["requests"]["memory"] == SERVER + deployment.models[0].plan.memory
    environment = {variable["name"]: variable["value"] for variable in triton["env"]}
    assert {"name": "cache", "mountPath": environment["HOME"]} in triton["volumeMounts"]
    assert triton["securityContext"]["readOnlyRootFilesystem"] is False
    assert _triton(pod(STORED))["securityContext"]["readOnlyRootFilesystem"] is True
    claimed = pod(replace(deployment, pod=PodOptions(cache_claim="hub")))["volumes"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "hub"}} in claimed


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_vllm_manifests_are_valid(target: str, deployment: Deployment) -> None:
    for document in documents(deployment, target).values():
        if document["kind"] != "Kustomization":
            refuse_invalid(document, VERSIONS[-1])
    assert "tritonImage" in find_target("helm").files(deployment)["values.yaml"]


def test_server_that_downloads_reaches_the_hub_with_the_secret(deployment: Deployment) -> None:
    downloads = replace(deployment.models[0], downloads=True)
    there = replace(deployment, models=(downloads,), secrets=SecretNames(hub="hub-token"))
    assert _triton(pod(check_deployment(there)))["envFrom"] == [{"secretRef": {"name": "hub-token"}}]
    https = {"ports": [{"protocol": "TCP", "port": 443}]}
    in_image: dict[str, Any] = {"repository": "vllm_repository", "stored": False}
    assert https in objects(replace(there, **in_image))["network-policy"]["spec"]["egress"]
    local = replace(deployment, **in_image)
    assert objects(local)["network-policy"]["spec"]["egress"] == []
    with pytest.raises(SpecError, match="--hub-secret is for servers that download"):
        check_deployment(replace(local, secrets=there.secrets))


def test_weights_of_unknown_size_need_the_memory_of_a_replica(model: DeployedModel) -> None:
    unknown = replace(model, plan=replace(model.plan, memory=0))
    with pytest.raises(SpecError, match="--memory-gb"):
        as_built([unknown], 8)
    assert as_built([unknown], 8, 40_000_000_000).memory == 40_000_000_000


def test_vllm_models_are_deployed_by_themselves_without_scaling(deployment: Deployment) -> None:
    with pytest.raises(SpecError, match="writer needs another image of Triton"):
        check_deployment(replace(deployment, models=(*deployment.models, DECODER)))
    with pytest.raises(SpecError, match="--max-replicas"):
        check_deployment(replace(deployment, scaling=ALL.scaling))


def test_tensorrt_llm_model_is_deployed_from_the_image_that_has_it(repository: Path, tmp_path: Path) -> None:
    """Regression: deploy refused every model of TensorRT-LLM."""
    parallel = {"tensor_parallel_size": 2}
    checkpoint = str(repository.parent / "writer")
    build(make_spec(model=checkpoint, output=tmp_path / "r", engine="tensorrt-llm", tensorrt_llm=parallel))
    (model,) = read_deployed_models(str(tmp_path / "r"))
    inputs = (tmp_path / "r" / "writer" / "config.pbtxt").read_text("utf-8")
    assert all(f'name: "{name}"' in inputs for name in json.loads(model.request)), "it would refuse the probe"
    deployment = check_deployment(replace(STORED, models=(model,), size=as_built([model], 8)))
    service = SERVICES["triton-trtllm"]
    image = f"nvcr.io/nvidia/tritonserver:{deployment.release}-trtllm-python-py3"
    assert f"\nFROM {image}\n" in containerfile(deployment)
    assert service["image"].replace("${TRITON_RELEASE:-26.08}", deployment.release) == image
    triton = _triton(pod(deployment))
    assert (triton["args"], triton["resources"]["limits"]["nvidia.com/gpu"]) == (service["command"][4:], 2)


def test_deploy_writes_a_vllm_repository(repository: Path, tmp_path: Path) -> None:
    options = ["--repository", str(repository), "--registry", "registry.example", "--output", str(tmp_path / "out")]
    assert main(["deploy", "--to", "kubernetes", *options]) == 1, "how many cores is not known"
    assert main(["deploy", "--to", "kubernetes", "--cores", "8", "--memory-gb", "20", *options]) == 0
    spec = yaml.safe_load((tmp_path / "out" / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    assert _triton(spec)["resources"]["requests"]["memory"] == 20_000_000_000
    assert (
        "COPY --chown=1000:1000 --from=models writer /models/writer/"
        in (tmp_path / "out" / "image" / "Containerfile").read_text()
    )
