"""Samples and measures of decoders: scores of texts, choices, and greedy answers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
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
from tests.decoders import make_decoder_checkpoint
from tests.evaluations import measures_of_pytorch

LONGEST = 48
Rows = Sequence[Mapping[str, Any]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = make_decoder_checkpoint(tmp_path_factory.mktemp("decoder") / "checkpoint", "llama", chat=True)
    return resolve(make_spec(model=str(folder), task="text-generation", max_length=LONGEST))


def evaluation(decoder: Checkpoint, rows: Rows) -> Evaluation:
    return evaluation_of(decoder, {ROWS: rows}, None)


def loss(decoder: Checkpoint, tokens: Sequence[int]) -> tuple[float, int]:
    """Return transformers' own summed loss over all tokens but the first, and their number."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        return float(decoder.model(input_ids=ids, labels=ids).loss) * (len(tokens) - 1), len(tokens) - 1


def first(decoder: Checkpoint) -> int:
    tokenizer = decoder.tokenizer
    return int(tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def test_perplexity_is_that_of_transformers_loss(decoder: Checkpoint) -> None:
    """Every token counts once, those of a text beyond the context too."""
    texts = [*TEXTS[:4], " ".join(TEXTS[:12])]
    total, count = 0.0, 0
    for text in texts:
        tokens = [first(decoder), *decoder.tokenizer(text, add_special_tokens=False).input_ids]
        for start in range(0, len(tokens) - 1, LONGEST - 2):
            summed, scored = loss(decoder, tokens[start : start + LONGEST - 1])
            total, count = total + summed, count + scored
    asked = evaluation(decoder, [{"text": text} for text in [*texts, " "]])
    assert sum(len(sample["input_ids"]) - 1 for sample in asked.data.samples) == count
    assert max(len(sample["input_ids"]) for sample in asked.data.samples) == LONGEST - 1
    assert asked.data.note == "left out: 1 rows without a text"
    scores = measures_of_pytorch(asked)
    assert scores["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert scores["bits per byte"] == pytest.approx(total / math.log(2) / sum(len(t.encode()) for t in texts), rel=1e-5)


@pytest.mark.parametrize("label", ["number", "letter", "text", "dictionary"])
def test_the_most_probable_choice_is_the_answer(decoder: Checkpoint, label: str) -> None:
    questions = [(TEXTS[i], [" ".join(text.split()[:3]) for text in TEXTS[i + 1 : i + 5]]) for i in range(4)]
    rows: list[dict[str, Any]] = []
    for question, options in questions:
        alone = len(decoder.tokenizer(question).input_ids)
        sums = []
        for option in options:
            tokens = decoder.tokenizer(f"{question} {option}").input_ids[-(LONGEST - 1) :]
            kept = len(decoder.tokenizer(f"{question} {option}").input_ids) - alone
            with torch.inference_mode():
                logits = decoder.model(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            own = logits.gather(-1, torch.tensor(tokens[1:])[:, None])[-kept:, 0]
            sums.append(float(own.sum()))
        best = sums.index(max(sums))
        spelt = {"number": best, "letter": "ABCD"[best], "text": options[best], "dictionary": f"n{best}"}[label]
        named = {"text": options, "label": [f"n{i}" for i in range(4)]} if label == "dictionary" else options
        rows.append({"question": question, "choices": named, "answer": spelt})
    assert measures_of_pytorch(evaluation(decoder, rows))["accuracy"] == 1.0


@pytest.mark.parametrize(("answer", "place"), [(2, 2), ("2", 1), ("C", 2)])
def test_a_number_is_the_place_of_a_choice_that_is_a_number(decoder: Checkpoint, answer: Any, place: int) -> None:
    """Regression: of MMLU's questions about numbers, the choice that equals the place was taken for the right one."""
    asked = evaluation(decoder, [{"question": TEXTS[0], "choices": ["8", "2", "24"], "answer": answer}])
    ((found, *_),) = asked.data.items([asked.comparison.reference(sample) for sample in asked.data.samples])
    assert found == place


def test_choices_without_a_question_follow_the_first_token(decoder: Checkpoint) -> None:
    """Regression: without a question, the first token of a choice had no score."""
    asked = evaluation(decoder, [{"question": " ", "choices": ["a word", "another"], "answer": 0}])
    begun = [sample["input_ids"][0] for sample in asked.data.samples]
    assert begun == [first(decoder)] * 2


def test_answers_are_compared_as_squad_compares_them(decoder: Checkpoint) -> None:
    """A prompt and a chat; the answer ends at `max_tokens` or before a stop text."""
    chat = [{"role": "user", "content": TEXTS[1]}]
    rows: list[dict[str, Any]] = [
        {"prompt": TEXTS[0], "answer": "x", "max_tokens": 8},
        {"prompt": TEXTS[0], "answer": "x", "max_tokens": 8, "stop": [" "]},
    ]
    asked = evaluation(decoder, rows)
    whole, cut = ("".join(asked.comparison.reference(sample)["text_output"]) for sample in asked.data.samples)
    assert cut == whole[: whole.index(" ")] if " " in whole else cut == whole
    right = [{**row, "answer": ["other", text]} for row, text in zip(rows, (whole, cut), strict=True)]
    assert measures_of_pytorch(evaluation(decoder, right)) == {"exact match": 1.0, "F1": 1.0}
    assert measures_of_pytorch(evaluation(decoder, [{**rows[0], "answer": "zzz"}]))["exact match"] == 0.0
    (sample,) = evaluation(decoder, [{"messages": chat, "answer": "x"}]).data.samples
    assert sample["max_tokens"] == 128
    assert json.loads(sample["messages"]) == chat


REFUSED: Mapping[str, Rows] = {
    "answer is 'E', and choices has 2 texts": [{"question": "a", "choices": ["b", "c"], "answer": "E"}],
    "row 1: choices has an empty text": [{"question": "a", "choices": ["", "b", "c"], "answer": 1}],
    "write it into the question": [{"question": "a", "context": "b", "answers": ["c"]}],
    "none of 1 rows has a text": [{"text": " "}],
    "expected, for text-generation: questions with choices": [{"sentence1": "a", "sentence2": "b", "score": 1}],
}


@pytest.mark.parametrize("message", REFUSED)
def test_data_that_does_not_fit_is_refused(decoder: Checkpoint, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        evaluation(decoder, REFUSED[message])
