"""A model that writes numbers as words, trained here: a task with a right answer.

Each precision so has accuracy to lose. The numbers are 0 to 999 as digits; numbers that were never seen must come out
right.
"""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from builder.options import make_spec
from builder.runtime.generation.responses import Answer
from builder.runtime.generation.service import Service
from tests.servings import answered
from tests.trained import cached_training
from tests.verified_once import VerifiedOnce

ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ONES += [f"{stem}teen" for stem in ("thir", "four", "fif", "six", "seven", "eigh", "nine")]
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SPECIAL = ("<pad>", "</s>", "<unk>", "<s>")
LEARNED, KEPT_BACK = 840, 160
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}


def words(number: int) -> str:
    """Return a number in words: 407 is "four hundred and seven"."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    head, rest = f"{words(number // unit)} {name}", number % unit
    return head + ("" if not rest else f" and {words(rest)}" if rest < 100 else f" {words(rest)}")


def digits(number: int) -> str:
    return " ".join(str(number))


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = [*SPECIAL, *map(str, range(10)), *ONES, *TENS[2:], "hundred", "thousand", "and"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=32
    )


def train(folder: Path) -> list[dict[str, str]]:
    """Train on all but some numbers; return samples of these."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    config = AutoConfig.for_model("t5", vocab_size=len(tokenizer), dropout_rate=0.0, **SIZES, **special)
    model = AutoModelForSeq2SeqLM.from_config(config)
    order = np.random.default_rng(0).permutation(LEARNED + KEPT_BACK)
    sources = tokenizer([digits(n) for n in order[:LEARNED]], return_tensors="pt", padding=True)
    targets = tokenizer([words(n) for n in order[:LEARNED]], return_tensors="pt", padding=True)["input_ids"]
    labels = targets.masked_fill(targets == 0, -100)
    steps, size = 400, 96
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        batch = torch.randint(0, LEARNED, (size,))
        loss = model(
            input_ids=sources["input_ids"][batch], attention_mask=sources["attention_mask"][batch], labels=labels[batch]
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [{"text_input": digits(number)} for number in order[LEARNED : LEARNED + KEPT_BACK]]


def served(folder: Path, numbers: Sequence[int], beams: int) -> list[str]:
    """Return the emitted code's answer to each number, all of them in its one batch."""
    service = Service(folder)
    assert service.loop.executor.has_likeliest
    service.loop.start()
    answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()

    def note(place: int, answer: Answer, last: bool) -> None:
        answers.put((place, answer))

    for place, number in enumerate(numbers):
        tensors = {
            "text_input": np.array([digits(number).encode()], np.object_),
            "num_beams": np.array([beams], np.int32),
        }
        service.submit(tensors, {}, partial(note, place))
    said = dict(answers.get(timeout=600) for _ in numbers)
    service.loop.stop()
    return [answered(said[place])["text_output"][0].decode() for place in range(len(numbers))]


@pytest.mark.slow
def test_trained_seq2seq_keeps_its_accuracy_in_every_precision(tmp_path: Path) -> None:
    model, unseen = cached_training("numbers", train)
    lines = unseen.read_text().splitlines()
    kept_back = [int(json.loads(line)["text_input"].replace(" ", "")) for line in lines]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("\n".join(lines[:40]))
    spec = make_spec(
        model=str(model),
        block_size=16,
        samples=samples,
        output=tmp_path / "repository",
        beams=2,
        slots=8,
        quality=0.9,
        perplexity=1.1,
        serving={"queue": {"max_size": KEPT_BACK, "timeout_us": 0}},
    )
    once, accuracy = VerifiedOnce(spec, tmp_path), {}
    for precision in ("fp32", "int8", "int8-weights", "int4-weights"):
        report = once.build(spec.model_copy(update={"name": precision, "precision": precision}))
        measured = report.variants[-1]
        folder = tmp_path / "repository" / precision / "1"
        for beams in (1, 2):
            said = served(folder, kept_back, beams)
            right = [text == words(number) for number, text in zip(kept_back, said, strict=True)]
            accuracy[precision, beams] = float(np.mean(right))
        assert measured.quality is not None
        assert measured.quality >= 0.9
        if precision != "fp32":
            assert measured.error is not None
            assert measured.error > 1e-4, "a rounded model is not fp32 under another name"
            assert measured.size < report.variants[1].size * 0.6
            assert report.quantised is not None
            assert report.quantised["matmuls"] >= 20
    assert min(accuracy["fp32", 1], accuracy["fp32", 2]) >= 0.97, accuracy
    for (precision, beams), value in accuracy.items():
        lost = accuracy["fp32", beams] - value
        assert lost <= (0.1 if precision == "int4-weights" else 0.02), accuracy
