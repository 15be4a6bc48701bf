"""Data for encoder-decoders: texts with their references, such as summaries, translations and answers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled.evaluation import (
    Answer,
    Comparison,
    LabelledData,
    Row,
    Sample,
    text_of,
    texts_of,
    without,
)
from builder.checkpoints.labelled.generation import same_text, written_text
from builder.checkpoints.metrics import TEXT_MEASURES, TextCounts, count_text, score_counts
from builder.checkpoints.tasks.base import seq2seq_task
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import SpecError
from builder.runtime.contract import EncoderInput, GenerationServing
from builder.runtime.fields import InputError
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.prompts import Prompt
from builder.runtime.generation.source_texts import SourceTexts

LANGUAGES = ("source_language", "target_language")


@dataclass(frozen=True)
class EncoderDecoder:
    """An encoder-decoder in PyTorch, asked as the served model is: `serving` has its prefix, languages and limits."""

    checkpoint: Checkpoint
    serving: GenerationServing

    @cached_property
    def source(self) -> EncoderInput:
        """Settings of texts."""
        assert self.serving.source is not None
        return self.serving.source

    @cached_property
    def prompts(self) -> SourceTexts:
        """Tokens of a text, as the emitted code makes them."""
        return SourceTexts(self.source, Tokenizer.from_str(tokenizer_json(self.checkpoint.tokenizer)))

    @cached_property
    def config(self) -> GenerationConfig:
        """The checkpoint's own settings for the task, with no more beams than the model was built for."""
        name, source = self.checkpoint.task.name, self.source
        if source.pairs and source.source_language and source.target_language:
            name = f"translation_{source.source_language}_to_{source.target_language}"
        options = seq2seq_task(self.checkpoint.task).instructions(self.checkpoint.config, name).options
        config = GenerationConfig.from_dict({**self.checkpoint.model.generation_config.to_dict(), **options})
        beams = 1 if config.do_sample else min(config.num_beams or 1, self.serving.beams)
        config.update(do_sample=False, num_beams=beams, num_return_sequences=1, max_length=None)
        return config

    @property
    def max_tokens(self) -> int:
        """Tokens of an answer, if its row has no number."""
        return min(self.serving.max_tokens, self.serving.arena.length - 1)

    def prompt(self, sample: Sample) -> Prompt:
        """Return the tokens of a sample. Raises InputError for a text that is too long, or an unknown language."""
        source, target = (str(sample.get(name, "")) for name in LANGUAGES)
        return self.prompts(RequestOptions(prompt=sample["text_input"], source_language=source, target_language=target))

    def shortened(self, sample: Sample) -> Sample:
        """Return a sample with as much of its text as the model reads. Raises InputError for an unknown language."""
        text = sample["text_input"]
        self.prompt({**sample, "text_input": text[:1]})

        def is_too_long(end: int) -> bool:
            try:
                self.prompt({**sample, "text_input": text[:end]})
            except InputError:
                return True
            return False

        end = len(text)
        if is_too_long(end):
            end = bisect_left(range(1, end), True, key=is_too_long)
        return {**sample, "text_input": text[:end]}

    def reference(self, sample: Sample) -> Answer:
        """Return `generate`'s answer, with the checkpoint's own settings."""
        prompt = self.prompt(sample)
        tokens = torch.tensor([prompt.source])
        with torch.inference_mode():
            written = self.checkpoint.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=self.config,
                max_new_tokens=sample["max_tokens"],
                decoder_start_token_id=prompt.tokens[0],
                forced_bos_token_id=prompt.first,
            )
        return {"text_output": [self.checkpoint.tokenizer.decode(written[0], skip_special_tokens=True)]}


def references(model: EncoderDecoder, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of texts with one or more references each.

    Raises SpecError for a row without a reference, and for a language that the model does not know.
    """
    source, target = keys
    kept = [row for row in rows if text_of(row, source).strip() and texts_of(row[target], target)]
    if not kept:
        raise SpecError(f"none of {len(rows)} rows has a text with a reference")
    samples: list[Sample] = []
    for row in kept:
        options: dict[str, Any] = {name: row[name] for name in LANGUAGES if row.get(name)}
        options |= {"temperature": 0.0, "num_beams": model.config.num_beams, "n": 1}
        options["max_tokens"] = row.get("max_tokens") or model.max_tokens
        try:
            samples.append(model.shortened({"text_input": row[source], **options}))
        except InputError as error:
            raise SpecError(f"the text {row[source][:40]!r} cannot be read: {error}") from error
    right = [texts_of(row[target], target) for row in kept]

    def items(answers: Sequence[Answer]) -> list[TextCounts]:
        return [count_text(texts, written_text(one)) for texts, one in zip(right, answers, strict=True)]

    note = without(len(rows) - len(kept), "rows without a text and a reference")
    return LabelledData(
        "texts with references", f"{len(kept)} texts", samples, items, score_counts, TEXT_MEASURES, note
    )


def as_served(model: EncoderDecoder) -> Comparison:
    """Return PyTorch's answers, and the share of equal ones."""
    return Comparison(model.reference, same_text, "equal texts")
