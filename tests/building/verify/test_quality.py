"""Each served answer is compared with its own reference, in any batch order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.building.verify import quality
from builder.building.verify.quality import Quality, served_quality
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction
from builder.common.errors import SpecError, VerificationError
from builder.runtime.encoder.pipeline import Counts
from builder.runtime.fields import Field, InputError

FIELDS = (Field("text_input", "TYPE_STRING"),), (Field("embedding", "TYPE_FP32", (2,)),)
SAMPLES = [{"text_input": "a" * count} for count in range(1, 9)]
EXPECTED = [{"embedding": [float(count), 1.0]} for count in range(1, 9)]


class FakePipeline:
    """Pipeline whose answers have as many letters as a text.

    In a batch they come in `order`; a text of 4 letters fails with the error `failing`, if there is one.
    """

    order: Any = staticmethod(list)
    failing: Exception | None = None
    batches: list[int]

    def __init__(self, front: Path, infer: Any) -> None:
        self.counts = Counts()

    def __call__(self, requests: Sequence[Mapping[str, np.ndarray]]) -> list[Any]:
        self.batches.append(len(requests))
        self.counts.tokens += 3 * len(requests)
        self.counts.padded_tokens += (4 if len(requests) > 1 else 3) * len(requests)
        counts = self.order([len(request["text_input"].ravel()[0]) for request in requests])
        return [
            self.failing if self.failing and count == 4 else {"embedding": np.array([[count, 1.0]])} for count in counts
        ]


def measured(
    monkeypatch: pytest.MonkeyPatch,
    min_mean: float | None = None,
    expected_batches: tuple[int, ...] = (1, 1, 8),
    **behaviour: Any,
) -> Quality:
    batches: list[int] = []
    monkeypatch.setattr(quality, "Pipeline", type("Pipeline", (FakePipeline,), {"batches": batches, **behaviour}))
    task, front = FeatureExtraction(), Path("nowhere")
    result = served_quality(lambda feeds: {}, front, task, FIELDS, SAMPLES, EXPECTED, lambda answers: {}, min_mean)
    assert tuple(batches) == expected_batches
    return result


def test_quality_accepts_right_answers_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measured(monkeypatch)
    assert (result.error, result.padding) == (0.0, 0.25)
    assert (result.mean, result.worst, result.batch_agreement) == pytest.approx((1, 1, 1))


def test_quality_finds_answers_in_cutting_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are sorted by length, like the calls of the emitted code."""
    assert measured(monkeypatch, order=staticmethod(sorted)).error > 0.1


def test_quality_finds_an_answer_wrong_only_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more_alone(counts: list[int]) -> list[int]:
        return counts if len(counts) > 1 else [counts[0] + 1]

    assert measured(monkeypatch, order=staticmethod(one_more_alone)).error > 0.1


def opposite(counts: list[int]) -> list[int]:
    return [-count for count in counts]


def test_quality_stops_when_the_batch_cannot_reach_the_required_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal answers to all of the batch would give (2 * agreement + 8 * 1) / 10."""
    order: Any = staticmethod(opposite)
    whole = measured(monkeypatch, order=order)
    assert whole.samples is None
    stopped = measured(monkeypatch, min_mean=0.9, expected_batches=(1, 1), order=order)
    assert stopped.samples == 2
    assert stopped.mean < 0.0
    reachable = (2 * stopped.mean + 8) / 10
    assert measured(monkeypatch, min_mean=reachable + 1e-6, expected_batches=(1, 1), order=order) == stopped
    assert measured(monkeypatch, min_mean=reachable - 1e-6, order=order) == whole


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (ValueError("four"), VerificationError, "sample 4 fails in the emitted code"),
        (InputError("four"), SpecError, "sample 4 is refused by the model itself: four"),
    ],
)
def test_quality_names_the_failing_sample(
    monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception], message: str
) -> None:
    with pytest.raises(raised, match=message):
        measured(monkeypatch, failing=error)
