"""The section `pod` of a models.yaml: its checks, and the pods of every target that it reaches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from builder.cli import main
from builder.clusters.deploy.deployment import Deployment, check_deployment
from builder.clusters.deploy.image import image_tag
from builder.clusters.deploy.pod import pod
from builder.clusters.deploy.targets import find_target
from builder.common.errors import SpecError
from builder.options import PodImages, PodOptions, load_pod_options, load_specs
from tests.clusters.deploy.deployments import IN_IMAGE, ON_GPU, STORED, WITH_GPU
from tests.clusters.deploy.schemas import refuse_invalid
from tests.clusters.deploy.test_command import deploy
from tests.clusters.deploy.test_targets import VERSIONS, Renderer, documents

DIGEST = "@sha256:" + "0123456789abcdef" * 4
SECTION = """
pod:
  image_pull_secrets: [registry-credentials]
  node_selector: {pool: inference, example.com/zone: a}
  tolerations:
    - {key: dedicated, value: inference, effect: NoSchedule}
    - {operator: Exists, effect: NoExecute, toleration_seconds: 60}
  priority_class: serving
  service_account: reads-models
  runtime_class: gvisor
models: [{model: a/b}]
"""
FIELDS = {
    "imagePullSecrets": [{"name": "registry-credentials"}],
    "nodeSelector": {"pool": "inference", "example.com/zone": "a"},
    "tolerations": [
        {"key": "dedicated", "operator": "Equal", "value": "inference", "effect": "NoSchedule"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
    ],
    "priorityClassName": "serving",
    "serviceAccountName": "reads-models",
    "runtimeClassName": "gvisor",
}


GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def _written(folder: Path, text: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def placed(tmp_path: Path) -> Deployment:
    return replace(STORED, pod=load_pod_options(_written(tmp_path, SECTION)))


def _specs(target: str, written: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of the pods that a target's files describe."""
    if target == "kserve":
        return [written["inference-service.yaml"]["spec"]["predictor"]]
    if target == "ray":
        cluster = written["rayservice.yaml"]["spec"]["rayClusterConfig"]
        return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [written["deployment.yaml"]["spec"]["template"]["spec"]]


@pytest.mark.parametrize("target", ["kubernetes", "kserve", "ray"])
def test_pod_section_reaches_the_pods_of_every_target(target: str, placed: Deployment) -> None:
    written = documents(placed, target)
    specs = _specs(target, written)
    assert specs
    for spec in specs:
        assert {name: spec.get(name) for name in FIELDS} == FIELDS
    for spec in _specs(target, documents(STORED, target)):
        assert not set(spec) & set(FIELDS), "nothing is written that was not asked for"
    for document in written.values():
        if document.get("kind") not in (None, "Kustomization"):
            refuse_invalid(document, VERSIONS[-1])


def test_chart_has_the_pod_section_as_values(placed: Deployment) -> None:
    chart = find_target("helm").files(placed)
    values = yaml.safe_load(chart["values.yaml"])
    assert {name: values[name] for name in FIELDS} == FIELDS
    renderer = Renderer({**values, "nodeSelector": {"pool": "other"}}, "search", "text")
    spec = yaml.safe_load(renderer.render(chart["templates/deployment.yaml"]))["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"pool": "other"}
    assert spec["tolerations"] == FIELDS["tolerations"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{node_selektor: {a: b}}", "unknown key 'node_selektor'; did you mean 'node_selector'"),
        ("{node_selector: {gpu: true}}", "node_selector.gpu: .*found True"),
        ("{node_selector: {'a b': c}}", "node_selector"),
        ("{tolerations: [{key: a, effekt: NoSchedule}]}", "unknown key 'tolerations.0.effekt'; did you mean 'effect'"),
        ("{tolerations: [{value: a}]}", "needs a `key`"),
        ("{tolerations: [{key: a, operator: Exists, value: b}]}", "remove it, or use Equal"),
        ("{tolerations: [{key: a, toleration_seconds: 5}]}", "needs the effect NoExecute"),
        ("{image_pull_secrets: one}", "image_pull_secrets"),
        ("{priority_class: High_Priority}", "priority_class"),
        ("{images: {triton: registry.example/triton}}", "images.triton: .*:TAG or HOST/PATH@sha256:DIGEST"),
        ("{images: {pull: 'registry.example/pull@sha256:12'}}", "images.pull"),
        ("[a]", "expected a mapping"),
    ],
)
def test_pod_section_refuses_invalid_keys_and_values(section: str, message: str, tmp_path: Path) -> None:
    path = _written(tmp_path, f"pod: {section}\nmodels: [{{model: a/b}}]")
    with pytest.raises(SpecError, match=message) as refused:
        load_pod_options(path)
    assert str(refused.value).startswith(f"{path}: ")


def test_pod_section_is_read_from_the_outermost_file_only(tmp_path: Path) -> None:
    assert [spec.entry_name for spec in load_specs(_written(tmp_path, SECTION))] == ["b"], "a build ignores it"
    outer = tmp_path / "all.yaml"
    outer.write_text("include: models.yaml")
    assert load_pod_options(outer) == PodOptions()
    with pytest.raises(SpecError, match=r"it belongs in .*all\.yaml"):
        load_specs(outer)


def test_images_by_digest_replace_those_of_the_registry() -> None:
    images = {name: f"registry.example:5000/team/{name}{DIGEST}" for name in ("triton", "gateway", "pull")}
    named = replace(STORED, registry=None, pod=PodOptions(images=PodImages(**images)))
    spec = pod(named)
    assert {c["name"]: c["image"] for c in (*spec["initContainers"], *spec["containers"])} == images
    assert find_target("kubernetes").steps(named, Path("out")) == ["kubectl apply -k out"], "Triton's image is there"
    with pytest.raises(SpecError, match="the image of gateway from: --registry"):
        pod(replace(named, pod=PodOptions(images=PodImages(triton=images["triton"], pull=images["pull"]))))


def test_base_image_by_digest_changes_the_containerfile_and_its_tag() -> None:
    base = f"nvcr.io/nvidia/tritonserver:26.08-py3{DIGEST}"
    pinned = replace(IN_IMAGE, pod=PodOptions(images=PodImages(base=base)))
    assert f"\nFROM {base}\n" in find_target("kubernetes").files(pinned)["image/Containerfile"]
    assert image_tag(pinned) != image_tag(IN_IMAGE)


ON_L40S = replace(WITH_GPU, pooled=False, models=(replace(ON_GPU, card="l40s"),))


def _required_labels(deployment: Deployment, target: str = "kubernetes") -> dict[str, tuple[str, list[str]]] | None:
    """Return what the pods of a target require of their node: operator and values by label; None if nothing."""
    (spec,) = _specs(target, documents(deployment, target))
    if "affinity" not in spec:
        return None
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return {one["key"]: (one["operator"], one["values"]) for one in term["matchExpressions"]}


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_pods_on_gpus_choose_nodes_with_the_card_they_were_built_for(target: str) -> None:
    """The labels are those of NVIDIA's GPU Feature Discovery, whose README has an A100 of 40 GB as 39538."""
    labels = _required_labels(ON_L40S, target)
    assert labels is not None
    assert labels["nvidia.com/gpu.compute.major"] == ("In", ["8"])
    assert labels["nvidia.com/gpu.compute.minor"] == ("In", ["9"])
    above, (memory,) = labels["nvidia.com/gpu.memory"]
    assert above == "Gt"
    assert 23034 < int(memory) < 46068, "not an L4, and what nvidia-smi prints of an L40S"
    a100 = _required_labels(replace(ON_L40S, models=(replace(ON_GPU, card="a100"),)), target)
    assert a100 is not None
    assert 24576 < int(a100["nvidia.com/gpu.memory"][1][0]) < 39538
    assert _required_labels(replace(WITH_GPU, pooled=False), target) is None, "built for no card"
    assert _required_labels(replace(ON_L40S, pod=PodOptions(gpu_labels=False)), target) is None
    for document in documents(ON_L40S, target).values():
        if document["kind"] != "Kustomization":
            refuse_invalid(document, VERSIONS[0] if target == "kubernetes" else VERSIONS[-1])


def test_deployment_refuses_models_of_cards_that_no_node_has_both_of() -> None:
    models = (replace(ON_GPU, card="t4"), replace(ON_GPU, name="other", card="l4"))
    with pytest.raises(SpecError, match=r"l4 and t4.*--model NAME"):
        check_deployment(replace(ON_L40S, models=models))
    both = replace(ON_L40S, models=(replace(ON_GPU, card="l4"), replace(ON_GPU, name="other", card="l40s")))
    assert _required_labels(check_deployment(both)) == _required_labels(ON_L40S), "the larger one runs both"


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_pods_on_gpus_tolerate_the_taint_of_gpu_nodes_once(target: str) -> None:
    own = {"key": "dedicated", "operator": "Equal", "value": "inference"}
    (spec,) = _specs(target, documents(ON_L40S, target))
    assert spec["tolerations"] == [GPU_TAINT]
    given = PodOptions(tolerations=[own, GPU_TAINT], runtime_class="nvidia")
    (spec,) = _specs(target, documents(replace(ON_L40S, pod=given), target))
    assert (spec["tolerations"], spec["runtimeClassName"]) == ([own, GPU_TAINT], "nvidia")
    (spec,) = _specs(target, documents(STORED, target))
    assert "tolerations" not in spec


@pytest.mark.parametrize("target", ["kubernetes", "kserve"])
def test_compiled_engines_are_kept_on_a_claim(target: str) -> None:
    claimed = replace(ON_L40S, pod=PodOptions(cache_claim="compiled"))
    written = documents(claimed, target)
    spec = (
        written["deployment.yaml"]["spec"]["template"]["spec"]
        if target == "kubernetes"
        else (written["serving-runtime.yaml"]["spec"])
    )
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "cache"]
    assert volume == {"name": "cache", "persistentVolumeClaim": {"claimName": "compiled"}}
    triton = next(c for c in (*spec.get("initContainers", ()), *spec["containers"]) if c["name"] != "pull")
    assert {"name": "cache", "mountPath": "/engines"} in triton["volumeMounts"]
    for document in written.values():
        if document["kind"] != "Kustomization":
            refuse_invalid(document, VERSIONS[-1])
    on_cpu = replace(STORED, pod=claimed.pod)
    assert "cache" not in [v["name"] for v in pod(on_cpu)["volumes"]], "nothing is compiled on a CPU"


def test_chart_has_card_taint_and_claim_as_values() -> None:
    chart = find_target("helm").files(replace(ON_L40S, pod=PodOptions(cache_claim="compiled")))
    values = yaml.safe_load(chart["values.yaml"])
    assert values["tolerations"] == [GPU_TAINT]
    assert values["cacheVolume"] == {"claimName": "compiled"}
    changed = {**values, "affinity": {}, "cacheVolume": {"claimName": "other"}}
    rendered = Renderer(changed, "cards", "default").render(chart["templates/deployment.yaml"])
    spec = yaml.safe_load(rendered)["spec"]["template"]["spec"]
    assert values["affinity"]
    assert spec["affinity"] == {}
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "other"}} in spec["volumes"]


def test_ray_refuses_a_pod_section_without_pods(placed: Deployment) -> None:
    with pytest.raises(SpecError, match="is for KubeRay's pods: give --registry"):
        find_target("ray").files(replace(IN_IMAGE, registry=None, pod=placed.pod))


def test_deploy_reads_the_pod_section_of_a_file(store: str, tmp_path: Path) -> None:
    path = _written(tmp_path, SECTION)
    options = ("--to", "kubernetes", "--repository", store, "--cores", "2", "--pod", str(path))
    spec = deploy(*options, output=tmp_path / "out")["deployment.yaml"]["spec"]["template"]["spec"]
    assert {name: spec.get(name) for name in FIELDS} == FIELDS


def test_pulled_models_have_a_limited_volume_and_a_storage_request(store: str, tmp_path: Path) -> None:
    written = deploy("--to", "kubernetes", "--repository", store, "--cores", "2", output=tmp_path / "out")
    spec = written["deployment.yaml"]["spec"]["template"]["spec"]
    (pull,) = [container for container in spec["initContainers"] if container["name"] == "pull"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "models"]
    repository = tmp_path / "pulled"
    assert main(["pull", "minilm", "writes", "--from", store, "--repository", str(repository)]) == 0
    files = sum(path.stat().st_size for path in repository.rglob("*") if path.is_file() and "/." not in str(path))
    requested = pull["resources"]["requests"]["ephemeral-storage"]
    assert 0 < requested <= files <= volume["emptyDir"]["sizeLimit"]
    refuse_invalid(written["deployment.yaml"], VERSIONS[0])
