"""Entities by tags of BIOES and BILOU, against every path of a short text, and against regular expressions."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from builder.runtime.encoder.scores import log_softmax
from builder.runtime.encoder.tags import BIASES, TagDecoder, entities_of, spans_of, tags_of

LABELS = ["O", *(f"{place}-{name}" for name in ("person", "e-mail") for place in "BIES")]
TAGS = tags_of(LABELS) or ()
NO_BIASES = dict.fromkeys(BIASES, 0.0)
VALID = re.compile(r"(O |S-\S+ |B-(\S+) (I-\2 )*E-\2 )*")


@pytest.mark.parametrize(
    ("labels", "places"),
    [
        (["O", "B-a", "I-a", "E-a", "S-a"], "OBIES"),
        (["S-a", "E-a", "O", "I-a", "B-a"], "SEOIB"),
        (["O", "B-a", "I-a", "L-a", "U-a"], "OBIES"),
        (["O", "B-a", "E-a", "S-b"], "OBES"),
        (["O", "B-a", "I-a"], None),  # grouped as transformers' pipeline groups them
        (["B-a", "I-a", "E-a", "S-a"], None),
        (["O", "B-a", "E-a", "NOUN"], None),
        (["O", "B-a", "E-a", "U-a"], None),
        (["O", "B-", "E-a"], None),
        (["O", "E-mail", "S-100"], None),
        (["LABEL_0", "LABEL_1"], None),
    ],
)
def test_tags_are_recognised_by_their_scheme(labels: list[str], places: str | None) -> None:
    tags = tags_of(labels)
    assert (None if tags is None else "".join(tag.place for tag in tags)) == places


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_likeliest_path_is_the_best_of_all_valid_paths(tokens: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scores = log_softmax(random.normal(size=(tokens, len(LABELS))).astype(np.float32) * 2)
    biases = dict(zip(BIASES, random.normal(size=len(BIASES)) * (seed % 2), strict=True))

    def bias(before: str, after: str) -> float:
        if before == "O":
            return biases["background_stay" if after == "O" else "background_to_start"]
        if before[0] in "BI":
            return biases["inside_to_continue" if after[0] == "I" else "inside_to_end"]
        return biases["end_to_background" if after == "O" else "end_to_start"]

    def total(path: tuple[int, ...]) -> float:
        names = [LABELS[label] for label in path]
        own = sum(float(scores[token, label]) for token, label in enumerate(path))
        return own + sum(bias(before, after) for before, after in itertools.pairwise(names))

    paths = itertools.product(range(len(LABELS)), repeat=tokens)
    valid = [path for path in paths if VALID.fullmatch("".join(f"{LABELS[label]} " for label in path))]
    assert tuple(TagDecoder(TAGS, biases)(scores)) == max(valid, key=total)


def test_tag_decoder_returns_nothing_for_no_tokens() -> None:
    assert TagDecoder(TAGS, NO_BIASES)(np.zeros((0, len(LABELS)), np.float32)) == []


def test_bias_of_background_removes_entities() -> None:
    """A bias can change what the scores alone prefer."""
    labels = ["O", "B-a", "I-a", "E-a", "S-a"]
    tags = tags_of(labels)
    assert tags is not None
    likely = np.array([1, 2, 3])
    scores = log_softmax(np.eye(5, dtype=np.float32)[likely])
    assert TagDecoder(tags, NO_BIASES)(scores) == [1, 2, 3]
    assert TagDecoder(tags, {**NO_BIASES, "background_stay": 3.0})(scores) == [0, 0, 0]


@pytest.mark.parametrize(
    ("names", "entities"),
    [
        ("O O", ["0:2"]),
        ("B-e-mail I-e-mail E-e-mail O", ["0:3", "3:4"]),
        ("S-person S-person", ["0:1", "1:2"]),
        ("B-person E-person B-person E-person", ["0:2", "2:4"]),
        ("B-person B-person E-person", ["0:1", "1:3"]),
        ("I-person I-person E-person I-person", ["0:3", "3:4"]),  # one that is not begun
        ("B-person E-e-mail I-person", ["0:1", "1:2", "2:3"]),
        ("S-person E-person O I-person", ["0:1", "1:2", "2:3", "3:4"]),
        ("B-person I-person O", ["0:2", "2:3"]),  # one that is not ended
    ],
)
def test_tokens_are_grouped_as_the_scheme_says(names: str, entities: list[str]) -> None:
    tags = [TAGS[LABELS.index(name)] for name in names.split()]
    assert [f"{part.start}:{part.stop}" for part in entities_of(tags)] == entities


def test_spans_have_no_spaces_around_them_and_no_common_characters() -> None:
    text = "a  Ada L. \n🚆b"
    offsets = [(0, 1), (1, 6), (6, 9), (9, 11), (11, 12), (11, 12), (11, 12), (12, 13), (13, 13)]
    names = ["O", "B-person", "E-person", "S-e-mail", "S-person", "B-e-mail", "I-e-mail", "E-e-mail", "S-person"]
    spans = spans_of(text, [TAGS[LABELS.index(name)] for name in names], offsets)
    assert [(text[span.start : span.end], span.type) for span in spans] == [("Ada L.", "person"), ("🚆b", "e-mail")]
    assert spans[1].tokens == slice(5, 8)
