"""The needs of a model, estimated before its build and measured by it, agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.checkpoints.resolve import resolve
from builder.common.errors import SpecError
from builder.common.memory import cache_bytes, weights_bytes
from builder.graphs.export.decoder import cache_shapes
from builder.graphs.export.seq2seq import seq2seq_shapes
from builder.options import make_spec
from builder.repository.report.record import read_report
from builder.runtime.contract import LayerShape, load_encoder, load_generation
from builder.serving.plan.machine import plan
from builder.serving.plan.needs import needs_of, published
from tests.decoders import make_decoder_checkpoint


def test_needs_from_the_config_equal_those_of_the_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("topics", "writes", "sums"):
        spec = make_spec(model=str(checkpoint(name)), output=tmp_path, slots=4)
        needs, built = needs_of(spec), resolve(spec)
        assert needs.weights == weights_bytes(built.model), name
        assert needs.latency is None
        if name == "writes":
            assert (needs.layers, needs.length) == (cache_shapes(built.model), built.max_length)
            shared = needs_of(spec.model_copy(update={"engine": "openvino", "cache": "int8"}))
            assert (shared.paged, shared.cache, needs.paged, needs.cache) == (True, "uint8", False, "float32")
            assert needs_of(spec.model_copy(update={"engine": "auto"})) == needs, "slots take the most"
            half = needs_of(spec.model_copy(update={"engine": "auto", "cache": "fp16"}))
            assert (half.paged, half.cache) == (True, "float16"), "which OpenVINO alone has"
        elif name == "sums":
            assert (needs.layers, needs.cross) == seq2seq_shapes(built.model)
            assert needs.source == built.max_length
        else:
            assert (needs.kind, needs.length) == ("encoder", built.max_length)


def test_needs_of_a_model_with_a_pad_token_require_no_weights(tmp_path: Path) -> None:
    folder = make_decoder_checkpoint(tmp_path / "pads", "gpt2", pad_token_id=0)
    needs = needs_of(make_spec(model=str(folder), output=tmp_path))
    assert needs.layers == cache_shapes(resolve(make_spec(model=str(folder), output=tmp_path)).model)


def test_needs_of_a_mixture_of_experts_require_no_weights(tmp_path: Path) -> None:
    """Regression: transformers computes experts by an operator that takes bfloat16 alone without weights."""
    folder = make_decoder_checkpoint(tmp_path / "experts", "glm4_moe")
    needs = needs_of(make_spec(model=str(folder), output=tmp_path))
    assert needs.layers == cache_shapes(resolve(make_spec(model=str(folder), output=tmp_path)).model)


def test_needs_of_latent_attention_count_latents(tmp_path: Path) -> None:
    """A token's latent and rotated key, 16 + 8 numbers a layer, are kept once for all heads."""
    folder = make_decoder_checkpoint(tmp_path / "latents", "deepseek_v3")
    needs = needs_of(make_spec(model=str(folder), output=tmp_path))
    assert {(layer.heads, layer.size) for layer in needs.layers} == {(1, 24)}
    expanded = [LayerShape(4, 24)] * len(needs.layers)
    assert 4 * cache_bytes(needs.layers, 1, 100, 4) == cache_bytes(expanded, 1, 100, 4)


def test_needs_of_a_published_model_include_its_latencies(repository: Path, checkpoint: Callable[[str], Path]) -> None:
    encoder = published(repository, "topics")
    assert encoder.kind == "encoder"
    assert encoder.latency is not None
    assert encoder.weights > 0
    call = (read_report(repository, "topics").memory or {})["activations"]
    serving = load_encoder(next((repository / "topics").glob("[0-9]*")))
    assert call == encoder.call_bytes(serving.batching.token_budget)
    decoder = published(repository, "writes")
    arena = load_generation(next((repository / "writes").glob("[0-9]*"))).arena
    assert (decoder.layers, decoder.length, decoder.cache) == (arena.layers, arena.length, arena.dtype)
    assert "token, 8 rows" in (decoder.latency or {})
    load = {"requests_per_s": 1, "tokens": 8, "answer_tokens": 8}
    spec = make_spec(model=str(checkpoint("writes")), name="writes", output=repository, load=load)
    (planned,), machine = plan([spec])
    assert planned.cores is not None, "speeds are those of its build"
    assert machine.shm >= 256 << 20


def test_needs_of_a_vllm_model_are_refused() -> None:
    with pytest.raises(SpecError, match="vllm plans its own memory"):
        needs_of(make_spec(model="org/it", engine="vllm", load={"requests_per_s": 1}))
