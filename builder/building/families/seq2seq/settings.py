"""Settings of an encoder-decoder's texts, by checkpoint and user: how answers begin and end, prefixes, languages.

The samples are tokenised as the emitted code does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import GenerationConfig, PreTrainedConfig

from builder.building.families.generating import read_samples
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.generation_config import generation_file, refuse_unserved
from builder.checkpoints.tasks.base import Instructions, seq2seq_task
from builder.checkpoints.tokenizer import languages, nearest_language, tokenizer_json
from builder.common.errors import CheckpointError, SpecError
from builder.graphs.onnx.graph import ENCODER_FILE
from builder.runtime.contract import EncoderInput, Language, LayerShape
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.source_texts import SourceTexts, beginning

DEFAULT_ANSWER_TOKENS = 256  # tokens, if neither the user nor the checkpoint sets a number


@dataclass(frozen=True)
class Settings:
    """Settings that a checkpoint gives its decode loop, for one task."""

    config: GenerationConfig
    instructions: Instructions
    start: int
    beams: int
    max_answer: int
    languages: Mapping[str, Language]


def read_settings(
    checkpoint: Checkpoint, task: str | None, slots: int, asked_beams: int | None, max_answer: int | None
) -> Settings:
    """Read the checkpoint's generation_config, with its settings for this task alone.

    Raises CheckpointError and SpecError.
    """
    instructions = seq2seq_task(checkpoint.task).instructions(checkpoint.config, task or checkpoint.task.name)
    config = GenerationConfig.from_dict({**checkpoint.model.generation_config.to_dict(), **instructions.options})
    file = generation_file(checkpoint.folder)
    refuse_unserved(config, is_decoder=False, of_task=instructions.options, file=file)
    start = config.decoder_start_token_id
    if start is None:
        start = config.bos_token_id
    if start is None:
        raise CheckpointError(
            f"{checkpoint.source} does not say which token its answers start from; add decoder_start_token_id to its "
            "generation_config.json"
        )
    beams = asked_beams or config.num_beams or 1
    if beams > slots:
        raise SpecError(
            f"a search of {beams} beams needs as many slots; --slots is {slots}: raise it, or say with --beams how "
            "many a search is to have"
        )
    longest = max_answer or max(config.max_length or 0, 1 + (config.max_new_tokens or 0), DEFAULT_ANSWER_TOKENS)
    positions = getattr(checkpoint.config, "max_position_embeddings", None)
    if max_answer and positions and max_answer > positions:
        raise SpecError(f"--max-answer {max_answer} exceeds the {positions} positions this model has; use at most that")
    known = languages(checkpoint.tokenizer)
    names_pair = task is not None and task != checkpoint.task.name
    if known:
        codes = {"source": instructions.source, "target": instructions.target}
        for kind, code in codes.items():
            if names_pair and code is not None and nearest_language(code, known) is None:
                raise SpecError(f"the {kind} language {code!r} of --task is not known; known are {', '.join(known)}")
        source, target = (nearest_language(code, known) for code in codes.values())
        instructions = replace(instructions, source=source, target=target)
    elif instructions.pairs:
        if names_pair and f"{instructions.source} to {instructions.target}" not in instructions.pairs:
            raise SpecError(f"--task {task}: the model translates {', '.join(instructions.pairs)}")
    else:
        instructions = replace(instructions, source=None, target=None)  # a model of one pair needs no names for it
    if instructions.prefix is None:
        instructions = replace(instructions, prefix="" if known else own_prefix(checkpoint.config))
    return Settings(config, instructions, int(start), beams, min(longest, positions or longest), known)


def own_prefix(config: PreTrainedConfig) -> str:
    """Return the prefix, such as BART's space, that pipelines of transformers up to 4.57 put before every text."""
    return str(getattr(config, "prefix", None) or "")


def source_of(
    checkpoint: Checkpoint, settings: Settings, cross: Sequence[LayerShape], token_budget: int
) -> EncoderInput:
    """Return the settings of texts, for serving.json: their limit, their prefix, and how answers begin."""
    target = settings.instructions.target
    forced = settings.config.forced_bos_token_id
    if target is None:
        codes_of_start = [code for code, entry in settings.languages.items() if entry.first in (settings.start, forced)]
        target = codes_of_start[0] if codes_of_start else None
    source = settings.instructions.source
    if settings.languages and source is None:
        source = getattr(checkpoint.tokenizer, "src_lang", None)
    return EncoderInput(
        max_length=checkpoint.max_length,
        layers=cross,
        encoder=ENCODER_FILE,
        token_budget=token_budget,
        start=settings.start,
        first=forced,
        prefix=settings.instructions.prefix or "",
        pairs=settings.instructions.pairs,
        languages=settings.languages,
        source_language=source,
        target_language=target,
    )


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
