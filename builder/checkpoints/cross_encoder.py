"""sentence-transformers' CrossEncoder over a checkpoint that is loaded already, the reference of rankings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from builder.checkpoints.checkpoint import Checkpoint

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder


def load_cross_encoder(checkpoint: Checkpoint) -> CrossEncoder:
    """Return the library's CrossEncoder of the checkpoint's folder, with the model of `checkpoint`.

    The library reads the settings, the tokenizer and the template itself. It loads no second model: that would take
    the memory twice, and config.json may name code that transformers would download.
    """
    from sentence_transformers import CrossEncoder  # takes seconds to import
    from sentence_transformers.base.modules import Transformer

    def loaded(self: Any, *arguments: Any, **options: Any) -> Any:
        return checkpoint.model

    folder = checkpoint.folder if checkpoint.sentence is None else checkpoint.sentence.root
    with patch.object(Transformer, "_load_model", loaded):
        return CrossEncoder(str(folder), device="cpu", local_files_only=True, max_length=checkpoint.max_length)
