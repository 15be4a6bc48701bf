"""Weights of the layers of GLiNER2 after the encoder."""

from __future__ import annotations

from builder.checkpoints.checkpoint import CheckpointFiles
from builder.checkpoints.gliner.weights import load_layers
from builder.checkpoints.gliner2.layers import Gliner2Head
from builder.checkpoints.gliner2.settings import Gliner2Settings


def load_head(files: CheckpointFiles) -> Gliner2Head:
    """Return the layers after the encoder, with every weight from the checkpoint's files. Raises CheckpointError."""
    settings = files.gliner
    assert isinstance(settings, Gliner2Settings)
    return load_layers(files, lambda: Gliner2Head(settings, files.config.hidden_size))
