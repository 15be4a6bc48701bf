"""Weights of a GLiNER checkpoint, which has those of its encoder and of the layers after it in one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from builder.checkpoints.checkpoint import CheckpointFiles
from builder.checkpoints.gliner.layers import GlinerHead
from builder.checkpoints.gliner.settings import FILE
from builder.common.errors import CheckpointError

ENCODER = "token_rep_layer.bert_layer.model."  # the prefix of the encoder's weights


def encoder_weights(files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return the weights of the encoder, by transformers' names."""
    return {name.removeprefix(ENCODER): values for name, values in _read(files, of_encoder=True).items()}


def load_head(files: CheckpointFiles) -> GlinerHead:
    """Return the layers after the encoder, with every weight from the checkpoint's files.

    Raises CheckpointError for weights that are missing, left over, or of another shape.
    """
    assert files.gliner is not None
    with torch.device("meta"):  # sizes of a file allocate nothing before its weights are found to have them
        head = GlinerHead(files.gliner, files.config.hidden_size)
    weights = {name: values.float() for name, values in _read(files.weights, of_encoder=False).items()}
    try:
        head.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        raise CheckpointError(
            f"the weights of {files.source} are not those that its {FILE} describes: {lines[0][:300]}"
        ) from error
    return head.eval()


def _read(files: Sequence[Path], of_encoder: bool) -> dict[str, torch.Tensor]:
    weights = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name.startswith(ENCODER) == of_encoder:
                    weights[name] = opened.get_tensor(name)
    return weights
