"""Heads and neurons are removed: exactly the empty ones, or by importance if a share is requested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from builder.building.pipeline import build
from builder.checkpoints.resolve import resolve
from builder.common.errors import VerificationError
from builder.common.samples import TEXTS
from builder.engines import infer_with
from builder.engines.optimise.compaction import compact
from builder.engines.optimise.pruning import fisher, prune, search_mask
from builder.engines.optimise.structure import open_structures
from builder.graphs.export.encoder import Export, export
from builder.graphs.onnx.graph import Graph
from builder.options import make_spec
from tests.length_batches import batches, features
from tests.models import minilm
from tests.tiny_encoders import make_checkpoint


def answers(graph: Graph) -> np.ndarray:
    mask = (np.arange(20) < np.array([20, 7])[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(5, 500, mask.shape) * mask
    feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return infer_with(graph, 1)({name: feed[name] for name in graph.inputs})[graph.outputs[0]][mask.astype(bool)]


def emptied(folder: Path, model_type: str = "bert") -> Path:
    """Create a checkpoint without head 1 and neurons 3 and 5 of layer 0, and with only constant neurons in layer 1."""
    make_checkpoint(folder, model_type, "feature-extraction")
    model: Any = AutoModel.from_pretrained(folder)
    first, second = model.encoder.layer
    with torch.no_grad():
        first.attention.output.dense.weight[:, 8:16] = 0  # nothing reads head 1
        first.output.dense.weight[:, [3, 5]] = 0
        second.attention.self.value.weight[16:24] = 0  # head 2 always returns its bias
        second.attention.self.value.bias[16:24] = 0.7
        second.intermediate.dense.weight[:] = 0  # every neuron is constant
        second.intermediate.dense.bias[:] = 0.3
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", ["bert", "roberta", "electra"])
def test_compact_removes_empty_units_without_changing_values(model_type: str, tmp_path: Path) -> None:
    spec = make_spec(model=str(emptied(tmp_path / "checkpoint", model_type)), task="feature-extraction")
    graph = export(resolve(spec), tmp_path).graph
    smaller, removed = compact(graph, tmp_path)
    assert removed is not None
    assert (removed.heads, removed.neurons) == (2, 2 + 63), "one neuron stays: an empty matrix has no product"
    assert (removed.all_heads, removed.all_neurons) == (8, 128)
    assert [s.units for s in open_structures(smaller)[1]] == [3, 62, 3, 1]
    assert smaller.size < graph.size
    np.testing.assert_allclose(answers(smaller), answers(graph), atol=1e-5)


def test_compact_returns_a_graph_without_empty_units_unchanged(tmp_path: Path) -> None:
    spec = make_spec(model=str(make_checkpoint(tmp_path / "whole", "bert", "feature-extraction")))
    graph = export(resolve(spec), tmp_path).graph
    assert compact(graph, tmp_path) == (graph, None)


def test_report_names_the_removed_empty_units(tmp_path: Path) -> None:
    spec = make_spec(model=str(emptied(tmp_path / "pruned")), task="feature-extraction", output=tmp_path / "repository")
    report = build(spec)
    assert [measured.name for measured in report.variants] == ["PyTorch fp32", "compacted fp32"]
    assert report.removed["empty"]["heads"] == 2
    assert report.variants[1].error is not None
    assert report.variants[1].error < 1e-4


def test_compact_keeps_heads_with_rotary_embeddings(tmp_path: Path) -> None:
    """ModernBERT rotates queries after their product, and its feed-forward gate is half of one matrix."""
    spec = make_spec(model=str(make_checkpoint(tmp_path / "modernbert", "modernbert", "feature-extraction")))
    graph = export(resolve(spec), tmp_path).graph
    assert open_structures(graph)[1] == ()
    with pytest.raises(VerificationError, match="0 found"):
        search_mask([], [], 0.3)


@pytest.fixture(scope="module")
def real(module_folder: Callable[[str], Path]) -> Export:
    folder = module_folder("real")
    spec = make_spec(model=str(minilm()))
    return export(resolve(spec), folder)


@pytest.mark.slow
def test_pruning_beats_chance_and_reconstruction_helps(
    real: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = resolve(make_spec(model=str(minilm()))).tokenizer
    fitted, judged = batches(tokenizer, TEXTS[::2]), batches(tokenizer, TEXTS[1::2])
    expected = features(real.graph, judged)

    def cosine(graph: Graph) -> float:
        return float((features(graph, judged) * expected).sum(axis=-1).mean())

    model, structures = open_structures(real.graph)
    importance = fisher(model, real.module, structures, fitted)
    monkeypatch.setattr("builder.engines.optimise.pruning.fisher", lambda *_: importance)
    pruned, removed = prune(real.graph, real.module, 0.3, fitted, tmp_path / "solved")
    layers = sum(s.units * s.size for s in structures)
    assert sum(s.units * s.size for s in open_structures(pruned)[1]) < layers
    weights = 6 * (4 * 384 * 384 + 2 * 384 * 1536)
    gone = removed.heads * 4 * 32 * 384 + removed.neurons * 2 * 384
    assert 0.3 <= gone / weights <= 0.301
    assert removed.heads > 0
    assert removed.neurons > 0
    monkeypatch.setattr("builder.engines.optimise.pruning._reconstruct", lambda *_: None)
    monkeypatch.setattr(
        "builder.engines.optimise.pruning._outputs", lambda model, shorter, feeds: dict.fromkeys(shorter)
    )
    unsolved, _ = prune(real.graph, real.module, 0.3, fitted, tmp_path / "unsolved")
    generator = np.random.default_rng(0)
    chance = {structure: generator.random(structure.units) for structure in structures}
    monkeypatch.setattr("builder.engines.optimise.pruning.fisher", lambda *_: chance)
    random, _ = prune(real.graph, real.module, 0.3, fitted, tmp_path / "random")
    assert cosine(pruned) > cosine(unsolved)
    assert cosine(unsolved) > cosine(random) + 0.1


def test_search_mask_removes_the_share_of_least_importance() -> None:
    heads, neurons = np.array([5.0, 1.0, 9.0]), np.array([0.1, 0.2, 3.0, 4.0, 0.3, 8.0])
    mask = search_mask([heads, neurons], [2.0, 1.0], share=5 / 12)
    assert mask == [[0, 2], [2, 3, 5]], "one head (2, importance 1) and three neurons (0.6) are cheaper than five"
    mask = search_mask([heads, neurons], [2.0, 1.0], share=2 / 12)
    assert mask == [[0, 1, 2], [2, 3, 4, 5]], "two neurons are cheaper than a head"
    with pytest.raises(VerificationError, match=r"--prune 0.9 is more than can be removed: 0\.75"):
        search_mask([heads, neurons], [2.0, 1.0], share=0.9)
