"""Weights of a GLiNER checkpoint, which has those of its encoder and of the layers after it in one file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from safetensors import safe_open

from builder.checkpoints.checkpoint import CheckpointFiles
from builder.checkpoints.gliner.layers import GlinerHead
from builder.checkpoints.gliner.settings import GlinerSettings
from builder.common.errors import CheckpointError

Layers = TypeVar("Layers", bound=torch.nn.Module)


def encoder_weights(files: CheckpointFiles) -> dict[str, torch.Tensor]:
    """Return the weights of the encoder, by transformers' names."""
    return _read(files, of_encoder=True)


def load_head(files: CheckpointFiles) -> GlinerHead:
    """Return the layers after the encoder, with every weight from the checkpoint's files. Raises CheckpointError."""
    settings = files.gliner
    assert isinstance(settings, GlinerSettings)
    return load_layers(files, lambda: GlinerHead(settings, files.config.hidden_size))


def load_layers(files: CheckpointFiles, create: Callable[[], Layers]) -> Layers:
    """Return the layers that `create` makes, with every weight from the checkpoint's files.

    Raises CheckpointError for weights that are missing, left over, or of another shape.
    """
    assert files.gliner is not None
    with torch.device("meta"):  # sizes of a file allocate nothing before its weights are found to have them
        layers = create()
    weights = {name: values.float() for name, values in _read(files, of_encoder=False).items()}
    try:
        layers.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(
            f"the weights of {files.source} are not those that its {files.gliner.file} describes: {lines[0][:300]}"
        ) from error
    return layers.eval()


def _read(files: CheckpointFiles, of_encoder: bool) -> dict[str, torch.Tensor]:
    assert files.gliner is not None
    prefix, weights = files.gliner.encoder_prefix, {}
    for file in files.weights:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name.startswith(prefix) == of_encoder:
                    weights[name.removeprefix(prefix)] = opened.get_tensor(name)
    return weights
