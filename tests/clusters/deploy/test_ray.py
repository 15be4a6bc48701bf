"""The target `ray`: its files are valid for KubeRay, Ray Serve and the application."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from builder.clusters.deploy.deployment import Deployment, Scaling, SecretNames
from builder.clusters.deploy.targets import find_target
from builder.clusters.ray.cluster import RAY_SETTINGS, RAY_TIMEOUTS, read_options
from builder.common.errors import SpecError
from tests.clusters.deploy.deployments import ALL, IN_IMAGE, STORED, WITH_GPU
from tests.clusters.deploy.restricted import violations
from tests.clusters.deploy.schemas import refuse_invalid
from tests.documents import ROOT, blocks, check_command

KEYED = replace(ALL, monitored=False, probed=())
ON_MACHINES = replace(IN_IMAGE, registry=None)


def _written(deployment: Deployment) -> dict[str, Any]:
    files = find_target("ray").files(deployment)
    return {name: yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")}


@pytest.mark.parametrize("deployment", [STORED, KEYED])
def test_ray_service_is_valid_for_kuberay(deployment: Deployment) -> None:
    service = _written(deployment)["rayservice.yaml"]
    refuse_invalid(service, "1.33")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": group["template"]["spec"]}
        refuse_invalid(pod, "1.33")
        assert violations(pod["spec"]) == []
        (container,) = pod["spec"]["containers"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment.items() >= {**RAY_SETTINGS, **RAY_TIMEOUTS}.items()
        assert [pull["name"] for pull in pod["spec"]["initContainers"]] == ["pull"]
        (pull,) = pod["spec"]["initContainers"]
        mounts = {mount["name"] for mount in (*container["volumeMounts"], *pull["volumeMounts"])}
        assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.parametrize("deployment", [STORED, KEYED, ON_MACHINES])
def test_serve_config_and_application_arguments_are_valid(deployment: Deployment) -> None:
    config = _written(deployment)["serve.yaml"]
    (application,) = ServeDeploySchema.model_validate(config).applications
    options = read_options(application.args)
    assert (options.min_replicas, options.cores) == (deployment.replicas, deployment.size.cores)
    assert set(options.models) == {f"{model.name}@{model.version}" for model in deployment.models}
    assert options.gateways == (1 if deployment.registry is None else deployment.replicas)


def test_ray_service_embeds_serve_yaml_and_matches_its_replicas() -> None:
    written = _written(KEYED)
    assert yaml.safe_load(written["rayservice.yaml"]["spec"]["serveConfigV2"]) == written["serve.yaml"]
    (workers,) = written["rayservice.yaml"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (arguments,) = [application["args"] for application in written["serve.yaml"]["applications"]]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (3, 8)
    assert (arguments["min_replicas"], arguments["max_replicas"]) == (3, 8)
    assert arguments["keys_file"] == "/keys/keys"
    assert float(workers["rayStartParams"]["num-cpus"]) >= arguments["cores"], "or no replica is ever placed"


def test_only_nodes_of_the_ray_cluster_reach_its_tritons() -> None:
    """Open the gateways' port and the head's dashboard, which asks for a token, but no port of a Triton."""
    policy, service = _written(STORED)["network.yaml"], _written(STORED)["rayservice.yaml"]
    refuse_invalid(policy, "1.33")
    inside, ports = policy["spec"]["ingress"]
    assert ports == {"ports": [{"port": 8000}, {"port": 8265}]}
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        for selector in (policy["spec"]["podSelector"], inside["from"][0]["podSelector"]):
            assert labels.items() >= selector["matchLabels"].items()


def test_steps_apply_the_trusted_keys_of_ray_nodes() -> None:
    trusted = _written(KEYED)["trusted.yaml"]
    refuse_invalid(trusted, "1.33")
    applied = " ".join(find_target("ray").steps(KEYED, Path("out")))
    assert all(f"--filename out/{name}" in applied for name in ("rayservice.yaml", "network.yaml", "trusted.yaml"))
    assert "trusted.yaml" not in _written(STORED)


def test_steps_push_the_ray_image_before_they_apply_the_service() -> None:
    build, push, *apply = find_target("ray").steps(STORED, Path("out"))
    name = "registry.example/team/build-repo-ray:"
    assert f"--tag {name}" in build
    assert push.startswith(f"docker push {name}")
    assert apply[0].startswith("kubectl apply")


def test_ray_without_a_registry_writes_only_serve_yaml() -> None:
    assert set(_written(ON_MACHINES)) == {"serve.yaml"}
    scaled = replace(ON_MACHINES, scaling=Scaling(4, "http://prometheus:9090", 50))
    assert _written(scaled)["serve.yaml"]["applications"][0]["args"]["max_replicas"] == 4


@pytest.mark.parametrize(
    ("deployment", "why"),
    [
        (WITH_GPU, "has no GPU"),
        (replace(STORED, probed=("minilm",)), "--probe"),
        (replace(STORED, secrets=SecretNames(), monitored=True), "--monitor"),
        (IN_IMAGE, "s3://"),
        (replace(KEYED, registry=None), "--verify-key"),
    ],
)
def test_ray_target_refuses_options_that_it_lacks(deployment: Deployment, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        find_target("ray").files(deployment)


def test_documented_ray_job_is_valid_for_kuberay() -> None:
    page = (ROOT / "docs" / "guides" / "ray.md").read_text("utf-8")
    (job,) = [yaml.safe_load(text) for _, title, text in blocks(page) if title == 'title="rayjob.yaml"']
    refuse_invalid(job, "1.33")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": group["template"]["spec"]}
        refuse_invalid(pod, "1.33")
    check_command(job["spec"]["entrypoint"].split())
