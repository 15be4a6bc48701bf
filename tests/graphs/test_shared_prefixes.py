"""Equal beginnings of rows that are computed once: which tokens a call computes, and when that changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from builder.building.variants.evaluator import make_evaluator
from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.common.tensors import to_tensors
from builder.engines import infer_with
from builder.graphs.export.encoder import export, task_graph
from builder.graphs.export.rows import rows_of
from builder.graphs.export.shared_prefixes import TOKENS_STEP, share_prefixes, shared_tokens
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.fields import Tensors
from tests.embedders import make_embedder
from tests.rerankers import make_reranker
from tests.servings import answered

PAD = 7


def test_shared_tokens_skip_equal_beginnings_and_padding() -> None:
    """A row that ends with the padding's own id is not taken for a shorter one."""
    beginning = list(range(10, 70))
    rows = [[*beginning, 1, PAD, PAD], [*beginning, 1], [*beginning, 2, 3], [4], []]
    ids = torch.full((len(rows), 63), PAD)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        mask[row, : len(tokens)] = 1
    shared = shared_tokens(ids, mask)
    computed = ids.flatten()[shared.kept]
    distinct = 60 + 3 + 2 + 1 + 1  # the row without tokens has one too
    assert distinct <= len(computed) < distinct + TOKENS_STEP
    assert torch.equal(computed[shared.source][mask != 0], ids[mask != 0])
    beginnings = shared.source[:3, :60]
    assert torch.equal(beginnings, beginnings[:1].expand(3, -1))
    assert len({int(shared.source[row, 60]) for row in (0, 2)}) == 2


@pytest.mark.parametrize("model_type", ["lfm2", "bloom"])
def test_prefixes_are_not_shared_if_more_than_attention_reads_them(model_type: str, tmp_path: Path) -> None:
    """A convolution reads neighbours; ALiBi needs the place of a token, which such a model does not take."""
    checkpoint = resolve(make_spec(model=str(make_embedder(tmp_path / "embedder", model_type, "lasttoken"))))
    assert share_prefixes(task_graph(checkpoint), rows_of(checkpoint)) is None


def test_reranker_with_shared_prefixes_scores_like_sentence_transformers(tmp_path: Path) -> None:
    """Several queries in one call, an empty document, and one that begins as the template goes on."""
    folder = make_reranker(tmp_path / "reranker", "qwen3")
    checkpoint = resolve(make_spec(model=str(folder), task="text-ranking"))
    exported = export(checkpoint, tmp_path, shares_prefixes=True)
    assert exported.shares_prefixes
    encoder = CrossEncoder(str(folder), device="cpu")
    pairs = [(query, document) for query in TEXTS[:2] for document in ("", ":", "<|im_end|>", TEXTS[3], TEXTS[4])]
    expected = [encoder.predict([pair], activation_fn=torch.nn.Identity())[0] for pair in pairs]
    conversations = [[{"role": "query", "content": a}, {"role": "document", "content": b}] for a, b in pairs]
    texts = checkpoint.tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    checkpoint.tokenizer.padding_side = "right"
    encoded = checkpoint.tokenizer(texts, padding=True, return_tensors="np", add_special_tokens=False)
    feeds = {name: encoded[name].astype(np.int64) for name in exported.graph.inputs}
    logits = infer_with(exported.graph, 1)(feeds)["logits"][:, 0]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.array_equal(np.argsort(-logits), np.argsort(-np.array(expected)))


def test_reranker_scores_the_documents_of_a_query_in_one_call(tmp_path: Path) -> None:
    """Two queries of a batch are two calls at most; calls cut by padded tokens are more, and give the same scores."""
    spec = make_spec(model=str(make_reranker(tmp_path / "reranker", "qwen3")), task="text-ranking")
    checkpoint = resolve(spec)
    exported = export(checkpoint, tmp_path, shares_prefixes=True)
    evaluator = make_evaluator(spec, checkpoint, exported.module, exported.graph, tmp_path, exported.shares_prefixes)
    front = Pipeline(evaluator.front, infer_with(exported.graph, 1))
    serving, documents = front.serving, [" ".join(text.split()[:6]) for text in TEXTS[:20]]
    queries = [
        to_tensors({"query": " ".join(TEXTS[at : at + 3]), "documents": documents}, evaluator.fields[0])
        for at in (0, 3)
    ]

    def scores(queries: Sequence[Tensors], **changes: Any) -> tuple[np.ndarray, int]:
        before, front.serving = front.counts.calls, replace(serving, batching=replace(serving.batching, **changes))
        found = np.concatenate([answered(answer)["score"] for answer in front(queries)])
        return found, front.counts.calls - before

    scores(queries[:1], token_budget=1 << 20)
    budget = front.counts.padded_tokens - 1
    for calls in (1, 2):
        shared, few = scores(queries[:calls], token_budget=budget)
        padded, many = scores(queries[:calls], token_budget=budget, shares_prefixes=False)
        assert few <= calls < many
        np.testing.assert_allclose(shared, padded, atol=1e-5)
