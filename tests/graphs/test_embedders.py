"""Decoders whose features are an embedding: causal attention without a cache, equal to sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from sentence_transformers import SentenceTransformer

from builder.building.pipeline import build
from builder.building.verify import runtimes
from builder.checkpoints.resolve import resolve
from builder.common.errors import ExportError, VerificationError
from builder.common.samples import TEXTS
from builder.engines import Infer, infer_with
from builder.engines.openvino import convert
from builder.engines.optimise.fusion import fuse
from builder.engines.plain_attention import spell_out_attention
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import ATTENTION, CACHED_ATTENTION
from builder.options import make_spec
from builder.repository.report.record import BuildReport
from tests.embedders import PROMPT, make_embedder

BATCHES = (
    ["a fox"],
    ["", "a fox and a dog", "a fox and a cat", "a fox", ""],
    [TEXTS[0], "Zürich – 東京 🚆", TEXTS[5]],
    [" ".join(TEXTS)[:400], "short"],
)
BOTH_WAYS = {"is_causal": False, "use_sliding_window": False}
WINDOWED = {"use_bidirectional_attention": True}


@pytest.mark.parametrize(
    ("model_type", "mode", "options", "operator"),
    [
        pytest.param("qwen3", "lasttoken", {}, CACHED_ATTENTION, id="Qwen3-Embedding"),
        pytest.param("llama", "lasttoken", {}, CACHED_ATTENTION, id="llama"),
        pytest.param("mistral", "lasttoken", {}, ATTENTION, id="e5-mistral"),
        pytest.param("qwen2", "lasttoken", BOTH_WAYS, ATTENTION, id="gte-Qwen2"),
        pytest.param("gemma3_text", "mean", WINDOWED, ATTENTION, id="EmbeddingGemma"),
    ],
)
def test_decoder_embeds_like_sentence_transformers(
    model_type: str, mode: str, options: dict[str, Any], operator: str, tmp_path: Path
) -> None:
    """Alone, padded, empty, equal, long, Unicode and prompted texts; on ONNX Runtime, and spelled out on OpenVINO.

    Equal beginnings are computed once where a token sees all those before it and no others.
    """
    folder = make_embedder(tmp_path / "embedder", model_type, mode, **options)
    checkpoint = resolve(make_spec(model=str(folder)))
    exported = export(checkpoint, tmp_path, shares_prefixes=True)
    assert exported.warning is None
    assert exported.shares_prefixes == (operator == CACHED_ATTENTION)
    assert exported.graph.operators[operator] == exported.layers == 2
    plain = spell_out_attention(exported.graph, tmp_path)
    converted = convert(plain, tmp_path / "ir" / "model.xml", "fp32", half_weights=False)
    engines = [infer_with(graph, 1) for graph in (fuse(exported.graph, tmp_path), plain)] + [_exactly(converted)]
    library = SentenceTransformer(str(folder), device="cpu")
    checkpoint.tokenizer.padding_side = "right"
    for batch in BATCHES:
        for prompt in ("", PROMPT):
            expected = library.encode(batch, prompt=prompt)
            encoded = checkpoint.tokenizer([prompt + text for text in batch], padding=True, return_tensors="np")
            feeds = {name: encoded[name].astype(np.int64) for name in exported.graph.inputs}
            for engine in engines:
                cosines = (engine(feeds)["features"] * expected).sum(axis=-1)
                assert cosines.min() >= 0.999999


def _exactly(graph: Graph) -> Infer:
    """Run OpenVINO in fp32 on any CPU."""
    model = openvino.Core().compile_model(str(graph.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: {name: model(feeds)[name] for name in graph.outputs}


def test_build_checks_causal_attention_on_the_engine_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is published if an older ONNX Runtime answers otherwise or lacks the operator."""
    model = str(make_embedder(tmp_path / "embedder", "qwen3", "lasttoken"))
    replayed = runtimes.replayed
    try:
        runtimes.environment("onnxruntime", "1.19.2")
    except runtimes.EngineUnavailable as reason:
        pytest.skip(f"ONNX Runtime 1.19.2 is not in the cache (scripts/setup puts it there): {reason}")

    def build_for(triton: str) -> BuildReport:
        output = tmp_path / "repository"
        return build(make_spec(model=model, name="embeds", triton=triton, executor="bls", output=output))

    def shifted(folder: Path, jobs: Sequence[Mapping[str, Any]]) -> list[Any]:
        results: list[Any] = replayed(folder, jobs)
        return [[{name: values * 1.01 for name, values in answer.items()} for answer in one] for one in results]

    with pytest.raises(ExportError, match=r"GroupQueryAttention on CPU, .* from 1.18.0 on.* Build for Triton 24.05"):
        build_for("24.04")
    monkeypatch.setattr(runtimes, "replayed", shifted)
    with pytest.raises(VerificationError, match=r"onnxruntime 1.19.2, .* answers model.onnx differently"):
        build_for("24.10")
    assert not list(tmp_path.glob("repository/embeds*/*"))
    monkeypatch.setattr(runtimes, "replayed", replayed)
    (check,) = build_for("24.10").verified_on
    assert (check.version, check.verified) == ("1.19.2", True)
