"""The bill of materials of each model is valid, complete and reproducible."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from builder.checkpoints.fetch import read_card
from builder.repository.report.bom import BOM, bom
from builder.repository.report.record import MeasuredVariant, read_report
from tests import reports

REPORT = replace(
    reports.REPORT,
    checkpoint={"source": "org/name", "revision": "0" * 40, "model_type": "bert", "weights_sha256": "a" * 64},
    versions={"torch": "2.13.0"},
    samples=3,
    files={"front": {"1/model.py": "b" * 64}, "front_model": {"1/model.onnx": "c" * 64}},
    verified=True,
)


def _valid(text: str) -> Any:
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert problem is None, problem
    return json.loads(text)


def _with(**checkpoint: Any) -> Any:
    return _valid(bom(replace(REPORT, checkpoint={**REPORT.checkpoint, **checkpoint})))


def test_bom_schema_refuses_an_invalid_document() -> None:
    broken = {**json.loads(bom(REPORT)), "components": [{"type": "machine-learning-model"}]}
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(broken)) is not None


def test_bom_names_files_checkpoint_and_library_versions() -> None:
    document = _valid(bom(REPORT))
    served = document["metadata"]["component"]
    assert served["type"] == "machine-learning-model"
    assert {file["name"]: file["hashes"][0]["content"] for file in served["components"]} == {
        "front/1/model.py": "b" * 64,
        "front_model/1/model.onnx": "c" * 64,
    }
    checkpoint, *libraries = document["components"]
    assert checkpoint["purl"] == f"pkg:huggingface/org/name@{'0' * 40}"
    assert checkpoint["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    versions = {library["name"]: library["version"] for library in libraries}
    assert versions["tritonserver"] == "24.10"
    assert versions["onnxruntime"] == "1.23.2", "of the interpreter of that release"
    assert versions["numpy"] == "1.26.4"
    on_gpus = _valid(bom(replace(REPORT, triton="26.08", target="cuda")))["components"]
    assert {"onnxruntime-gpu": "1.31.1"}.items() <= {one["name"]: one.get("version") for one in on_gpus}.items()
    (dataset,) = served["modelCard"]["modelParameters"]["datasets"]
    assert dataset["name"] == "build-repo's samples"
    own = replace(REPORT, samples_file={"name": "mine.jsonl", "sha256": "d" * 64})
    (dataset,) = _valid(bom(own))["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"]
    assert (dataset["name"], "d" * 64 in dataset["description"]) == ("mine.jsonl", True)
    judged = replace(own, budget={"name": "reviews.jsonl", "sha256": "f" * 64})
    (_, data) = _valid(bom(judged))["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"]
    assert (data["name"], "f" * 64 in data["description"]) == ("reviews.jsonl", True)


def test_bom_has_the_digests_of_an_adopted_graph() -> None:
    """Regression: nothing recorded which graph was adopted."""
    digests = {"model.onnx": "d" * 64, "weights": "e" * 64}
    document = _valid(bom(replace(REPORT, graph_files=digests)))
    graph = document["components"][1]
    assert graph["name"] == "model.onnx"
    assert {file["name"]: file["hashes"][0]["content"] for file in graph["components"]} == digests
    assert graph["bom-ref"] in document["dependencies"][0]["dependsOn"]


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("apache-2.0", {"id": "Apache-2.0"}),
        ("mit", {"id": "MIT"}),
        ("llama3", {"name": "llama3"}),
        ("mit or apache-2.0", {"name": "MIT OR Apache-2.0"}),
        ("other\u202e", {"name": "other\u202e"}),
    ],
)
def test_bom_has_the_licence_of_the_card(licence: str, expected: dict[str, str]) -> None:
    document = _with(license=[licence], base_model=["org/base"], datasets=["org/data"])
    checkpoint = document["components"][0]
    assert checkpoint["licenses"] == [{"license": expected}]
    assert document["metadata"]["component"]["licenses"] == checkpoint["licenses"]
    assert checkpoint["pedigree"]["ancestors"][0]["name"] == "org/base"
    assert checkpoint["modelCard"]["modelParameters"]["datasets"] == [{"type": "dataset", "name": "org/data"}]


def test_bom_is_the_same_for_equal_builds_and_has_a_serial_number() -> None:
    slower = replace(REPORT, variants=(MeasuredVariant("fp32", 1, {"1x16": 3.0}),), padding=0.5)
    assert bom(REPORT) == bom(slower), "what was measured is not what it was made of"
    other = replace(REPORT, files={"front": {"1/model.py": "e" * 64}})
    assert json.loads(bom(REPORT))["serialNumber"] != json.loads(bom(other))["serialNumber"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("---\nlicense: mit\nbase_model: org/a\n---\n# A model", {"license": ["mit"], "base_model": ["org/a"]}),
        ("---\ndatasets: [a, {b: c}, 3, d]\n---\n", {"datasets": ["a", "d"]}),
        ("---\nlicense: !!python/object/apply:os.system ['true']\n---\n", {}),
        ("---\nlicense: [" + "[" * 5000, {}),
        ("---\na: &a [x, x]\nb: &b [*a, *a]\nlicense: [*b, *b]\n---\n", {}),
        ('---\nlicense: "a\\nb"\n---\n', {}),
        ("# no metadata\n---\nlicense: mit\n---", {}),
        ("---\n- mit\n---", {}),
        ("", {}),
    ],
)
def test_card_is_read_without_running_it(text: str, expected: dict[str, list[str]], tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert read_card(tmp_path) == expected


def test_checkpoint_without_a_card_has_no_metadata(tmp_path: Path) -> None:
    assert read_card(tmp_path) == {}


def test_build_writes_the_bom_beside_its_model(small_repository: Path, checkpoint: Callable[[str], Path]) -> None:
    document = _valid((small_repository / "topics" / BOM).read_text("utf-8"))
    report = read_report(small_repository, "topics")
    files = {file["name"] for file in document["metadata"]["component"]["components"]}
    assert files == {f"topics/{name}" for name in report.files["topics"]}
    assert document["components"][0]["name"] == report.checkpoint["source"]
