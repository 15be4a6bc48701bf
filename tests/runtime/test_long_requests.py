"""Requests with much text take time in proportion to it: what took the square of it would take minutes here."""

from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from builder.checkpoints.resolve import resolve
from builder.options import make_spec
from builder.runtime.encoder.joining import join
from builder.runtime.encoder.schemas import entity_types, read_schema
from builder.runtime.encoder.task import Row
from builder.runtime.encoder.windows import split
from builder.runtime.encoder.words import words_with_marks
from builder.runtime.tokens import tokens_of
from tests.fronts import front_over_pytorch
from tests.privacy_filters import TAGS, make_privacy_filter
from tests.tiny_encoders import make_tokenizer

PARTS = ("a", "b", "é", "@", "@", ".", ".", "-", "_", "%", "1", " ", "www.", "http://", "co", "ſ", "\u0301", "@b.co")


def test_words_with_marks_are_those_of_one_pattern() -> None:
    """Compare with the pattern of gliner2 2.1.0 (processing/word_splitter.py), which reads a run at each character."""
    marks = "".join(chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "M")
    word = rf"[\w{marks}\u200c\u200d]+"
    mail = r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}"
    pattern = re.compile(rf"https?://\S+|www\.\S+|{mail}|@[a-z0-9_]+|{word}(?:[-_]{word})*|\S", re.IGNORECASE)
    chosen = random.Random(0)
    for _ in range(5000):
        text = "".join(chosen.choices(PARTS, k=chosen.randint(1, 14)))
        assert words_with_marks(text) == [match.span() for match in pattern.finditer(text)], text


@pytest.mark.parametrize("part", [".", "a.", "-@", "a@1.", "a@b.co"])
def test_words_of_a_long_run_are_found(part: str) -> None:
    """Regression: 20,000 full stops took 5 seconds, and a megabyte would have taken hours."""
    words = words_with_marks(part * 100_000)
    assert words[-1][1] == 100_000 * len(part)


def test_schema_with_many_names_is_read() -> None:
    """Regression: each name was compared with all names before it."""
    names = [f"type {number}" for number in range(60_000)]
    (part,) = read_schema(json.dumps({"entities": names}), "schema")
    assert [label.name for label in part.labels] == names


def test_many_entities_of_windows_are_joined() -> None:
    """Regression: each entity was compared with all better ones."""
    entities = [
        {"start": 3 * place, "end": 3 * place + 4, "text": "", "label": label, "score": 0.5 + place % 2 / 4}
        for place in range(20_000)
        for label in ("a", "b")
    ]
    windows = [{"entities": part} for part in (entities[:30_000], entities[10_000:])]
    joined = join(entity_types(["a", "b"]), windows)["entities"]
    assert [(one["start"], one["label"]) for one in joined] == [
        (3 * place, label) for place in range(1, 20_000, 2) for label in ("a", "b")
    ]


def test_many_windows_are_split() -> None:
    """Regression: all columns of the encoding were copied for each window."""
    encoding = make_tokenizer("bpe", type_ids=False).backend_tokenizer.encode("1 " * 100_000)
    windows = split(encoding, 0, 60, 7)
    assert len(windows) > 3000
    assert [len(window) for window in windows[:-1]] == [62] * (len(windows) - 1)


def test_likeliest_tags_of_many_tokens_have_places(tmp_path: Path) -> None:
    """Regression: the offsets of all tokens were copied for each token."""
    spec = make_spec(model=str(make_privacy_filter(tmp_path / "filter")), max_length=64)
    front = front_over_pytorch(resolve(spec), spec, tmp_path)
    text = "1 " * 20_000
    job = front.task.read(
        {"text_input": np.array([[text]], object), "aggregation_strategy": np.array([["viterbi"]], object)}
    )
    (encoding,) = front.text(job.texts)
    logits = np.zeros((len(encoding), len(TAGS)), np.float32)
    logits[:, TAGS.index("S-secret")] = 9
    answer = front.task.answer(job, [Row(encoding, 0)], [{"logits": logits}])
    found = json.loads(answer["entities"][0, 0])
    assert (found[0]["start"], found[-1]["end"]) == (0, len(text.rstrip()))


def test_many_tokens_of_a_text_are_listed() -> None:
    """Regression: all columns of the encoding were copied for each token."""
    tokenizer = make_tokenizer("bpe", type_ids=False).backend_tokenizer
    (listed,) = tokens_of(tokenizer, ["1 " * 20_000])
    tokens = json.loads(listed)
    assert len(tokens) > 40_000
    assert tokens[-2]["stop"] == 40_000
    assert [token["start"] for token in (tokens[0], tokens[-1])] == [None, None]
