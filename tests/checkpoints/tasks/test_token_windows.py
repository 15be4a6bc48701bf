"""Token classification of texts longer than the model reads, in windows that overlap."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.common.tensors import to_tensors
from builder.options import make_spec
from builder.runtime.encoder.pipeline import Pipeline
from builder.runtime.encoder.windows import joined, split
from tests.fronts import answers, front_over_pytorch
from tests.privacy_filters import make_privacy_filter
from tests.tiny_encoders import make_tokenizer

LONG = " ".join(TEXTS[:16]) + " 🚆 Zürich"
LIMIT = 64


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Pipeline, Checkpoint]]:
    """Return a front that reads all of LONG, and one that reads LIMIT tokens, of the same model."""
    folder = make_privacy_filter(tmp_path_factory.mktemp("filter"))
    made = {}
    for limit in (512, LIMIT):
        spec = make_spec(model=str(folder), max_length=limit)
        resolved = resolve(spec)
        made[limit] = (front_over_pytorch(resolved, spec, tmp_path_factory.mktemp("front")), resolved)
    return made


def entities(fronts: dict[int, tuple[Pipeline, Checkpoint]], limit: int, **sample: Any) -> list[dict[str, Any]]:
    sample = {"text_input": LONG, "ignore_labels": ["none"], **sample}
    return list(json.loads(answers(*fronts[limit], [sample])[0]["entities"]))


def test_windows_read_all_tokens_of_a_long_text(fronts: dict[int, tuple[Pipeline, Checkpoint]]) -> None:
    """Two windows share 7 of 62 tokens: a token far from their edges has the scores of the whole text."""
    whole, parts = entities(fronts, 512), entities(fronts, LIMIT, windows=True)
    places = [(one["index"], one["start"], one["end"], one["word"]) for one in whole]
    assert len(places) > 2 * LIMIT
    assert [(one["index"], one["start"], one["end"], one["word"]) for one in parts] == places
    same = [abs(one["score"] - other["score"]) < 1e-4 for one, other in zip(whole, parts, strict=True)]
    assert 0.5 < np.mean(same) < 1
    assert all(same[:32])  # the band of two layers reaches 16 tokens


@pytest.mark.parametrize("strategy", ["simple", "viterbi"])
def test_entities_of_windows_have_places_in_the_whole_text(
    strategy: str, fronts: dict[int, tuple[Pipeline, Checkpoint]]
) -> None:
    found = entities(fronts, LIMIT, windows=True, aggregation_strategy=strategy)
    assert found[-1]["end"] > 0.8 * len(LONG)
    assert all(one["start"] <= other["start"] for one, other in itertools.pairwise(found))
    if strategy == "viterbi":
        assert all(LONG[one["start"] : one["end"]] == one["word"] == one["word"].strip() for one in found)


def test_short_and_long_texts_share_a_request(fronts: dict[int, tuple[Pipeline, Checkpoint]]) -> None:
    """A batch may round a score otherwise than one text alone: by a few units of the last place of fp32."""
    front, resolved = fronts[LIMIT]
    samples = [{"text_input": text, "windows": True} for text in (TEXTS[0], LONG, TEXTS[1])]
    together = answers(front, resolved, samples)
    for sample, answer in zip(samples, together, strict=True):
        alone = json.loads(answers(front, resolved, [sample])[0]["entities"])
        assert json.loads(answer["entities"]) == [
            {**one, "score": pytest.approx(one["score"], abs=1e-6)} for one in alone
        ]
    assert together[1]["prompt_tokens"] > 3 * LIMIT
    assert not any(one["truncated"] for one in together)


def test_long_text_is_refused_unless_the_request_says_otherwise(
    fronts: dict[int, tuple[Pipeline, Checkpoint]],
) -> None:
    front, resolved = fronts[LIMIT]
    inputs, _ = resolved.task.fields(front.serving.parameters)
    (error,) = front([to_tensors({"text_input": LONG}, inputs)])
    assert "windows=true to have all of it read in windows" in str(error)
    (answer,) = answers(front, resolved, [{"text_input": LONG, "truncate": True}])
    assert answer["truncated"]


@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 40])
@pytest.mark.parametrize("overlap", [0, 1, 3, 4])
def test_each_token_has_the_value_of_the_window_that_reads_most_around_it(tokens: int, overlap: int) -> None:
    encoding = make_tokenizer("bpe", type_ids=False).backend_tokenizer.encode("1 " * tokens)
    first, last = 1, len(encoding) - 1
    windows = split(encoding, 0, 10, overlap)
    values = [np.array([(number, place) for place in range(len(window))]) for number, window in enumerate(windows)]
    whole = joined(encoding, windows, values)
    assert (whole[0] == 0).all()
    for token in range(last - first):
        number, place = whole[first + token]
        own = [window.start for window in windows if window.start <= token < window.start + len(window) - 2]
        assert place - 1 == token - windows[number].start
        around = [min(token - start, start + 9 - token) for start in own]
        reads = min(place - 1, windows[number].start + 9 - token)
        assert reads >= max(around) - 1  # halves of an odd overlap differ by one
