"""Decoding through BLS with a cache that is passed from call to call and never read.

There is no GPU here: the engine runs on the CPU, once as a function and once as a Triton model of its own, where the
cache goes from response to request by DLPack as it does on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder import Client, build, make_spec, running
from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.engines.onnxruntime import open_session, run_with
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.candidates import with_candidates
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.slots import choose_rows
from builder.repository.check import check
from builder.runtime.contract import Session
from builder.runtime.generation.executors.bls_cuda import BlsCuda
from builder.runtime.generation.executors.onnxruntime import InProcess
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.generation.test_cuda_executor import SAMPLED, generated
from tests.graphs.test_decoders import prompts
from tests.tiny_encoders import VOCABULARY


class Handle:
    """Tensor on a device, which code here must not read."""

    def __init__(self, content: np.ndarray) -> None:
        self.content = content


def _engine(graph: Graph, fetched: Counter[Any] | None = None) -> Any:
    """Return an engine of the graph; `fetched` counts the requested outputs and their (rows, new tokens)."""
    run = run_with(open_session(graph.path, 1))

    def infer(feeds: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        sent = sum(value.nbytes for value in feeds.values() if isinstance(value, np.ndarray))
        assert sent < 64 * 1024, "no cache crosses to the device, not even an empty one"
        arrays = {name: value.content if isinstance(value, Handle) else value for name, value in feeds.items()}
        if fetched is not None:
            fetched.update([*outputs, feeds["input_ids"].shape])
        answered = run(arrays)
        return {name: Handle(answered[name]) if name.startswith("present_") else answered[name] for name in outputs}

    return infer


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_bls_cache_handles_give_the_answers_of_a_cache_in_place(model_type: str, tmp_path: Path) -> None:
    exported = export_decoder(make_decoder(model_type), tmp_path, 128)
    fused = fuse(exported.graph, tmp_path)
    chosen = choose_rows(fused, tmp_path)
    geometry = geometry_of(exported.caches, 4, 128, VOCABULARY)
    in_place = generate(InProcess(fused.path, geometry, Session(threads=1)), prompts(), 32)
    executor = BlsCuda(_engine(chosen), chosen.inputs, chosen.outputs, geometry)
    assert generate(executor, prompts(), 32) == in_place
    fetched = Counter[Any]()
    executor = BlsCuda(_engine(chosen, fetched), chosen.inputs, chosen.outputs, geometry)
    assert generate(executor, prompts(), 32, prefill_tokens=256) == in_place
    assert fetched[3, 64] == 1, "three prompts begin in one call, padded"


@pytest.mark.parametrize(("options", "enough"), [({}, True), ({**SAMPLED, "top_k": 8}, True), ({"logprobs": 2}, False)])
def test_bls_requests_candidates_only_where_these_are_enough(
    options: dict[str, Any], enough: bool, tmp_path: Path
) -> None:
    exported = export_decoder(make_decoder("llama"), tmp_path, 128)
    graph = choose_rows(with_candidates(exported.graph, tmp_path), tmp_path)
    geometry, fetched = geometry_of(exported.caches, 4, 128, VOCABULARY), Counter[Any]()
    answers = generated(BlsCuda(_engine(graph, fetched), graph.inputs, graph.outputs, geometry), options)
    assert (fetched["top_tokens"] > 0, fetched["logits"] > 0) == (enough, not enough)
    assert answers == generated(InProcess(exported.graph.path, geometry, Session(threads=1)), options)


def test_bls_copied_slot_continues_like_its_source(tmp_path: Path) -> None:
    exported = export_decoder(make_decoder("gpt2"), tmp_path, 8)
    graph = choose_rows(exported.graph, tmp_path)
    executor = BlsCuda(_engine(graph), graph.inputs, graph.outputs, geometry_of(exported.caches, 3, 8, VOCABULARY))
    executor.run(0, np.array([[5, 6, 7]]), np.array([0]))
    executor.copy(0, 1, 3)
    executor.copy(1, 2, 3)
    tokens = np.array([[8], [8], [8]])
    logits = executor.run(0, tokens, np.array([3, 3, 3]))
    np.testing.assert_allclose(logits[1:], logits[:1].repeat(2, axis=0), atol=1e-5)
    executor.run(0, np.array([[9, 10, 11, 12]]), np.array([4]))  # slot 0 is full now, and waits
    expected = executor.run(1, np.array([[9]]), np.array([4])).copy()
    executor.copy(0, 2, 7)
    full = executor.run(2, np.array([[12]]), np.array([7]))
    again = executor.run(0, np.array([[12]]), np.array([7]))
    np.testing.assert_allclose(full, again, atol=1e-5)
    assert np.isfinite(expected).all()


@pytest.mark.slow
def test_triton_passes_cache_handles_on(tmp_path: Path) -> None:
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", "llama")
    options: dict[str, Any] = {"slots": 3, "max_length": 64, "quality": 0.9}
    on_gpu = {"target": "cuda", "precision": "fp16", "executor": "bls"}
    build(make_spec(model=str(checkpoint), name="handed", output=tmp_path / "r", **options, **on_gpu))
    assert check(tmp_path / "r") == []
    engine = tmp_path / "r" / "handed_model" / "config.pbtxt"
    text = engine.read_text()
    assert "kind: KIND_GPU" in text
    assert "KIND_GPU" not in (tmp_path / "r" / "handed" / "config.pbtxt").read_text()
    engine.write_text(text.replace("kind: KIND_GPU", "kind: KIND_CPU").replace("  gpus: [ 0 ]\n", ""))
    build(make_spec(model=str(checkpoint), name="in_place", output=tmp_path / "r", **options))
    with running(tmp_path / "r") as server:
        answers = {}
        for name in ("handed", "in_place"):
            with Client(server.url, name) as client:
                texts = ["the river and the village", "a", "the river and the hill"]
                answers[name] = [client.ask({"text_input": text, "max_tokens": 12}) for text in texts]
    assert answers["handed"] == answers["in_place"]
