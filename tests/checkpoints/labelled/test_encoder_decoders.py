"""Samples and measures of encoder-decoders, asked with the settings of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled import Evaluation, evaluation_of
from builder.checkpoints.resolve import resolve
from builder.common.data_folders import ROWS
from builder.common.errors import SpecError
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.runtime.contract import Arena, EncoderInput, GenerationServing, Language, Session
from tests.evaluations import measures_of_pytorch
from tests.seq2seqs import make_seq2seq_checkpoint

LONGEST = 96
PARAMS = {"summarization": {"prefix": "summarize: ", "num_beams": 3, "length_penalty": 2.0}}
SOURCE = EncoderInput(LONGEST, (), "encoder.onnx", 1024, start=2, prefix="summarize: ")
SERVING = GenerationServing(
    task="summarization",
    executor="in-process",
    arena=Arena(4, 21, "float32", ()),
    session=Session(),
    vocabulary=400,
    queue=0,
    beams=2,
    max_tokens=128,
    end_ids=(3,),
    fields=(),
    defaults={},
    source=SOURCE,
)
Rows = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("t5") / "checkpoint"
    make_seq2seq_checkpoint(folder, "t5", task_specific_params=PARAMS)
    return resolve(make_spec(model=str(folder), task="summarization", max_length=LONGEST))


def evaluation(model: Checkpoint, rows: Rows, serving: GenerationServing = SERVING) -> Evaluation:
    return evaluation_of(model, {ROWS: rows}, None, serving)


def generated(model: Checkpoint, text: str, **options: Any) -> str:
    """Return the output of `generate` for a text that is cut where the model stops reading."""
    tokens = model.tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
    with torch.inference_mode():
        written = model.model.generate(tokens["input_ids"], attention_mask=tokens["attention_mask"], **options)
    return str(model.tokenizer.decode(written[0], skip_special_tokens=True))


def test_reference_is_generate_with_the_settings_of_the_task(model: Checkpoint) -> None:
    """Prefix, length penalty and beams, no more than were built for; as many tokens as the model writes."""
    asked = evaluation(model, [{"article": TEXTS[0], "highlights": "x"}])
    (sample,) = asked.data.samples
    assert sample == {"text_input": TEXTS[0], "temperature": 0.0, "num_beams": 2, "n": 1, "max_tokens": 20}
    expected = generated(model, f"summarize: {TEXTS[0]}", num_beams=2, length_penalty=2.0, max_new_tokens=20)
    assert asked.comparison.reference(sample)["text_output"] == [expected]


def test_answers_are_compared_with_the_nearest_reference(model: Checkpoint) -> None:
    rows: list[dict[str, Any]] = [{"text": text, "target": "x", "max_tokens": 8} for text in TEXTS[:2]]
    asked = evaluation(model, rows)
    texts = [asked.comparison.reference(sample)["text_output"][0] for sample in asked.data.samples]
    right = [{**row, "target": ["other", text]} for row, text in zip(rows, texts, strict=True)]
    assert measures_of_pytorch(evaluation(model, right)) == pytest.approx({"chrF": 1, "ROUGE-L": 1, "exact match": 1})
    assert measures_of_pytorch(evaluation(model, [{"text": TEXTS[0], "target": "zzz"}]))["exact match"] == 0


def test_text_is_cut_where_the_model_stops_reading(model: Checkpoint) -> None:
    asked = evaluation(model, [{"text": " ".join(TEXTS), "target": "x"}, {"text": " ", "target": "x"}])
    (sample,) = asked.data.samples
    text = sample["text_input"]
    count = len(model.tokenizer(f"summarize: {text}").input_ids)
    assert LONGEST - 2 <= count <= LONGEST
    assert " ".join(TEXTS).startswith(text)
    assert asked.data.note == "left out: 1 rows without a text and a reference"


def test_rows_name_their_languages(model: Checkpoint) -> None:
    languages = {code: Language((5 + place,), (3,), 7 + place) for place, code in enumerate(("de", "fr"))}
    serving = replace(SERVING, source=replace(SOURCE, prefix="", languages=languages))
    row = {"text": TEXTS[0], "target": "x", "source_language": "de", "target_language": "fr"}
    asked = evaluation(model, [row], serving)
    (sample,) = asked.data.samples
    assert (sample["source_language"], sample["target_language"]) == ("de", "fr")
    assert asked.comparison.reference(sample)["text_output"]
    with pytest.raises(SpecError, match=r"source_language is 'tlh'; this model knows de, fr"):
        evaluation(model, [{**row, "source_language": "tlh"}], serving)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": TEXTS[0], "target": " "}], "none of 1 rows has a text with a reference"),
        ([{"text": TEXTS[0], "label": 1}], r"expected, for summarization: texts with references \(text, target\)"),
    ],
)
def test_data_that_does_not_fit_is_refused(model: Checkpoint, rows: Rows, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        evaluation(model, rows)
