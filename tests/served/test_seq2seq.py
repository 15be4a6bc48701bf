"""Encoder-decoders on a real Triton, against transformers' own answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from builder.common.errors import ServeError
from builder.common.samples import TEXTS
from builder.repository.report.record import read_report
from builder.serving.client.client import Client

Connect = Callable[[str], Client]
SHORT = [text for text in TEXTS if len(text) < 110]


def reference(folder: Path, text: str, count: int, returned: int = 1, **options: Any) -> list[str]:
    """Return the output of `generate` for `text`, with the checkpoint's generation_config and `options` over it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    if "src_lang" in options:
        tokenizer.src_lang = options.pop("src_lang")
        options["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(options.pop("tgt_lang"))
    encoded = tokenizer(text, return_tensors="pt")
    arguments = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        result = model.generate(**arguments, max_new_tokens=count, num_return_sequences=returned, **options)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in result]


@pytest.mark.parametrize("name", ["sums", "speaks_int8"])
def test_report_counts_each_attention_once(name: str, built: Callable[[str], Path]) -> None:
    """A graph contains each cross-attention twice, with and without beams; a call runs one of the two."""
    report = read_report(built(name), name)
    attentions = report.operators["GroupQueryAttention"] + report.operators["MultiHeadAttention"]
    assert attentions == report.attention["fused"] == report.attention["layers"]


def test_summary_uses_the_generation_config_of_the_checkpoint(
    client: Connect, checkpoint: Callable[[str], Path]
) -> None:
    """The prefix, beams and length penalty of its task apply if the request sets none."""
    for text in SHORT[:4]:
        answer = client("sums").ask({"text_input": text, "max_tokens": 20})
        wanted = reference(checkpoint("sums"), f"summarize: {text}", 20, num_beams=3, length_penalty=2.0)
        assert answer["text_output"] == wanted
        assert len(answer["scores"]) == 1
        assert answer["completion_tokens"][0] <= 20


def test_greedy_text_equals_transformers_streamed_and_whole(client: Connect, checkpoint: Callable[[str], Path]) -> None:
    connection = client("sums")
    for text in SHORT[4:8]:
        sample = {"text_input": text, "max_tokens": 24, "num_beams": 1}
        (wanted,) = reference(checkpoint("sums"), f"summarize: {text}", 24, num_beams=1)
        assert connection.ask(sample)["text_output"] == [wanted]
        pieces = list(connection.stream({**sample, "stream": True}))
        assert "".join("".join(piece["text_output"]) for piece in pieces) == wanted
        assert [piece.get("finish_reason") for piece in pieces].count(None) == len(pieces) - 1


def test_n_best_answers_equal_transformers(client: Connect, checkpoint: Callable[[str], Path]) -> None:
    sample = {"text_input": SHORT[2], "max_tokens": 12, "num_beams": 3, "n": 3, "length_penalty": 0.5}
    answer = client("sums").ask(sample)
    options = {"num_beams": 3, "length_penalty": 0.5}
    assert answer["text_output"] == reference(checkpoint("sums"), f"summarize: {SHORT[2]}", 12, 3, **options)
    assert answer["scores"] == sorted(answer["scores"], reverse=True)
    assert answer["index"] == [0, 1, 2]


def test_request_overrides_the_languages_of_the_build(client: Connect, checkpoint: Callable[[str], Path]) -> None:
    """The language pair of the build applies by default, and a request can choose another."""
    connection, folder = client("speaks"), checkpoint("speaks")
    text = "the train to the coast"
    by_default = connection.ask({"text_input": text, "max_tokens": 16})
    assert by_default["text_output"] == reference(folder, text, 16, src_lang="en_XX", tgt_lang="ro_RO")
    languages = {"source_language": "de_DE", "target_language": "fr_XX"}
    other = connection.ask({"text_input": text, "max_tokens": 16, "num_beams": 4, **languages})
    wanted = reference(folder, text, 16, src_lang="de_DE", tgt_lang="fr_XX", num_beams=4)
    assert other["text_output"] == wanted != by_default["text_output"]


def test_concurrent_requests_get_the_same_text_as_alone(client: Connect) -> None:
    """24 greedy and beam-search requests of unequal length over 6 slots."""
    connection = client("speaks_int8")
    samples = [
        {"text_input": text, "max_tokens": 4 + 5 * (index % 5), "num_beams": 1 + index % 2}
        for index, text in enumerate((SHORT * 3)[:24])
    ]
    alone = [connection.ask(sample)["text_output"] for sample in samples]
    texts: dict[int, list[str]] = {}

    def ask(index: int) -> None:
        with Client(connection.url, "speaks_int8") as own:
            texts[index] = own.ask(samples[index])["text_output"]

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(samples))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[index] for index in range(len(samples))] == alone


def test_generation_config_limits_the_answer(client: Connect) -> None:
    """generation_config sets max_new_tokens 29, a forced end token and no_repeat_ngram_size 3."""
    answer = client("speaks_int8").ask({"text_input": SHORT[0]})
    assert answer["completion_tokens"][0] <= 29
    assert answer["finish_reason"] == ["stop"]


@pytest.mark.parametrize(
    ("name", "sample", "message"),
    [
        ("sums", {"text_input": "word " * 300}, r"the text has \d+ tokens; this model reads at most 96"),
        ("sums", {"num_beams": 9}, "num_beams is 9; this model was built for at most 3. Build it with --beams 9"),
        ("sums", {"max_tokens": 999}, "max_tokens is 999; after a prompt of 1 tokens it can be 1 to 39"),
        ("sums", {"num_beams": 3, "temperature": 0.7}, "a temperature above 0 and num_beams 3 contradict each other"),
        ("sums", {"num_beams": 2, "n": 3}, "n is 3, more than num_beams, 2"),
        ("sums", {"num_beams": 2, "early_stopping": "yes"}, "early_stopping is 'yes'; expected one of true, false"),
        ("sums", {"num_beams": 1, "length_penalty": 2.0}, "length_penalty is of beam search only"),
        ("speaks", {"target_language": "tlh"}, "target_language is 'tlh'; this model knows af_ZA"),
    ],
)
def test_invalid_request_is_refused_and_the_next_one_answered(
    name: str, sample: dict[str, Any], message: str, client: Connect
) -> None:
    connection = client(name)
    with pytest.raises(ServeError, match=message):
        connection.ask({"text_input": "the train", **sample})
    assert connection.ask({"text_input": "the train", "max_tokens": 3})["finish_reason"]
