"""Token features to one embedding: the modules of a sentence-transformers folder that come after its transformer."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from builder.checkpoints.sentence_transformers import POOLING_KEYS, read_json
from builder.common.errors import CheckpointError, first_line

ACTIVATIONS = {"Tanh": torch.nn.Tanh, "Identity": torch.nn.Identity, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU}


class Pooler(torch.nn.Module):
    """Module from token features (batch, sequence, size) and their mask (batch, sequence) to embeddings (batch, size').

    Pooling as in sentence-transformers' Pooling module; several modes are concatenated.
    """

    def __init__(
        self,
        modes: tuple[str, ...],
        dense: tuple[Path, ...] = (),
        normalize: bool = False,
        dimensions: int | None = None,
    ) -> None:
        super().__init__()
        unknown = set(modes) - set(POOLING_KEYS.values())
        if unknown:
            raise CheckpointError(
                f"pooling {min(unknown)!r} is not known; known are {', '.join(POOLING_KEYS.values())}"
            )
        self.modes = modes
        self.dense = torch.nn.Sequential(*(layer for folder in dense for layer in _dense(folder)))
        self.normalize = normalize
        self.dimensions = dimensions

    def forward(self, features: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).to(features.dtype)
        pooled = self.dense(torch.cat([self._pool(mode, features, mask) for mode in self.modes], dim=-1))
        pooled = torch.nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled
        return pooled if self.dimensions is None else pooled[:, : self.dimensions]

    def _pool(self, mode: str, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mode == "cls":
            return features[:, 0]
        if mode == "max":
            return features.masked_fill(mask == 0, -1e9).max(dim=1).values
        if mode == "lasttoken":
            last = (mask.sum(dim=1, keepdim=True).long() - 1).expand(-1, 1, features.shape[-1])
            return features.gather(1, last).squeeze(1)
        if mode == "weightedmean":
            mask = mask * torch.arange(1, features.shape[1] + 1, dtype=features.dtype)[None, :, None]
        total, tokens = (features * mask).sum(dim=1), mask.sum(dim=1).clamp(min=1e-9)
        return total / (tokens.sqrt() if mode == "mean_sqrt_len" else tokens)


def _dense(folder: Path) -> list[torch.nn.Module]:
    """Return the linear layer and activation of a sentence-transformers Dense module."""
    config = read_json(folder / "config.json")
    places = [config.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")]
    if config.get("use_residual") or places != ["sentence_embedding"] * 2:
        raise CheckpointError(f"{folder}: a Dense with a residual, or not of the whole embedding, is not supported")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{folder}: activation {activation} is not known; known are {', '.join(ACTIVATIONS)}")
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} has no model.safetensors; convert its weights to safetensors")
    try:
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        weights = load_file(folder / "model.safetensors")
        linear.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    except (KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)[:200]
        raise CheckpointError(f"{folder}: its configuration and its weights do not make a Dense: {reason}") from error
    return [linear, ACTIVATIONS[activation]()]
