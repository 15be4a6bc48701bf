"""Samples that an encoder-decoder is judged on, tokenised as the emitted code does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from builder.building.families.generating import read_samples
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.errors import CheckpointError
from builder.runtime.contract import EncoderInput
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.source_texts import SourceTexts, beginning


def texts_to_judge(path: Path | None, checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    """Return the samples with a text to read. Raises SpecError, or CheckpointError if none is left."""
    samples = read_samples(path, checkpoint, checkpoint.task.fields({"languages": True})[0])
    if not samples:
        raise CheckpointError("there is no sample; give texts with --samples, as text_input")
    return samples


def token_rows(
    samples: Sequence[Mapping[str, Any]], checkpoint: Checkpoint, source: EncoderInput
) -> list[tuple[int, ...]]:
    """Return the samples as the emitted code tokenises them."""
    language, target = source.source_language, source.target_language
    if source.pairs:
        pair = next(iter(source.pairs)).split(" to ")
        language, target = language or pair[0], target or pair[-1]
    if source.languages:
        target = _verified_target(source)
    unlimited = replace(source, max_length=10**9, source_language=language, target_language=target)
    prompts = SourceTexts(unlimited, Tokenizer.from_str(tokenizer_json(checkpoint.tokenizer)))
    prompted = [prompts(RequestOptions(prompt=str(sample["text_input"]))).source for sample in samples]
    return [row[: checkpoint.max_length] for row in prompted]


def verified_beginning(source: EncoderInput) -> tuple[int, int | None]:
    """Return how a verified answer begins: in the default target language, or in the first that is known."""
    return beginning(source, source.languages[_verified_target(source)] if source.languages else None)


def _verified_target(source: EncoderInput) -> str:
    return source.target_language or next(iter(source.languages))
