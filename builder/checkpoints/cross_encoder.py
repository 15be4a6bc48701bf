"""sentence-transformers' CrossEncoder over a checkpoint that is loaded already, the reference of rankings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.sentence_transformers.library import loading

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder


def load_cross_encoder(checkpoint: Checkpoint) -> CrossEncoder:
    """Return the library's CrossEncoder of the checkpoint's folder, with the model of `checkpoint`.

    The library reads the settings, the tokenizer and the template itself.
    """
    from sentence_transformers import CrossEncoder  # takes seconds to import

    folder = checkpoint.folder if checkpoint.sentence is None else checkpoint.sentence.root
    with loading(checkpoint.model):
        return CrossEncoder(str(folder), device="cpu", local_files_only=True, max_length=checkpoint.max_length)
