"""Tritons and gateways of models on demand: their pods, how they find each other, and the sizes of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.cli import main, parse
from builder.clusters.deploy.deployment import LoadingOnDemand, check_deployment
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.on_demand import GATEWAYS, triton_pod
from builder.clusters.deploy.sizes import as_loaded_on_demand
from builder.common.errors import SpecError
from builder.options import PodOptions
from builder.repository.config.arguments import EXIT_TIMEOUT_S, MODELS_FOLDER
from builder.repository.liveness import NAME
from builder.serving.gateway.fleet.members import RESOLUTION_INTERVAL_S
from builder.serving.gateway.fleet.targets import DnsName, parse_targets
from builder.serving.gateway.residency.memory import estimate_memory
from builder.serving.gateway.residency.memory_budget import MAX_CONCURRENT_LOADS, SERVER_BYTES
from tests.clusters.deploy.deployments import ALL, DECODER, ENCODER, ON_DEMAND, ON_GPU, STORED
from tests.clusters.deploy.schemas import refuse_invalid
from tests.clusters.deploy.test_command import deploy
from tests.clusters.deploy.test_targets import VERSIONS, documents

# https://github.com/kubernetes/enhancements/tree/master/keps/sig-network/1024-nodelocal-cache-dns
RESOLVER_CACHE_S = 30
GB = 1_000_000_000
FIRST, SECOND = replace(ENCODER, estimate=100_000_000), replace(DECODER, estimate=850_000_000)


def _pods() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specs of the pods of Tritons and of gateways."""
    written = objects(ON_DEMAND)
    tritons, gateways = (written[name]["spec"]["template"]["spec"] for name in ("tritons", "deployment"))
    return tritons, gateways


def test_gateways_find_tritons_by_the_name_of_their_service() -> None:
    written = objects(ON_DEMAND)
    tritons, gateways = _pods()
    (gateway,) = gateways["containers"]
    _, options = parse(["gateway", *gateway["args"]])
    service, workload = written["tritons-service"], written["tritons"]
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"], "one that stops has to leave the name"
    assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    (url,) = options.url
    assert parse_targets(url) == [DnsName(service["metadata"]["name"], service["spec"]["ports"][0]["port"])]
    assert service["spec"]["ports"][0]["port"] in [port["containerPort"] for port in tritons["containers"][0]["ports"]]
    assert (options.load_on_demand, options.memory_gb, options.pin) == (True, 1.2, ["minilm"])
    (models,) = [mount for mount in gateway["volumeMounts"] if mount["name"] == "models"]
    assert (str(options.repository), models["subPath"]) == (models["mountPath"], "models")
    assert written["service"]["spec"]["selector"] == written["deployment"]["spec"]["template"]["metadata"]["labels"]
    assert written["service"]["spec"]["selector"] != service["spec"]["selector"]
    assert [written[name]["spec"]["replicas"] for name in ("tritons", "deployment")] == [3, GATEWAYS]


def test_tritons_start_without_models_and_are_probed_while_they_load() -> None:
    """A server is not ready while it loads a model, so that readiness would take it from the name, or restart it."""
    (triton,) = _pods()[0]["containers"]
    assert "--model-control-mode=explicit" in triton["args"]
    assert "model-repository" not in " ".join(triton["command"]), "gateways load models without the admin key"
    assert f"--model-repository={MODELS_FOLDER}" in triton["args"]
    assert [word for word in triton["args"] if word.startswith("--load-model=")] == [f"--load-model={NAME}"]
    for probe in ("startupProbe", "readinessProbe"):
        assert triton[probe]["httpGet"]["path"] == "/v2/health/live"
    assert "/v2/health/live" in triton["livenessProbe"]["exec"]["command"][-1]
    assert "/v2/health/ready" not in triton["livenessProbe"]["exec"]["command"][-1]


def test_triton_answers_until_all_gateways_have_left_it() -> None:
    noticed_s = RESOLVER_CACHE_S + RESOLUTION_INTERVAL_S
    spec, (triton,) = _pods()[0], _pods()[0]["containers"]
    stopping_s = triton["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert stopping_s > noticed_s
    assert spec["terminationGracePeriodSeconds"] >= stopping_s + EXIT_TIMEOUT_S
    rollout = objects(ON_DEMAND)["tritons"]["spec"]
    assert rollout["minReadySeconds"] > noticed_s, "a new one is found before an old one stops"
    assert rollout["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_network_policies_let_only_gateways_reach_tritons() -> None:
    written = objects(ON_DEMAND)
    tritons, gateways = (written[name]["spec"] for name in ("tritons-network-policy", "network-policy"))
    to_tritons, monitoring = tritons["ingress"]
    assert to_tritons["from"] == [{"podSelector": gateways["podSelector"]}]
    assert [port["port"] for port in to_tritons["ports"]] == [8001]
    assert [port["port"] for port in monitoring["ports"]] == [8002]
    *store, from_gateways = gateways["egress"]
    assert from_gateways == {"to": [{"podSelector": tritons["podSelector"]}], "ports": to_tritons["ports"]}
    assert tritons["egress"] == store
    for monitor, port in (("pod-monitor", "gateway"), ("tritons-pod-monitor", "metrics")):
        assert [end["port"] for end in written[monitor]["spec"]["podMetricsEndpoints"]] == [port]
    for budget, policy in (("disruption-budget", gateways), ("tritons-disruption-budget", tritons)):
        assert written[budget]["spec"]["selector"] == policy["podSelector"]


@pytest.mark.parametrize("trusted", [None, ALL.trusted])
def test_tritons_share_one_copy_of_the_models_on_a_claim(trusted: str | None) -> None:
    """Gateways read it too where they verify signatures, which cover the weights."""
    deployment = replace(ON_DEMAND, trusted=trusted, pod=PodOptions(models_claim="pulled"))
    written = documents(deployment, "kubernetes")
    specs = {name: written[f"{name}.yaml"]["spec"]["template"]["spec"] for name in ("tritons", "deployment")}
    volumes = {name: {v["name"]: v for v in spec["volumes"]}["models"] for name, spec in specs.items()}
    claimed = {"name": "models", "persistentVolumeClaim": {"claimName": "pulled"}}
    assert volumes["tritons"] == claimed
    assert (volumes["deployment"] == claimed) is (trusted is not None)
    for name, volume in volumes.items():
        (pull,) = specs[name]["initContainers"]
        assert ("ephemeral-storage" in pull["resources"]["requests"]) is (volume != claimed)
        refuse_invalid(written[f"{name}.yaml"], VERSIONS[-1])
    (triton,) = specs["tritons"]["containers"]
    assert [mount["readOnly"] for mount in triton["volumeMounts"] if mount["name"] == "models"] == [True]


def test_claim_of_models_is_refused_without_loading_on_demand() -> None:
    with pytest.raises(SpecError, match="models_claim pulled is for --load-on-demand"):
        check_deployment(replace(STORED, pod=PodOptions(models_claim="pulled")))


def test_triton_has_memory_for_what_gateways_do_not_count() -> None:
    size = as_loaded_on_demand((FIRST, SECOND), LoadingOnDemand(2 * GB), None)
    beyond = FIRST.plan.memory - FIRST.estimate + SECOND.plan.memory - SECOND.estimate
    assert size.memory == 2 * GB + beyond
    assert size.burst == FIRST.plan.memory + SECOND.plan.memory, "the loads that the other gateway began"
    pod = triton_pod(replace(ON_DEMAND, size=size))["containers"][0]["resources"]
    assert pod["requests"]["memory"] == size.memory
    assert pod["limits"]["memory"] == size.memory + size.burst + size.shm
    assert (size.cores, size.shm) == (2, 384 << 20)
    many = [replace(FIRST, name=f"embeds{number}") for number in range(100)]
    size = as_loaded_on_demand((*many, SECOND), LoadingOnDemand(2 * GB), 3)
    assert size.shm < 25 * FIRST.plan.shm, "that of models that are loaded at once"
    assert size.burst == SECOND.plan.memory + (MAX_CONCURRENT_LOADS - 1) * FIRST.plan.memory
    assert as_loaded_on_demand(many, LoadingOnDemand(GB // 4), 3).burst == GB // 4, "what the other gateway may use"
    assert as_loaded_on_demand((FIRST,), LoadingOnDemand(GB, ("minilm",)), 3).burst == 0, "both load the same pins"
    assert size.cores == 3


@pytest.mark.parametrize(
    ("memory", "pins", "problem"),
    [
        (SERVER_BYTES + SECOND.estimate - 1, (), "writes needs 850 MB, and 850 MB are left"),
        (SERVER_BYTES + SECOND.estimate, ("minilm",), "writes needs 850 MB, and 750 MB are left"),
        (SERVER_BYTES + SECOND.estimate, ("minilm", "writes"), "the pinned models need more"),
        (2 * GB, ("topics",), "--pin topics: it is not deployed; there are minilm, writes"),
    ],
)
def test_memory_has_room_for_pinned_models_and_the_largest(memory: int, pins: tuple[str, ...], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        as_loaded_on_demand((FIRST, SECOND), LoadingOnDemand(memory, pins), None)


def test_models_on_gpus_are_not_loaded_on_demand() -> None:
    with pytest.raises(SpecError, match="card takes that of a GPU"):
        as_loaded_on_demand((FIRST, ON_GPU), LoadingOnDemand(2 * GB), None)


def test_gateways_pull_descriptions_that_tell_the_sizes_of_models(store: str, tmp_path: Path) -> None:
    """Run both pulls with the arguments of their containers."""
    options = ("--repository", store, "--load-on-demand", "--memory-gb", "1")
    written = deploy("--to", "kubernetes", *options, output=tmp_path / "out")
    folders, requested = {}, {}
    for name in ("tritons", "deployment"):
        (pull,) = written[f"{name}.yaml"]["spec"]["template"]["spec"]["initContainers"]
        here = [word.replace("/pulled", str(tmp_path / name)) for word in pull["args"]]
        for _ in range(2):  # a pod may start again with what it had pulled
            assert main(["pull", *here]) == 0
        folders[name], requested[name] = tmp_path / name / "models", pull["resources"]["requests"]["ephemeral-storage"]
    whole, described = folders.values()
    for name, number in (("minilm", 2), ("writes", 1)):
        assert estimate_memory(described, name, number) == estimate_memory(whole, name, number)
        for file in ("config.pbtxt", f"{number}/serving.json", "build.json"):
            assert (described / name / file).read_bytes() == (whole / name / file).read_bytes()
    code = described / "minilm" / "2" / "model.py"
    assert set(code.read_bytes()) == {0}
    assert 0 < requested["deployment"] < requested["tritons"]


def test_description_needs_a_folder_without_other_versions(
    store: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pull = ["pull", "--from", store, "--without-weights", "--repository"]
    assert main([*pull, str(folder), "minilm"]) == 1, "a Triton would load it"
    assert "give it a folder of its own" in " ".join(capsys.readouterr().err.split())
    assert main([*pull, str(tmp_path / "new"), "minilm", "--verify-key", "public.pem"]) == 1
    assert "--verify-key reads all files" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_gateways_pull_everything_where_signatures_are_verified() -> None:
    gateways = objects(replace(ON_DEMAND, trusted="-----BEGIN PUBLIC KEY-----\n"))["deployment"]
    spec = gateways["spec"]["template"]["spec"]
    (pull,) = spec["initContainers"]
    assert "--without-weights" not in pull["args"]
    assert "--verify-key=/trusted/key.pem" in pull["args"]
    assert pull["resources"]["requests"]["ephemeral-storage"] == 5 * GB
    (models,) = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    assert models["emptyDir"]["sizeLimit"] > 5 * GB


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--plan", "models.yaml"], "--plan sizes replicas that have all models loaded"),
        (["--probe", "minilm"], "--probe and --load-on-demand do not go together"),
        (["--max-replicas", "3", "--prometheus", "http://p:9090"], "--max-replicas and --load-on-demand do not go"),
        (["--inference-pool"], "--inference-pool and --load-on-demand do not go together"),
        (["--memory-gb", "0.1"], "are left beside the server and pinned models"),
        (["--to", "kserve"], "which the target kserve does not have"),
        (["--to", "ray"], "--load-on-demand is not of the target ray"),
    ],
)
def test_deploy_refuses_what_loading_on_demand_does_not_have(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    common = ["--repository", store, "--registry", "registry.example", "--output", str(tmp_path / "out")]
    command = ["deploy", "--to", "kubernetes", *common, "--load-on-demand", "--memory-gb", "1", *options]
    assert main(command) == 1
    assert problem in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_deploy_refuses_loading_on_demand_without_its_options(
    store: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["deploy", "--to", "kubernetes", "--registry", "registry.example", "--output", str(tmp_path / "out")]
    for options, problem in (
        (["--repository", store, "--load-on-demand"], "--memory-gb N"),
        (["--repository", store, "--pin", "minilm"], "--pin says what --load-on-demand loads at once"),
        (["--repository", str(folder), "--load-on-demand", "--memory-gb", "1"], "push them to an object store"),
    ):
        assert main([*command, *options]) == 1
        assert problem in " ".join(capsys.readouterr().err.split())
