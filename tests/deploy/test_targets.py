"""Every target: the registry, what it writes, and that it is what the orchestrator takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate

from builder.cli import main
from builder.deploy.deployment import Deployment
from builder.deploy.objects import objects
from builder.deploy.pod import SINCE
from builder.deploy.targets import find_target, names
from tests.deploy.deployments import ALL, DEPLOYMENTS, STORED

CUSTOM = {"PodMonitor", "ScaledObject", "InferencePool"}  # not Kubernetes' own
VERSIONS = (SINCE, "1.33", "1.37")


def documents(deployment: Deployment) -> dict[str, Any]:
    """What the target kubernetes writes, read again."""
    written = find_target("kubernetes").files(deployment)
    return {name: yaml.safe_load(text) for name, text in written.items() if name.endswith(".yaml")}


def test_the_folder_is_the_registry() -> None:
    assert {"helm", "kubernetes"} <= set(names())
    for name in names():
        assert "{output}" in find_target(name).then


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid_against_the_schemas_of_kubernetes(version: str, deployment: Deployment) -> None:
    found = documents(deployment)
    index = found.pop("kustomization.yaml")
    assert index["resources"] == list(found)
    for document in found.values():
        if document["kind"] not in CUSTOM:
            validate(document, version, strict=True)


def test_the_schemas_can_say_no() -> None:
    service = documents(STORED)["service.yaml"]
    service["spec"]["portz"] = service["spec"].pop("ports")
    with pytest.raises(ValidationError, match="portz"):
        validate(service, "1.37", strict=True)


class Renderer:
    """Go's templates as far as the charts here use them: a value, a name of the release, and a function of it.

    A small one, for where no Helm is; it refuses whatever else stands in braces.
    """

    EXPRESSION = re.compile(r"\{\{ \.(Values|Release)\.(\w+)(?: \| (toJson|quote))? \}\}")

    def __init__(self, values: dict[str, Any], name: str, namespace: str) -> None:
        self.known = {"Values": values, "Release": {"Name": name, "Namespace": namespace}}

    def render(self, template: str) -> str:
        text = self.EXPRESSION.sub(self._value, template)
        assert "{{" not in text, text
        return text

    def _value(self, found: re.Match[str]) -> str:
        value = self.known[found[1]][found[2]]
        return json.dumps(value) if found[3] else str(value)


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_a_chart_with_its_own_values_is_the_manifests(deployment: Deployment) -> None:
    chart = find_target("helm").files(deployment)
    renderer = Renderer(yaml.safe_load(chart["values.yaml"]), deployment.name, deployment.namespace)
    rendered = {
        Path(name).stem: yaml.safe_load(renderer.render(text))
        for name, text in chart.items()
        if name.startswith("templates/")
    }
    assert rendered == objects(deployment)


def test_a_chart_takes_other_values_and_another_name() -> None:
    chart = find_target("helm").files(ALL)
    values = yaml.safe_load(chart["values.yaml"])
    assert set(json.loads(chart["values.schema.json"])["properties"]) == set(values)
    renderer = Renderer({**values, "maxReplicas": 20, "sharedMemory": "1Gi"}, "other", "elsewhere")
    scaled = yaml.safe_load(renderer.render(chart["templates/scaled-object.yaml"]))
    assert scaled["spec"]["maxReplicaCount"] == 20
    assert scaled["spec"]["scaleTargetRef"]["name"] == "other"
    assert 'namespace="elsewhere", pod=~"other-.*"' in scaled["spec"]["triggers"][0]["metadata"]["query"]
    pod = yaml.safe_load(renderer.render(chart["templates/deployment.yaml"]))["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in pod["volumes"]


def test_what_cannot_be_meant_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["deploy", "--to", "kubernetes", "--repository", str(tmp_path), "--output", str(tmp_path / "out")]
    assert main([*command, "--max-replicas", "3"]) == 1
    assert "--max-replicas and --prometheus go together" in capsys.readouterr().err
    assert main(command) == 1
    assert "has no model" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
