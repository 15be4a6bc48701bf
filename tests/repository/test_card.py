"""Model cards: the metadata that the Hub reads, and the tables of what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from builder.cli import main
from builder.repository.report.card import model_card
from builder.repository.report.evaluations import EvaluationRecord, add_evaluation
from builder.repository.report.record import REPORT, MeasuredVariant
from builder.repository.signing_keys import SIGNATURE
from tests import reports

PYTORCH = MeasuredVariant("PyTorch fp32", 90_000_000, {"1x128": 20.0}, timed_in="a")
SERVED = MeasuredVariant("int8", 23_000_000, {"1x128": 5.0}, quality=0.9912, ranking={"recall@10": 0.98}, timed_in="a")
BUILT = replace(
    reports.REPORT,
    checkpoint={"source": "org/name", "revision": "abc", "license": ["apache-2.0"], "datasets": ["squad"]},
    cpu={"model": "a | CPU", "flags": []},
    variants=(PYTORCH, SERVED),
    chosen="int8",
    verified=True,
    samples=40,
    warnings=("texts longer than 128 tokens are cut",),
)
MEASURED = EvaluationRecord(
    version=1,
    build_key=None,
    data={"name": "pairs.jsonl", "kind": "pairs with scores", "count": "8 pairs", "sha256": "0", "split": ""},
    pytorch={"Spearman": 0.8},
    served={"Spearman": 0.79},
    metric="cosine",
    agreement=0.99,
    server="triton 2.70.0",
    evaluated="2026-11-28",
    interval={"Spearman": (-0.03, 0.01)},
)


def test_the_hub_reads_the_metadata() -> None:
    data: Any = ModelCard(model_card(BUILT, [MEASURED], signed=False)).data
    assert (data.base_model, data.license, data.pipeline_tag) == ("org/name", "apache-2.0", "feature-extraction")
    assert data.base_model_relation == "quantized"
    (result,) = data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("pairs.jsonl", "Spearman", 0.79)


@pytest.mark.parametrize("name", ["fp32", "O1 fp32", "compacted fp32", "fp16 CUDA", "auto vLLM"])
def test_card_calls_no_other_variant_quantised(name: str) -> None:
    """Regression: the metadata of a compacted model in fp32 called it quantised."""
    served = replace(BUILT, variants=(PYTORCH, replace(SERVED, name=name)), chosen=name)
    data: Any = ModelCard(model_card(served, [], signed=False)).data
    assert "base_model_relation" not in data.to_dict()


def test_card_says_what_was_measured() -> None:
    card = model_card(BUILT, [MEASURED], signed=True)
    for line in (
        "| cosine | 0.9912 |",
        "| recall@10 | 0.9800 |",
        "| Spearman | 0.8000 | 0.7900 | -0.0100 (-0.0300 to +0.0100) |",
        "Median milliseconds on a | CPU, measured by the build. 4.0 times PyTorch's speed over all shapes.",
        "| 1x128 | 20.00 | 5.00 |",
        "| signature | model.sig, which `build-repo verify` checks |",
        "- texts longer than 128 tokens are cut",
    ):
        assert line in card.splitlines()


def test_card_has_the_data_of_the_budget() -> None:
    data = {"name": "r.jsonl", "kind": "texts with labels", "count": "9 texts", "allowed": "accuracy -1%"}
    scored = replace(SERVED, scores={"accuracy": 0.89}, interval={"accuracy": (-0.02, 0.0)})
    variants = (replace(PYTORCH, scores={"accuracy": 0.9}), scored)
    lines = model_card(replace(BUILT, variants=variants, budget=data), [], signed=False).splitlines()
    assert "| accuracy | 0.9000 | 0.8900 (-0.0200 to +0.0000) |" in lines
    assert "| accuracy | 0.8900 |" not in lines, "it is not of the samples"


def test_card_has_the_digest_of_an_adopted_graph() -> None:
    card = model_card(replace(BUILT, graph_files={"model.onnx": "d" * 64}), [], signed=False)
    assert f"| adopted model.onnx, SHA-256 | {'d' * 64} |" in card.splitlines()


def test_card_of_an_unmeasured_model_leaves_its_sections_out() -> None:
    """A model that is not verified, such as one of vLLM, has no quality and no times."""
    bare = replace(reports.REPORT, variants=(MeasuredVariant("the checkpoint", 1, {}),), samples=0)
    card = model_card(bare, [], signed=False)
    assert "Not verified" in card
    assert "## Quality" not in card
    assert "## Speed" not in card


def test_command_writes_the_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = tmp_path / BUILT.name / "1"
    version.mkdir(parents=True)
    (version / SIGNATURE).write_text("{}")
    (version.parent / REPORT).write_text(BUILT.to_json())
    add_evaluation(tmp_path, BUILT.name, MEASURED)
    file = tmp_path / "card.md"
    assert main(["card", BUILT.name, "--repository", str(tmp_path), "-o", str(file)]) == 0
    assert file.read_text() == model_card(BUILT, [MEASURED], signed=True)
    capsys.readouterr()
    assert main(["card", BUILT.name, "--repository", str(tmp_path)]) == 0
    assert capsys.readouterr().out == file.read_text()
