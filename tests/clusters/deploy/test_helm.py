"""Charts rendered by Helm's own library (pip install '.[charts]'); test_targets renders them without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from builder.clusters.deploy.deployment import Deployment
from builder.clusters.deploy.objects import objects
from builder.clusters.deploy.targets import find_target
from tests.clusters.deploy.deployments import DEPLOYMENTS, STORED

helm = pytest.importorskip("helm_python", reason="Helm's library is not here: pip install '.[charts]'")
WARNING = 2  # of Helm's severities: 1 is a hint


def _chart(deployment: Deployment, folder: Path) -> Path:
    for name, text in find_target("helm").files(deployment).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_chart_passes_helm_lint_and_renders_the_manifests(deployment: Deployment, tmp_path: Path) -> None:
    chart = _chart(deployment, tmp_path)
    problems = helm.lint(str(chart))
    assert problems["errors"] == []
    assert [message for message in problems["messages"] if message["severity"] >= WARNING] == []
    with helm.Chart.load(str(chart)) as loaded:
        rendered = loaded.render({}, name=deployment.name, namespace=deployment.namespace)
    manifests = {Path(name).stem: yaml.safe_load(text) for name, text in rendered.items()}
    assert manifests == objects(deployment)


def test_chart_schema_refuses_unknown_values(tmp_path: Path) -> None:
    with helm.Chart.load(str(_chart(STORED, tmp_path))) as loaded:
        rendered = loaded.render({"replicas": 7}, name="other", namespace="text")
        (workload,) = [yaml.safe_load(text) for name, text in rendered.items() if name.endswith("/deployment.yaml")]
        assert (workload["spec"]["replicas"], workload["metadata"]["name"]) == (7, "other")
        refused: list[dict[str, object]] = [{"replicas": []}, {"replica": 7}]
        for wrong in refused:
            with pytest.raises(helm.HelmError):
                loaded.validate_schema(wrong)
