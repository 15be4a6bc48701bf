"""Encoders in OpenVINO with weights of 8 and 4 bits in blocks: embedders, rerankers and late interaction."""

from __future__ import annotations

import xml.etree.ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.building.pipeline import build
from builder.options import make_spec
from builder.repository.report.record import BuildReport
from tests.embedders import make_embedder
from tests.rerankers import make_reranker
from tests.tiny_encoders import make_checkpoint, make_colbert

KINDS: dict[str, Callable[[Path], Path]] = {
    "decoder that embeds": lambda folder: make_embedder(folder, "qwen3", "lasttoken"),
    "decoder that ranks": lambda folder: make_reranker(folder, "qwen3"),
    "late interaction": lambda folder: make_colbert(make_checkpoint(folder, "bert", "feature-extraction")),
}


def _built(folder: Path, output: Path, precision: str) -> tuple[BuildReport, Path]:
    """Build with OpenVINO. Return the report, and the graph that the front opens."""
    options = {"engine": "openvino", "name": "model", "output": output / precision, "quality": 0.9}
    report = build(make_spec(model=str(folder), precision=precision, **options))
    (graph,) = (output / precision).rglob("model.xml")
    return report, graph


@pytest.mark.parametrize(
    ("kind", "precision", "stored_as"),
    [*((kind, "int8-weights", "u8") for kind in KINDS), ("late interaction", "int4-weights", "u4")],
)
def test_weights_in_blocks_answer_like_pytorch_in_a_smaller_file(
    kind: str, precision: str, stored_as: str, tmp_path: Path
) -> None:
    """Read the groups of activations from the file, since Triton's backend takes no such parameter."""
    folder = KINDS[kind](tmp_path / "checkpoint")
    report, graph = _built(folder, tmp_path, precision)
    assert report.chosen == f"{precision} OpenVINO"
    (served,) = (variant for variant in report.variants if variant.name == report.chosen)
    assert served.quality is not None
    assert 0.9 <= served.quality < 1 - 1e-7, "it is not fp32 under another name"
    stored = xml.etree.ElementTree.parse(graph).getroot()
    (groups,) = stored.iter("DYNAMIC_QUANTIZATION_GROUP_SIZE")
    assert groups.get("value") == "128"
    constants = [data.get("element_type") for layer in stored.iter("layer") for data in layer.iter("data")]
    assert constants.count(stored_as) >= 12, "six products or more of two layers"
