"""Standard measures of an answer against a label, from the libraries that define them.

Accuracy, F1 and nDCG: scikit-learn. Entities: seqeval. Questions: torchmetrics' SQuAD, whose F1 of an empty answer is
that of SQuAD 2.0 (1 if both are empty, else 0). Spearman: SciPy. chrF: sacrebleu. ROUGE: torchmetrics. All from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Scores = dict[str, float]
Span = tuple[int, int, str]
TOP = 10  # places of a ranking that count
LABEL_MEASURES = ("accuracy", "F1 macro")
SPAN_MEASURES = ("entity F1",)
QUESTION_MEASURES = ("F1", "exact match")
RANKING_MEASURES = ("nDCG@10", "MRR@10")
RETRIEVAL_MEASURES = (*RANKING_MEASURES, "recall@10")
SIMILARITY_MEASURES = ("Spearman",)
TEXT_MEASURES = ("chrF", "ROUGE-L", "exact match")


def score_labels(expected: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Score one label per sample."""
    from sklearn.metrics import accuracy_score, f1_score

    macro = f1_score(expected, predicted, average="macro", zero_division=0)
    return _named(LABEL_MEASURES, accuracy_score(expected, predicted), macro)


def _named(measures: Sequence[str], *values: float) -> Scores:
    return {name: float(value) for name, value in zip(measures, values, strict=True)}


def score_spans(
    texts: Sequence[str], expected: Sequence[Sequence[Span]], predicted: Sequence[Sequence[Span]]
) -> Scores:
    """Score entities, (begin, end, type) in characters, as tags of the words they touch."""
    from seqeval.metrics import f1_score

    truth = [_tags(text, labels) for text, labels in zip(texts, expected, strict=True)]
    tags = [_tags(text, labels) for text, labels in zip(texts, predicted, strict=True)]
    return _named(SPAN_MEASURES, f1_score(truth, tags, zero_division=1))


def spans_of(entities: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Return (begin, end, type) of entities with a tag or a label; tags that go on one entity become one."""
    spans: list[Span] = []
    for entity in entities:
        tag = str(entity.get("entity_group") or entity.get("entity") or f"B-{entity['label']}")
        begins, kind = tag[:2] != "I-", tag[2:] if tag[:2] in ("B-", "I-") else tag
        if kind == "O":
            continue
        if not begins and spans and spans[-1][2] == kind and entity["start"] - spans[-1][1] <= 1:
            spans[-1] = (spans[-1][0], int(entity["end"]), kind)
        else:
            spans.append((int(entity["start"]), int(entity["end"]), kind))
    return spans


def _tags(text: str, labels: Sequence[Span]) -> list[str]:
    """Return a tag per word, B- where an entity begins and I- where it goes on."""
    tags, end, last = [], 0, None
    for word in text.split():
        begin = text.index(word, end)
        end = begin + len(word)
        touching = next((span for span in labels if span[0] < end and span[1] > begin), None)
        tags.append("O" if touching is None else f"{'I' if touching == last else 'B'}-{touching[2]}")
        last = touching
    return tags


def score_questions(expected: Sequence[Sequence[str]], predicted: Sequence[str]) -> Scores:
    """Score the right answers of each question, none if it has no answer, against the one given ("" for none)."""
    from torchmetrics.functional.text import squad

    answers = [{"prediction_text": text, "id": str(number)} for number, text in enumerate(predicted)]
    truth: Any = [
        {"answers": {"answer_start": [0] * max(1, len(texts)), "text": list(texts) or [""]}, "id": str(number)}
        for number, texts in enumerate(expected)
    ]
    scores = squad(answers, truth)
    return _named(QUESTION_MEASURES, float(scores["f1"]) / 100, float(scores["exact_match"]) / 100)


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Return the mean of each measure, such as those of `score_questions`: its scores of many are means of each."""
    return {name: float(np.mean([one[name] for one in scores])) for name in scores[0]}


def score_ranking(relevance: Sequence[Sequence[float]], scores: Sequence[Sequence[float]]) -> Scores:
    """Score the relevance of each document of each query against the score it was given.

    As sentence-transformers' CrossEncoderRerankingEvaluator does (cross_encoder/evaluation/reranking.py, 6.2).
    """
    from sklearn.metrics import ndcg_score

    pairs = [(np.asarray(r), np.asarray(s)) for r, s in zip(relevance, scores, strict=True) if len(r) > 1]
    gains = [ndcg_score([truth], [given], k=TOP) for truth, given in pairs]
    ranks = [_reciprocal_rank(truth[np.argsort(given)[::-1]] > 0) for truth, given in pairs]
    return _named(RANKING_MEASURES, _mean(gains), _mean(ranks))


def score_retrieval(relevance: Sequence[Mapping[str, float]], found: Sequence[Sequence[str]]) -> Scores:
    """Score the ids that were found for each query, best first, against the relevance of ids, above 0 if it is right.

    As sentence-transformers' InformationRetrievalEvaluator does (sentence_transformer/evaluation/, 6.2); grades of
    relevance count in nDCG as in trec_eval.
    """
    places = [
        np.array([truth.get(name, 0.0) for name in ids[:TOP]]) for truth, ids in zip(relevance, found, strict=True)
    ]
    right = [np.sort([grade for grade in truth.values() if grade > 0])[::-1] for truth in relevance]
    return _named(
        RETRIEVAL_MEASURES,
        _mean([_gain(place) / _gain(ideal[:TOP]) for place, ideal in zip(places, right, strict=True)]),
        _mean([_reciprocal_rank(place > 0) for place in places]),
        _mean([(place > 0).sum() / len(ideal) for place, ideal in zip(places, right, strict=True)]),
    )


def _gain(grades: np.ndarray) -> float:
    return float((np.maximum(grades, 0) / np.log2(np.arange(len(grades)) + 2)).sum())


def _reciprocal_rank(is_right: np.ndarray) -> float:
    """Return 1 divided by the place, from 1 on, of the first right document; 0 if it is not among the first ones."""
    places = np.flatnonzero(is_right[:TOP])
    return 1 / (1 + int(places[0])) if len(places) else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 1.0


def score_similarity(expected: Sequence[float], cosines: Sequence[float]) -> Scores:
    """Score how alike pairs of texts are."""
    from scipy.stats import spearmanr

    return _named(SIMILARITY_MEASURES, spearmanr(expected, cosines).statistic)


def rank_agreement(expected: np.ndarray, actual: np.ndarray) -> Scores:
    """Compare two matrices of the similarity of each text to every other, (texts, texts) each.

    Spearman's correlation over all pairs, and recall@10: the mean share of the ten nearest by `expected` that are
    among the ten nearest by `actual`. Nothing for fewer than three texts.
    """
    from scipy.stats import spearmanr

    count = len(expected)
    if count < 3:
        return {}
    pairs = np.triu_indices(count, 1)
    correlation = 1.0 if np.array_equal(expected, actual) else spearmanr(expected[pairs], actual[pairs]).statistic
    near = min(TOP, count - 2)
    others = ~np.eye(count, dtype=bool)
    nearest = [
        np.argsort(np.where(others, -side, np.inf), axis=1, kind="stable")[:, :near] for side in (expected, actual)
    ]
    shared = [len(np.intersect1d(a, b)) / near for a, b in zip(*nearest, strict=True)]
    return {"rank correlation": float(correlation), f"recall@{TOP}": float(np.mean(shared))}


def rank_correlation(expected: Sequence[float], actual: Sequence[float]) -> float:
    """Return Spearman's correlation of two scores of the same documents, which ignores ties; 1 of a single one."""
    if len(expected) < 2:
        return 1.0
    ranks = np.stack([np.argsort(np.argsort(scores)) for scores in (expected, actual)])
    return float(np.corrcoef(ranks)[0, 1])


def list_agreement(expected: Sequence[Sequence[float]], actual: Sequence[Sequence[float]]) -> Scores:
    """Compare two scores of the documents of each query.

    recall@10: the mean share of the ten best documents by `expected` that are among the ten best by `actual`, of fewer
    than twenty documents the better half. Nothing without a list of two.
    """
    shares = []
    for scores in zip(expected, actual, strict=True):
        best = min(TOP, len(scores[0]) // 2)
        if best:
            first, second = (np.argsort(-np.asarray(side), kind="stable")[:best] for side in scores)
            shares.append(len(np.intersect1d(first, second)) / best)
    return {f"recall@{TOP}": float(np.mean(shares))} if shares else {}


@dataclass(frozen=True)
class TextCounts:
    """Counts of one text in the measures of many: matching n-grams for chrF, its ROUGE-L and its exact match."""

    ngrams: Sequence[int]
    rouge: float
    exact: float


def count_text(expected: Sequence[str], predicted: str) -> TextCounts:
    """Compare a text with its references, of which the nearest counts."""
    from sacrebleu.metrics.chrf import CHRF
    from torchmetrics.functional.text import rouge_score

    rouge = rouge_score(predicted, list(expected), rouge_keys="rougeL")
    (ngrams,) = CHRF()._extract_corpus_statistics([predicted], [[text] for text in expected])
    return TextCounts(ngrams, float(rouge["rougeL_fmeasure"]), score_questions([expected], [predicted])["exact match"])


def score_counts(counts: Sequence[TextCounts]) -> Scores:
    """Score texts by their counts: chrF is of the corpus, as sacrebleu's `corpus_score` and its bootstrap compute it.

    Exact match is that of `score_questions`.
    """
    from sacrebleu.metrics.chrf import CHRF

    return _named(
        TEXT_MEASURES,
        CHRF()._aggregate_and_compute([list(text.ngrams) for text in counts]).score / 100,
        float(np.mean([text.rouge for text in counts])),
        float(np.mean([text.exact for text in counts])),
    )


def score_texts(expected: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Score texts against a reference each."""
    return score_counts([count_text([text], answer) for text, answer in zip(expected, predicted, strict=True)])
