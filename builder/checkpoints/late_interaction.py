"""Load a late-interaction checkpoint by sentence-transformers' MultiVectorEncoder, over weights loaded already.

The library reads its own format, pylate's and that of Stanford's ColBERT, and is what answers are compared with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from builder.checkpoints.checkpoint import CheckpointFiles
from builder.checkpoints.sentence_transformers.library import loading
from builder.checkpoints.sentence_transformers.modules import Dense
from builder.common.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder


def load_late_interaction(files: CheckpointFiles, model: PreTrainedModel) -> tuple[CheckpointFiles, MultiVectorEncoder]:
    """Return the library's encoder over `model`, and `files` with the encoder's tokenizer and longest text.

    Raises CheckpointError.
    """
    from sentence_transformers import MultiVectorEncoder

    sentence = files.sentence
    assert sentence is not None
    folders = [sentence.root] if not sentence.after and not (sentence.root / "modules.json").is_file() else []
    for folder in (*folders, *(module.folder for module in sentence.of(Dense))):
        if not (folder / "model.safetensors").is_file():
            raise CheckpointError(f"{folder} has no model.safetensors; convert its weights to safetensors")
    try:
        with loading(model):
            encoder = MultiVectorEncoder(
                str(sentence.root), device="cpu", local_files_only=True, trust_remote_code=False
            ).eval()
    except Exception as error:  # the library raises errors of any type for a broken checkpoint
        raise CheckpointError(
            f"sentence-transformers does not load {files.source}: {first_line(error)[:300]}"
        ) from error
    tokenizer: Any = encoder.tokenizer
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise CheckpointError(f"{files.source} has a slow tokenizer; save it as tokenizer.json")
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    longest = max(length or tokenizer.model_max_length for length in text_lengths(encoder).values())
    return replace(files, tokenizer=tokenizer, sentence=replace(sentence, max_length=longest)), encoder


def text_lengths(encoder: MultiVectorEncoder) -> dict[str, int | None]:
    """Return the most tokens of a query and of a document; None for as many as the model reads.

    Expansion of a fixed width is the limit of queries too.
    """
    transformer: Any = encoder[0]
    expansion, query = transformer.query_expansion, transformer.query_length
    if expansion is not None and expansion["strategy"] == "fixed":
        query = expansion["length"]
    return {"query": query, "document": transformer.document_length}
