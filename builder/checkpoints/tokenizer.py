"""Tokenizer of a checkpoint: loaded once its files are known to be harmless, and written as one file."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast

from builder.checkpoints.slow_tokenizers import as_fast
from builder.checkpoints.tokenizer_limits import refuse_hostile_files, refuse_hostile_tokenizer
from builder.common.errors import CheckpointError, first_line
from builder.runtime.panics import call_tokenizer


def load_tokenizer(folder: Path, model: str, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `folder`. Raises CheckpointError, which names `model`.

    A slow one is converted. Refuses a tokenizer that could block a server, and one with more tokens than the model has.
    """
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "spm.model")
    if not any((folder / name).is_file() for name in names):
        raise CheckpointError(f"{model} has no tokenizer: none of {', '.join(names)} is in {folder}; add it there")
    refuse_hostile_files(folder, model)
    try:
        tokenizer = call_tokenizer(AutoTokenizer.from_pretrained, folder, trust_remote_code=False)
    except Exception as error:  # tokenizers raises errors of any type for a broken file
        raise CheckpointError(f"the tokenizer of {model} does not load: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        try:
            tokenizer = as_fast(tokenizer)
        except CheckpointError as error:
            raise CheckpointError(f"{model}: {error}") from error
    if tokenizer.split_special_tokens:
        raise CheckpointError(
            f"the tokenizer of {model} says split_special_tokens: special tokens in a text would be text, which is not "
            "supported; set it to false in tokenizer_config.json to serve the model without"
        )
    rows = getattr(config, "vocab_size", None)
    _refuse_tokens_without_embeddings(max([len(tokenizer) - 1, *tokenizer.get_vocab().values()]), rows, model)
    refuse_hostile_tokenizer(tokenizer, folder, model)  # its memory grows with the highest token id
    _refuse_tokens_without_embeddings(max([*_tokens_around(tokenizer), 0]), rows, model)
    typed: PreTrainedTokenizerFast = tokenizer
    return typed


def _refuse_tokens_without_embeddings(highest: int, rows: int | None, model: str) -> None:
    if rows is not None and highest >= rows:
        raise CheckpointError(
            f"the tokenizer of {model} has tokens up to {highest} and the model only {rows} embeddings: "
            "they do not belong together"
        )


def _tokens_around(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the token ids of a short pair of texts, those that the tokenizer adds included."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()  # to a length that happened to be set
    backend.no_truncation()
    return call_tokenizer(backend.encode, "a", "b").ids


def tokenizer_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the tokenizer as one file, without the padding and truncation that happened to be set on it."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["padding"] = document["truncation"] = None
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
