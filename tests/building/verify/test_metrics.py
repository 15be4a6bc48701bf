"""Metrics against hand-computed cases."""

from __future__ import annotations

import numpy as np
import pytest
from sacrebleu.metrics.chrf import CHRF
from torchmetrics.functional.text import rouge_score

from builder.checkpoints import metrics


def test_metrics_of_questions_follow_squad() -> None:
    """Articles, case and punctuation do not count; an empty answer is correct only if none exists."""
    scores = metrics.score_questions(
        [["the red kettle"], [], [], ["Oslo", "in Oslo"]], ["Red kettle.", "", "Rome", "Oslo in May"]
    )
    assert scores["exact match"] == pytest.approx((1 + 1 + 0 + 0) / 4)
    assert scores["F1"] == pytest.approx((1 + 1 + 0 + 0.8) / 4), "'in Oslo' shares both its words with three: 2*2/5"


def test_metrics_of_entities_count_whole_ones() -> None:
    texts = ["Mario Rossi moved to New York"]
    expected = [[(0, 11, "PER"), (21, 29, "LOC")]]
    assert metrics.score_spans(texts, expected, expected)["entity F1"] == 1
    half = [[(0, 11, "PER"), (21, 24, "LOC")]]
    assert metrics.score_spans(texts, expected, half)["entity F1"] == pytest.approx(0.5)


def test_metrics_of_labels_rankings_similarities_and_texts() -> None:
    scores = metrics.score_labels(["a", "a", "b", "b"], ["a", "b", "b", "b"])
    assert scores["accuracy"] == 0.75
    assert scores["F1 macro"] == pytest.approx((2 / 3 + 0.8) / 2)
    assert metrics.score_ranking([[3, 2, 1]], [[0.9, 0.5, 0.1]])["nDCG@10"] == 1
    assert metrics.score_ranking([[3, 2, 1]], [[0.1, 0.5, 0.9]])["nDCG@10"] < 0.9
    assert metrics.score_similarity([0.1, 0.5, 0.9], [0.2, 0.3, 0.8])["Spearman"] == pytest.approx(1)
    same = metrics.score_texts(["the cat sat"], ["the cat sat"])
    assert (same["chrF"], same["ROUGE-L"]) == pytest.approx((1, 1))
    assert metrics.score_texts(["the cat sat"], ["a dog ran"])["ROUGE-L"] == 0


def test_metrics_of_texts_are_those_of_their_libraries() -> None:
    """The counts of single texts give the scores of the corpus; the nearest reference of each text counts."""
    references = ["the cat sat on the mat", "it rains in Oslo", "The train is late."]
    answers = ["the cat sat on a sofa", "it is raining in Oslo today", "the train is late"]
    scores = metrics.score_texts(references, answers)
    assert scores["chrF"] == pytest.approx(CHRF().corpus_score(answers, [references]).score / 100)
    assert scores["ROUGE-L"] == pytest.approx(
        float(rouge_score(answers, references, rouge_keys="rougeL")["rougeL_fmeasure"])
    )
    assert scores["exact match"] == pytest.approx(1 / 3)
    several = metrics.score_counts([metrics.count_text(["a dog ran", text], text) for text in answers])
    assert several == {"chrF": pytest.approx(1), "ROUGE-L": pytest.approx(1), "exact match": 1}


def test_rank_agreement_finds_neighbours_that_changed_places() -> None:
    similarity = np.cos(np.subtract.outer(np.arange(14.0), np.arange(14.0)) / 14)
    assert metrics.rank_agreement(similarity, similarity * 2) == {"rank correlation": 1.0, "recall@10": 1.0}
    moved = similarity.copy()
    moved[0, 10:] = moved[0, 10:][::-1] + 1  # the first text's nearest are now its furthest four
    assert metrics.rank_agreement(similarity, moved)["recall@10"] == pytest.approx((13 + 0.7) / 14)
    assert metrics.rank_agreement(similarity, -similarity)["rank correlation"] == pytest.approx(-1)
    assert metrics.rank_agreement(similarity[:2, :2], similarity[:2, :2]) == {}


def test_list_agreement_finds_documents_that_left_the_best() -> None:
    scores = [float(place) for place in range(24)]
    assert metrics.list_agreement([scores], [[2 * score for score in scores]]) == {"recall@10": 1.0}
    moved = [*scores[20:], *scores[4:20], *scores[:4]]  # the best four are now the worst
    assert metrics.list_agreement([scores], [moved])["recall@10"] == pytest.approx(0.6)
    short = [[1.0, 2.0, 3.0, 4.0], [1.0]]  # the better half of four; a list of one says nothing
    assert metrics.list_agreement(short, [[1.0, 4.0, 3.0, 2.0], [2.0]]) == {"recall@10": 0.5}
    assert metrics.list_agreement([[1.0]], [[2.0]]) == {}
    assert metrics.rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert metrics.rank_correlation([1.0], [3.0]) == 1
