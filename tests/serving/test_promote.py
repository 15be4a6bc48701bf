"""Verdicts of a trial of two versions, from the outcomes of their requests."""

from __future__ import annotations

import json

import numpy as np
import pytest

from builder.checkpoints.distances import PairedNumbers
from builder.serving.promotion.promote import OutputMatch, PromotionLimits, PromotionTrial, TriedVersion, same_tokens

LIMITS = PromotionLimits(agreement=0.9, tolerance=0.5, slower=2.0)


def test_trial_gives_the_reasons_against_a_version() -> None:
    answering, candidate = TriedVersion(1, [10.0] * 4), TriedVersion(2, [16.0] * 4)
    trial = PromotionTrial(answering, candidate, [OutputMatch(1.0), OutputMatch(0.8)])
    assert trial.refusals(LIMITS) == []
    (disagrees,) = trial.refusals(PromotionLimits(0.95, 0.5, 2.0))
    assert "agree by 0.9000; at least 0.95" in disagrees
    assert "--agreement" in disagrees
    (slow,) = trial.refusals(PromotionLimits(0.9, 0.5, 1.5))
    assert "1.60 times as long; at most 1.5" in slow
    failing = PromotionTrial(answering, TriedVersion(2, [10.0], ["front: no memory"]), [OutputMatch(1.0)])
    assert failing.refusals(LIMITS) == ["1 requests failed: front: no memory"]


def test_trial_refuses_deviating_scores() -> None:
    """Regression: only the label with the highest score was compared."""
    scores = [(np.array([value]), np.array([1 - value])) for value in (0.2, 0.4, 0.6)]
    matches = [
        OutputMatch(1.0, numbers={"the score of food": PairedNumbers(*pair, probabilities=True)}) for pair in scores
    ]
    trial = PromotionTrial(TriedVersion(1, [10.0] * 3), TriedVersion(2, [10.0] * 3), matches)
    (refusal,) = trial.refusals(LIMITS)
    assert "the score of food, which was 0.2 and is 0.8" in refusal
    assert "--tolerance" in refusal
    assert trial.refusals(PromotionLimits(0.9, 10.0, 2.0)) == []


@pytest.mark.parametrize(
    ("running", "both", "reason"),
    [(["it died"], [], "(the running version: it died)"), ([], ["too long"], "(both versions: too long)")],
)
def test_trial_refuses_if_nothing_was_compared(running: list[str], both: list[str], reason: str) -> None:
    (refusal,) = PromotionTrial(TriedVersion(1, [], running), TriedVersion(2, [10.0]), [], both).refusals(LIMITS)
    assert "nothing was compared" in refusal
    assert reason in refusal


def test_same_tokens_compares_up_to_the_first_difference() -> None:
    def answer_of(*tokens: int) -> dict[str, list[str]]:
        return {"text_output": ["any"], "logprobs_output": [json.dumps([{"token": token} for token in tokens])]}

    assert same_tokens(answer_of(1, 2, 3), answer_of(1, 2, 3)) == OutputMatch(3, 3)
    assert same_tokens(answer_of(1, 2, 3, 4), answer_of(1, 2, 9, 4)) == OutputMatch(2, 3), (
        "what comes after follows another text"
    )
    assert same_tokens(answer_of(1, 2, 3), answer_of(1, 2)) == OutputMatch(2, 3), "to end is a token too"
    assert same_tokens(answer_of(5), answer_of(6)) == OutputMatch(0, 1)
    assert same_tokens(answer_of(), answer_of()) == OutputMatch(1), "both end at once"
    assert same_tokens({"text_output": ["a"]}, {"text_output": ["b"]}) == OutputMatch(0.0)
    trial = PromotionTrial(
        TriedVersion(1, [10.0] * 2), TriedVersion(2, [10.0] * 2), [OutputMatch(3, 3), OutputMatch(0, 1)]
    )
    assert trial.refusals(PromotionLimits(0.75, 0.5, 1.5)) == []
    (disagrees,) = trial.refusals(PromotionLimits(0.95, 0.5, 1.5))
    assert "0.7500" in disagrees
