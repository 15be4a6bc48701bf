"""Samples and measures of labelled texts, tags of words, and questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from seqeval.metrics import f1_score
from sklearn.metrics import accuracy_score

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled import evaluation_of
from builder.checkpoints.labelled.interval import scores_of_draws
from builder.checkpoints.metrics import Scores, score_questions
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks import question_answering
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tokenizer import truncating
from builder.common.data_folders import ROWS
from builder.common.errors import SpecError
from builder.common.samples import TEXTS
from builder.options import make_spec
from tests.evaluations import measures_of_pytorch
from tests.models import SERVED

Rows = Sequence[Mapping[str, Any]]


@pytest.fixture
def load(checkpoint: Callable[[str], Path]) -> Callable[[str], Checkpoint]:
    """Return a function that loads a model of tests/models.py, which cuts texts."""

    def get(name: str) -> Checkpoint:
        loaded = resolve(make_spec(model=str(checkpoint(name)), task=SERVED[name].task))
        return replace(loaded, tokenizer=truncating(loaded.tokenizer, loaded.max_length))

    return get


def measured(checkpoint: Checkpoint, rows: Rows) -> Mapping[str, float]:
    return measures_of_pytorch(evaluation_of(checkpoint, {ROWS: rows}, None))


def test_labels_have_the_accuracy_of_scikit_learn(load: Callable[[str], Checkpoint]) -> None:
    """Labels are spelt in any case, or are numbers of id2label; a long text is cut."""
    topics, texts = load("topics"), [*TEXTS[:8], " ".join(TEXTS)]
    task = encoder_task(topics.task)
    found = [str(task.reference(topics, {"text_input": text})["label"][0]) for text in texts]
    truth = [["sport", "food", "travel"][i % 3] for i in range(len(texts))]
    numbers = {"sport": 0, "food": 1, "travel": 2}
    for spelt in (str.upper, numbers.get):
        rows = [{"text": text, "label": spelt(label)} for text, label in zip(texts, truth, strict=True)]
        assert measured(topics, rows)["accuracy"] == accuracy_score(truth, found)


def test_labels_that_the_model_does_not_have_are_refused(load: Callable[[str], Checkpoint]) -> None:
    with pytest.raises(SpecError, match="'news' is not one of the model's: sport, food, travel"):
        evaluation_of(load("topics"), {ROWS: [{"text": "a", "label": "news"}]}, None)


def test_labels_of_the_request_are_those_of_the_file(load: Callable[[str], Checkpoint]) -> None:
    rows = [{"text": TEXTS[0], "label": "travel"}, {"text": TEXTS[1], "label": "business"}]
    evaluation = evaluation_of(load("entail"), {ROWS: rows}, None)
    assert [sample["candidate_labels"] for sample in evaluation.data.samples] == [["business", "travel"]] * 2


def test_tags_have_the_f1_of_seqeval(load: Callable[[str], Checkpoint]) -> None:
    """Score the model's own tags of the words as right, and others as seqeval does."""
    names = load("names")
    words = [text.split() for text in TEXTS[:6]]
    task = encoder_task(names.task)
    own = [_word_tags(task.reference, names, row) for row in words]
    rows = [{"tokens": row, "ner_tags": tags} for row, tags in zip(words, own, strict=True)]
    assert measured(names, rows) == {"entity F1": 1.0}
    other = [["B-PER", *tags[1:]] for tags in own]
    other = [_consistent(tags) for tags in other]
    rows = [{"tokens": row, "ner_tags": tags} for row, tags in zip(words, other, strict=True)]
    assert measured(names, rows)["entity F1"] == pytest.approx(f1_score(other, own))


def _word_tags(reference: Any, checkpoint: Checkpoint, words: Sequence[str]) -> list[str]:
    """Return the tag of each word: B- where an entity of the answer begins, I- inside of it."""
    sample = {"text_input": " ".join(words), "aggregation_strategy": "first"}
    entities = json.loads(reference(checkpoint, sample)["entities"])
    tags, start = [], 0
    for word in words:
        inside = next((e for e in entities if e["start"] < start + len(word) and e["end"] > start), None)
        begins = inside is not None and inside["start"] >= start
        tags.append("O" if inside is None else f"{'B' if begins else 'I'}-{inside['entity_group']}")
        start += len(word) + 1
    return tags


def _consistent(tags: Sequence[str]) -> list[str]:
    """Return tags in which an entity begins with B-: a word after another type's cannot go on with it."""
    before = ["O", *tags]
    return [
        f"B-{tag[2:]}" if tag[0] == "I" and last[2:] != tag[2:] else tag
        for last, tag in zip(before, tags, strict=False)
    ]


@pytest.mark.parametrize(
    ("tags", "message"),
    [(["B-DOG", "O"], "has entities DOG; the model knows LOC, PER"), (["O"], "2 tokens have 1 ner_tags")],
)
def test_tags_that_do_not_fit_are_refused(load: Callable[[str], Checkpoint], tags: Sequence[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        evaluation_of(load("names"), {ROWS: [{"tokens": ["Anna", "met"], "ner_tags": tags}]}, None)


def test_tags_of_other_schemes_become_bio(load: Callable[[str], Checkpoint]) -> None:
    names = load("names")
    words = ["Anna", "Lee", "saw", "Rome"]
    bio = {"tokens": words, "ner_tags": ["B-PER", "I-PER", "O", "B-LOC"]}
    found = measured(names, [bio])
    for tags in (["B-PER", "E-PER", "O", "S-LOC"], ["B-PER", "L-PER", "O", "U-LOC"], [1, 2, 0, 3]):
        assert measured(names, [{"tokens": words, "ner_tags": tags}]) == found


def test_questions_are_those_of_squad(load: Callable[[str], Checkpoint]) -> None:
    answers = load("answers")
    context = " ".join(TEXTS[:3])
    sample = {"question": "Where?", "context": context}
    right = str(encoder_task(answers.task).reference(answers, sample)["answer"])
    squad = {**sample, "answers": {"text": [right], "answer_start": [0]}, "id": "1"}
    assert measured(answers, [squad]) == {"F1": 1.0, "exact match": 1.0}
    evaluation = evaluation_of(answers, {ROWS: [squad, {**sample, "answers": []}]}, None)
    assert all(sample["handle_impossible_answer"] for sample in evaluation.data.samples)


def test_questions_are_compared_once_for_all_draws(
    load: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each of 200 draws compared every answer with the right ones again, 5 s for 200 questions."""
    compared: list[Sequence[str]] = []

    def counted(expected: Sequence[Sequence[str]], predicted: Sequence[str]) -> Scores:
        compared.append(predicted)
        return score_questions(expected, predicted)

    monkeypatch.setattr(question_answering, "score_questions", counted)
    rows = [{"question": "Where?", "context": TEXTS[0], "answers": [right]} for right in ("in a town", "a town", "no")]
    labelled = evaluation_of(load("answers"), {ROWS: rows}, None).data
    items = labelled.items([{"answer": "in a town"}] * 3)
    draws = scores_of_draws(labelled.score, items)
    assert len({scores["F1"] for scores in draws}) > 3
    assert len(compared) == len(rows)
    assert labelled.score(items) == pytest.approx(score_questions([row["answers"] for row in rows], ["in a town"] * 3))


def test_extraction_is_asked_for_the_types_of_the_data(load: Callable[[str], Checkpoint]) -> None:
    """Each row is asked for all types; words with tags and spans with labels have the same score."""
    extracts = load("extracts")
    text, names = "Mario left Turin", ["person", "place"]
    spans = [{"start": 0, "end": 5, "label": "person"}, {"start": 11, "end": 16, "label": "place"}]
    rows: Rows = [{"text": text, "entities": spans}, {"text": "Nobody came", "entities": []}]
    asked = evaluation_of(extracts, {ROWS: rows}, None).data.samples
    assert [sample["labels"] for sample in asked] == [names, names]
    tagged = [
        {"tokens": text.split(), "ner_tags": ["B-person", "O", "B-place"]},
        {"tokens": ["Nobody"], "ner_tags": ["O"]},
    ]
    assert evaluation_of(extracts, {ROWS: tagged}, None).data.samples[0]["labels"] == names
    right = [{"entities": json.dumps(spans)}, {"entities": "[]"}]
    for data in (rows, tagged):
        labelled = evaluation_of(extracts, {ROWS: data}, None).data
        assert labelled.score(labelled.items(right)) == {"entity F1": 1.0}
        assert labelled.score(labelled.items([*right[1:]] * 2)) == {"entity F1": 0.0}
