"""Measures of rankings, equal to those of sentence-transformers' own evaluators on the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from sentence_transformers.multi_vector_encoder.evaluation import MultiVectorInformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.evaluation import (
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
    NanoBEIREvaluator,
)

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled import evaluation_of
from builder.checkpoints.metrics import RETRIEVAL_MEASURES
from builder.checkpoints.rankers import Ranking
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tokenizer import truncating
from builder.common.data_folders import CANDIDATES, CORPUS, INSTRUCTIONS, QRELS, QUERIES, ROWS, read_parts
from builder.common.errors import SpecError
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.options import make_spec
from tests.evaluations import measures_of_pytorch
from tests.models import minilm
from tests.retrievers import hybrid_outputs
from tests.tiny_encoders import make_checkpoint

Parts = Mapping[str, Sequence[Mapping[str, Any]]]
NANO = (CORPUS, QUERIES, QRELS)  # parts of a data set, and names of their folders
LONG = " ".join(TEXTS)  # more than the model reads
# an evaluator pads a batch to its longest text, here LONG
EVALUATOR: Mapping[str, Any] = {"batch_size": 2, "write_csv": False}
CORPUS_TEXTS = {f"d{i}": text for i, text in enumerate((*MORE_TEXTS, LONG, "Grüße aus Łódź 😀"))}
QUERY_TEXTS = {f"q{i}": text for i, text in enumerate(TEXTS[:12])}
RELEVANT = {f"q{i}": {f"d{(5 * i + k) % len(CORPUS_TEXTS)}" for k in range(1 + i % 3)} for i in range(12)}
PAIRS = [(a, b, (7 * i) % 5) for i, (a, b) in enumerate(zip(TEXTS[:16], (*MORE_TEXTS[:15], LONG), strict=True))]
LISTS = [{"query": TEXTS[i], "positive": [MORE_TEXTS[i]], "negative": list(MORE_TEXTS[20 + i : 35])} for i in range(9)]


@pytest.fixture(scope="module")
def embedder() -> Checkpoint:
    checkpoint = resolve(make_spec(model=str(minilm())))
    return replace(checkpoint, tokenizer=truncating(checkpoint.tokenizer, checkpoint.max_length))


@pytest.fixture(scope="module")
def reranker_folder(module_folder: Callable[[str], Path]) -> Path:
    return make_checkpoint(module_folder("reranker"), "bert", "text-ranking", {0: "relevance"})


@pytest.fixture(scope="module")
def reranker(reranker_folder: Path) -> Checkpoint:
    checkpoint = resolve(make_spec(model=str(reranker_folder), task="text-ranking"))
    return replace(checkpoint, tokenizer=truncating(checkpoint.tokenizer, checkpoint.max_length))


def measured(checkpoint: Checkpoint, parts: Parts, limit: int | None = None) -> Mapping[str, float]:
    """Return the measures of PyTorch's answers."""
    return measures_of_pytorch(evaluation_of(checkpoint, parts, limit))


def folder(candidates: bool = False) -> Parts:
    parts = {
        CORPUS: [{"_id": name, "title": "", "text": text} for name, text in CORPUS_TEXTS.items()],
        QUERIES: [{"_id": name, "text": text} for name, text in QUERY_TEXTS.items()],
        QRELS: [{"query-id": q, "corpus-id": d, "score": "1"} for q, ids in RELEVANT.items() for d in sorted(ids)],
    }
    ids = list(CORPUS_TEXTS)
    listed = [{"query-id": name, "corpus-ids": ids[3 * i : 3 * i + 9]} for i, name in enumerate(QUERY_TEXTS)]
    return {**parts, CANDIDATES: listed} if candidates else parts


def test_pairs_have_the_spearman_of_the_evaluator(embedder: Checkpoint) -> None:
    rows = [{"sentence1": a, "sentence2": b, "score": score} for a, b, score in PAIRS]
    evaluator = EmbeddingSimilarityEvaluator(*map(list, zip(*PAIRS, strict=True)), **EVALUATOR)
    expected = evaluator(SentenceTransformer(str(minilm()), device="cpu"))
    assert measured(embedder, {ROWS: rows}) == {"Spearman": pytest.approx(expected["spearman_cosine"], abs=1e-9)}


def test_retrieval_has_the_measures_of_the_evaluator(embedder: Checkpoint) -> None:
    evaluator = InformationRetrievalEvaluator(QUERY_TEXTS, CORPUS_TEXTS, RELEVANT, **EVALUATOR)
    expected = evaluator(SentenceTransformer(str(minilm()), device="cpu"))
    assert measured(embedder, folder()) == {
        "nDCG@10": pytest.approx(expected["cosine_ndcg@10"], abs=1e-9),
        "MRR@10": pytest.approx(expected["cosine_mrr@10"], abs=1e-9),
        "recall@10": pytest.approx(expected["cosine_recall@10"], abs=1e-9),
    }


@pytest.mark.parametrize("listed", [False, True])
def test_nanobeir_folder_has_the_measures_of_its_evaluator(
    embedder: Checkpoint, tmp_path: Path, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: documents that a row of qrels lists, as sentence-transformers takes them, were one unknown id."""
    rows = {part: [{name: row[name] for name in row if name != "score"} for row in folder()[part]] for part in NANO}
    if listed:
        rows[QRELS] = [{"query-id": name, "corpus-id": sorted(ids)} for name, ids in RELEVANT.items()]
    for part in NANO:
        (tmp_path / part).mkdir()
        polars.DataFrame(rows[part]).write_parquet(tmp_path / part / "NanoMSMARCO-00000-of-00001.parquet")

    def from_disk(self: Any, subset: str, split: str, required_columns: list[str]) -> list[dict[str, Any]]:
        return polars.read_parquet(Path(self.dataset_id) / subset / f"{split}-00000-of-00001.parquet").to_dicts()

    monkeypatch.setattr(NanoBEIREvaluator, "_load_dataset_subset_split", from_disk)
    evaluator = NanoBEIREvaluator(["msmarco"], str(tmp_path), **EVALUATOR)
    expected = evaluator(SentenceTransformer(str(minilm()), device="cpu"))
    assert 0 < expected["NanoMSMARCO_cosine_ndcg@10"] < 1
    assert measured(embedder, read_parts(tmp_path)) == {
        name: pytest.approx(expected[f"NanoMSMARCO_cosine_{name.lower()}"], abs=1e-9) for name in RETRIEVAL_MEASURES
    }


def test_late_interaction_has_the_measures_of_the_evaluator(checkpoint: Callable[[str], Path]) -> None:
    root = str(checkpoint("late"))
    evaluator = MultiVectorInformationRetrievalEvaluator(QUERY_TEXTS, CORPUS_TEXTS, RELEVANT, **EVALUATOR)
    expected = evaluator(MultiVectorEncoder(root, device="cpu"))
    late = resolve(make_spec(model=root, task="multi-vector-embedding"))
    assert measured(late, folder()) == {
        name: pytest.approx(expected[f"maxsim_{name.lower()}"], abs=1e-9) for name in ("nDCG@10", "MRR@10", "recall@10")
    }


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # of torch, at its first sparse product
def test_hybrid_embeddings_rank_by_the_sum_of_three_similarities(checkpoint: Callable[[str], Path]) -> None:
    root = checkpoint("hybrid")
    hybrid = resolve(make_spec(model=str(root), task="hybrid-embedding"))
    task, ranking = encoder_task(hybrid.task), Ranking(TEXTS[:2], TEXTS[2:5], [[0, 1, 2], [2, 0]])
    ranker = task.ranker(hybrid)
    assert ranker is not None
    scores = list(ranker.scores(ranking, [task.reference(hybrid, sample) for sample in ranker.samples(ranking)]))
    outputs = {text: hybrid_outputs(root, text, 512) for text in TEXTS[:5]}
    for query, candidates, row in zip(ranking.queries, ranking.candidates, scores, strict=True):
        dense, weights, vectors = outputs[query]
        expected = []
        for other, other_weights, other_vectors in (outputs[ranking.documents[place]] for place in candidates):
            late = (vectors @ other_vectors.T).max(axis=1).mean()
            expected.append(0.4 * (dense @ other) + 0.2 * (weights @ other_weights) + 0.4 * late)
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_limit_takes_the_first_queries_and_the_whole_corpus(embedder: Checkpoint) -> None:
    queries = dict(list(QUERY_TEXTS.items())[:5])
    evaluator = InformationRetrievalEvaluator(queries, CORPUS_TEXTS, RELEVANT, **EVALUATOR)
    expected = evaluator(SentenceTransformer(str(minilm()), device="cpu"))
    assert measured(embedder, folder(), 5)["nDCG@10"] == pytest.approx(expected["cosine_ndcg@10"], abs=1e-9)


def test_instruction_of_a_query_follows_its_text(embedder: Checkpoint) -> None:
    """Regression: mteb's folders of instructions were ignored, and their queries answered without them."""
    parts = {**folder(), INSTRUCTIONS: [{"query-id": "q0", "instruction": "Name the year."}]}
    samples = evaluation_of(embedder, parts, 2).data.samples
    assert [sample["text_input"] for sample in samples[:2]] == [f"{TEXTS[0]} Name the year.", TEXTS[1]]
    parts = {**folder(), QUERIES: [{"_id": "q0", "text": TEXTS[0], "instruction": "Name the year."}]}
    assert evaluation_of(embedder, parts, 1).data.samples[0] == samples[0]


@pytest.mark.parametrize("kind", ["negatives", "documents", "candidates"])
def test_reranking_has_the_measures_of_the_evaluator(reranker: Checkpoint, reranker_folder: Path, kind: str) -> None:
    rows = LISTS
    parts: Parts = {ROWS: rows}
    if kind == "documents":
        rows = [{"query": r["query"], "positive": r["positive"], "documents": [*r["negative"]]} for r in LISTS]
        parts = {ROWS: rows}
    if kind == "candidates":
        parts = folder(candidates=True)
        rows = [
            {
                "query": QUERY_TEXTS[str(row["query-id"])],
                "positive": [CORPUS_TEXTS[name] for name in sorted(RELEVANT[str(row["query-id"])])],
                "documents": [CORPUS_TEXTS[name] for name in row["corpus-ids"]],
            }
            for row in parts[CANDIDATES]
        ]
    expected = CrossEncoderRerankingEvaluator(rows, write_csv=False)(CrossEncoder(str(reranker_folder), device="cpu"))
    found = measured(reranker, parts)
    assert found == {
        "nDCG@10": pytest.approx(expected["ndcg@10"], abs=1e-9),
        "MRR@10": pytest.approx(expected["mrr@10"], abs=1e-9),
    }


def test_embedder_and_reranker_take_the_same_rows(embedder: Checkpoint, reranker: Checkpoint) -> None:
    graded = []
    for row in LISTS:
        documents = [*row["positive"], *row["negative"]]
        relevance = [1] + [0] * len(row["negative"])
        graded.append({"query": row["query"], "documents": documents, "relevance": relevance})
    for checkpoint in (embedder, reranker):
        assert measured(checkpoint, {ROWS: graded}) == measured(checkpoint, {ROWS: LISTS})


def test_empty_texts_are_left_out_and_named(embedder: Checkpoint) -> None:
    parts = {**folder(), CORPUS: [*folder()[CORPUS], {"_id": "none", "title": None, "text": " "}]}
    assert evaluation_of(embedder, parts, None).data.note == "left out: 1 documents without a text"
    assert measured(embedder, parts) == measured(embedder, folder())


REFUSED: Mapping[str, Parts] = {
    "rows with the keys colour": {ROWS: [{"colour": "red"}]},
    "texts with labels": {ROWS: [{"text": "a", "label": "b"}]},
    "no rows": {ROWS: []},
    "row 2 has no sentence2": {ROWS: [{"sentence1": "a", "sentence2": "b", "score": 1}, {"sentence1": "a"}]},
    "fewer than two pairs": {ROWS: [{"sentence1": "a", "sentence2": "", "score": 1}]},
    "no relevance": {CORPUS: folder()[CORPUS], QUERIES: folder()[QUERIES]},
    "no query": {**folder(), QRELS: [{"query-id": "other", "corpus-id": "d1"}]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_data_that_does_not_fit_is_refused(embedder: Checkpoint, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        evaluation_of(embedder, REFUSED[message], None)


def test_reranker_needs_candidates_of_a_folder(reranker: Checkpoint) -> None:
    with pytest.raises(SpecError, match="expected top_ranked or bm25"):
        evaluation_of(reranker, folder(), None)
