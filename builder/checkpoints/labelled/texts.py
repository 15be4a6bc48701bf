"""Data for tasks that label texts: labels, tags of words, and answers of questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled.evaluation import LabelledData, Row, text_of, texts_of, without
from builder.checkpoints.metrics import LABEL_MEASURES, QUESTION_MEASURES, SPAN_MEASURES, mean_scores
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import SpecError

SCHEMES = str.maketrans({"S": "B", "U": "B", "E": "I", "L": "I"})  # prefixes of IOBES and BILOU
LABELS = "labels"
PAIR_KEYS = ("text_pair", "sentence2", "text2")


def labels(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of texts, or pairs of texts, with the label of each."""
    text, label = keys
    pair = next((key for key in PAIR_KEYS if key in rows[0] and key != text), None)
    kept = [row for row in rows if text_of(row, text).strip() and row[label] is not None]
    asked = "candidate_labels" in checkpoint.task.samples[0]  # labels that the request names
    own = sorted({str(row[label]) for row in kept}) if asked else _own_labels(checkpoint)
    labelled = []
    for row in kept:
        sample: dict[str, Any] = {"text_input": row[text], "label": _label(row[label], own)}
        if asked:
            sample["candidate_labels"] = row.get("candidate_labels") or own
        elif pair is not None:
            sample["text_pair"] = text_of(row, pair)
        labelled.append(sample)
    what = "texts" if pair is None or asked else "pairs of texts"
    return _data(checkpoint, f"{what} with labels", what, labelled, len(rows), LABEL_MEASURES)


def _own_labels(checkpoint: Checkpoint) -> list[str]:
    names = checkpoint.config.id2label
    return [str(names[index]) for index in sorted(names)]


def _label(value: Any, own: Sequence[str]) -> str:
    """Return a label as the model spells it; a number is its place in id2label. Raises SpecError."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(own) and str(value) not in own:
        return own[value]
    spelt = next((name for name in own if name.lower() == str(value).lower()), None)
    if spelt is None:
        raise SpecError(f"the label {str(value)[:80]!r} is not one of the model's: {', '.join(own)[:200]}")
    return spelt


def tags(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of words with a tag each (BIO, IOBES or BILOU), by the first token of each word."""
    words, tag = keys
    own = _own_labels(checkpoint)
    labelled = []
    for row in rows:
        if len(row[words]) != len(row[tag]):
            raise SpecError(f"{len(row[words])} {words} have {len(row[tag])} {tag}: expected one for each")
        named = [own[name] if isinstance(name, int) and 0 <= name < len(own) else str(name) for name in row[tag]]
        if any(word.strip() for word in row[words]):
            labelled.append({"text_input": " ".join(row[words]), "entities": _entities(row[words], named)})
    return _entity_data(checkpoint, "words with tags", labelled, len(rows))


def entities(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of texts with the start, end and type of each entity."""
    text, spans = keys
    labelled = [{"text_input": row[text], "entities": row[spans]} for row in rows if text_of(row, text).strip()]
    return _entity_data(checkpoint, "texts with entities", labelled, len(rows))


def _entity_data(checkpoint: Checkpoint, kind: str, labelled: Sequence[Row], rows: int) -> LabelledData:
    expected = {_type(entity) for row in labelled for entity in row["entities"]}
    if LABELS in checkpoint.task.samples[0]:  # which the request names
        asked = [{LABELS: sorted(expected), **row} for row in labelled if expected]
        return _data(checkpoint, kind, "texts", asked, rows, SPAN_MEASURES)
    known = {_type({"entity": name}) for name in _own_labels(checkpoint)} - {"O"}
    if expected and not expected & known:
        raise SpecError(f"the file has entities {_list(expected)}; the model knows {_list(known)}: rename them")
    first = [{**row, "aggregation_strategy": "first"} for row in labelled]
    return _data(checkpoint, kind, "texts", first, rows, SPAN_MEASURES)


def _type(entity: Row) -> str:
    name = str(entity.get("entity_group") or entity.get("entity") or f"B-{entity.get('label')}")
    return name[2:] if name[:2] in ("B-", "I-") else name


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))[:200]


def _entities(words: Sequence[str], tags: Sequence[str]) -> list[dict[str, Any]]:
    """Return the start, end and tag of each word of an entity; consecutive words of one become one when scored."""
    found, start = [], 0
    for word, tag in zip(words, tags, strict=True):
        if tag != "O" and word.strip():
            prefix = tag[0].translate(SCHEMES)
            found.append({"start": start, "end": start + len(word), "entity": f"{prefix}{tag[1:]}"})
        start += len(word) + 1
    return found


def questions(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of questions about a context, with the right answers of each, as SQuAD has them."""
    question, context, answers = keys
    labelled = []
    for row in rows:
        given = row[answers]
        right = texts_of(given.get("text") if isinstance(given, dict) else given, answers)
        if text_of(row, question).strip() and text_of(row, context).strip():
            labelled.append({"question": row[question], "context": row[context], "answers": right})
    if not all(row["answers"] for row in labelled):  # SQuAD 2.0: some have none
        labelled = [{**row, "handle_impossible_answer": True} for row in labelled]
    data = _data(checkpoint, "questions with answers", "questions", labelled, len(rows), QUESTION_MEASURES)
    return replace(data, items=lambda answers: [data.score([item]) for item in data.items(answers)], score=mean_scores)


def _data(
    checkpoint: Checkpoint, kind: str, what: str, labelled: Sequence[Row], rows: int, measures: Sequence[str]
) -> LabelledData:
    """Return the data with the measures of the task itself."""
    if not labelled:
        raise SpecError(f"none of {rows} rows has a text with its label")
    task = encoder_task(checkpoint.task)
    samples = [{key: value for key, value in row.items() if key not in task.labels} for row in labelled]
    note = without(rows - len(labelled), "rows without a text")
    return LabelledData(
        kind,
        f"{len(labelled)} {what}",
        samples,
        lambda answers: list(zip(labelled, answers, strict=True)),
        lambda items: task.score(*zip(*items, strict=True)),
        measures,
        note,
    )
