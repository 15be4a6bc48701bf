"""Refuse a tokenizer that fills memory, does not end or crashes its library, before the build's process loads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

from builder.checkpoints.tokenizer_probe import MAX_WRITTEN, longest_replacement
from builder.checkpoints.untrusted import read_object
from builder.common.errors import CheckpointError, first_line
from builder.common.limited import LimitReached, run_limited
from builder.common.samples import TEXTS
from builder.runtime.panics import TokenizerError

PROBE = "builder.checkpoints.tokenizer_probe:probe"
SECONDS = 20  # of a processor, for loading and for all texts; known models take far less
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def refuse_hostile_files(folder: Path, model: str) -> None:
    """Try every tokenizer.json of `folder`, and look into its SentencePiece models. Raises CheckpointError."""
    names = read_object(folder / BESIDE[0]).get("fast_tokenizer_files") or []
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"the {BESIDE[0]} of {model} names {outside[0]!r} (fast_tokenizer_files); expected names of files beside it"
        )
    beside = [str(folder / name) for name in BESIDE]
    for file in sorted({folder / "tokenizer.json", *(folder / name for name in names)}):
        if file.is_file():
            _refuse({"file": str(file), "beside": beside}, model)
    for file in sorted(path for path in folder.iterdir() if path.suffix in (".model", ".spm")):
        written = len(longest_replacement(_charsmap(file)))
        if written > MAX_WRITTEN:
            raise CheckpointError(
                f"{file.name} of {model} writes {written} characters, more than {MAX_WRITTEN}, in one place of a text; "
                "use another tokenizer"
            )


def refuse_hostile_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, model: str) -> None:
    """Try `tokenizer` as transformers made it, unless its steps are those of the file in `folder` that was tried."""
    own = tokenizer.backend_tokenizer.to_str()
    if _steps(json.loads(own)) != _steps(read_object(folder / "tokenizer.json")):
        _refuse({"tokenizer": own}, model)


@contextmanager
def panics_refused(model: str) -> Iterator[None]:
    """Raise CheckpointError if the tokenizers library panics in the block: its panic is not an Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, TokenizerError) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"the tokenizer of {model} fails ({first_line(error)}); use another one") from error


def _refuse(request: dict[str, Any], model: str) -> None:
    try:
        problem = run_limited(PROBE, {**request, "samples": TEXTS}, SECONDS)
    except LimitReached as error:
        problem = f"{error}, on texts of a few thousand characters: one of its steps or expressions is at fault"
    if problem is not None:
        raise CheckpointError(f"the tokenizer of {model} {problem}. It could block a server; use another one")


def _steps(document: dict[str, Any]) -> dict[str, Any]:
    return {name: document.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}


def _charsmap(file: Path) -> bytes:
    """Return the map of characters of a SentencePiece model; empty if it has none, or is not such a model."""
    try:
        return bytes(ModelProto.FromString(file.read_bytes()).normalizer_spec.precompiled_charsmap)
    except Exception:  # a file of another format; its later reader reports it
        return b""
