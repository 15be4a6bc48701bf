"""Token features to one embedding: the modules of a sentence-transformers folder that come after its transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from builder.checkpoints.json_files import read_json
from builder.checkpoints.sentence_transformers.modules import (
    POOLING_KEYS,
    Dense,
    LayerNorm,
    Module,
    Normalize,
    WeightedLayers,
)
from builder.common.errors import CheckpointError, first_line

ACTIVATIONS = {"Tanh": torch.nn.Tanh, "Identity": torch.nn.Identity, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU}


class TokenStates(torch.nn.Module):
    """Vectors of tokens (batch, sequence, size) of a model: of its last layer or, with `layers`, a mean of several."""

    def __init__(self, layers: WeightedLayers | None, model: PreTrainedModel) -> None:
        super().__init__()
        self.start, self.weights = 0, None
        if layers is not None:
            self.start, weights = layers.start, _weights(layers.folder).get("layer_weights", torch.zeros(0))
            count = int(model.config.num_hidden_layers) + 1 - layers.start
            if not getattr(model.config, "output_hidden_states", False):
                raise CheckpointError(
                    f"{layers.folder.name} needs all layers, which config.json turns off: sentence-transformers would "
                    "leave it out. Set output_hidden_states to true there if it was trained so, or remove the module"
                )
            if weights.shape != (count,):
                raise CheckpointError(
                    f"{layers.folder.name} has {tuple(weights.shape)} layer_weights for {count} layers from "
                    f"{layers.start} on"
                )
            self.weights = weights.to(torch.float32) / weights.to(torch.float32).sum()

    def forward(self, model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if self.weights is None:
            return model(**tensors).last_hidden_state
        layers = model(**tensors, output_hidden_states=True).hidden_states[self.start :]
        return sum(weight * layer for weight, layer in zip(self.weights.tolist(), layers, strict=True))


class UnitLength(torch.nn.Module):
    """Scale embeddings (batch, size) to length 1."""

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(embedding, dim=-1)


class Pooler(torch.nn.Module):
    """Module from token features (batch, sequence, size) and their mask (batch, sequence) to embeddings (batch, size').

    Pooling as in sentence-transformers' Pooling module; several modes are concatenated. `after`: the modules that the
    embedding passes then, in order. `skipped`: tokens that are not pooled.
    """

    def __init__(
        self,
        modes: tuple[str, ...],
        after: Sequence[Module] = (),
        dimensions: int | None = None,
        skipped: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        unknown = set(modes) - set(POOLING_KEYS.values())
        if unknown:
            raise CheckpointError(
                f"pooling {min(unknown)!r} is not known; known are {', '.join(POOLING_KEYS.values())}"
            )
        self.modes, self.skipped = modes, skipped
        self.after = torch.nn.Sequential(*(layer for module in after for layer in _layers(module)))
        self.dimensions = dimensions

    @property
    def normalizes(self) -> bool:
        """True if embeddings leave with length 1, before only their first dimensions are kept."""
        return len(self.after) > 0 and isinstance(self.after[-1], UnitLength)

    def linear(self) -> torch.nn.Sequential:
        """Return the linear layers after the mean, which give the same if each token passes them before it.

        Raises CheckpointError if there is another pooling, or a layer that does not.
        """
        *others, last = [torch.nn.Identity(), *self.after]
        layers = [*others, *([] if isinstance(last, UnitLength) else [last])]
        wrong = next((one for one in layers if not isinstance(one, torch.nn.Linear | torch.nn.Identity)), None)
        if self.modes != ("mean",) or wrong is not None:
            pooling = f"the pooling {' and '.join(self.modes)}"
            found = pooling if wrong is None else f"a {type(wrong).__name__} after it"
            raise CheckpointError(
                "the front pools tokens (--late-chunking, include_prompt: false) by the mean alone, with Dense layers "
                f"without activation and Normalize after it; this checkpoint has {found}"
            )
        return torch.nn.Sequential(*layers)

    def pooled(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of the tokens that are pooled, (batch, sequence), given all."""
        for token in self.skipped:
            attention_mask = attention_mask * (input_ids != token)
        return attention_mask

    def forward(self, features: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).to(features.dtype)
        embedding = self.after(torch.cat([self._pool(mode, features, mask) for mode in self.modes], dim=-1))
        return embedding if self.dimensions is None else embedding[:, : self.dimensions]

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


def _layers(module: Module) -> list[torch.nn.Module]:
    """Return what `module` computes on embeddings (batch, size). Raises CheckpointError for weights that do not fit."""
    if isinstance(module, Dense):
        return _dense(module.folder)
    if isinstance(module, LayerNorm):
        return [_layer_norm(module.folder)]
    return [UnitLength()] if isinstance(module, Normalize) else []


def _dense(folder: Path) -> list[torch.nn.Module]:
    """Return the linear layer and activation of a Dense module."""
    config = read_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{folder}: activation {activation} is not known; known are {', '.join(ACTIVATIONS)}")
    weights = _weights(folder)
    try:
        linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
        linear.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    except (KeyError, TypeError, RuntimeError) as error:
        raise _unfit(folder, "Dense", error) from error
    return [linear, ACTIVATIONS[activation]()]


def _layer_norm(folder: Path) -> torch.nn.Module:
    """Return the normalisation of a LayerNorm module, whose config.json gives its `dimension` (6.2)."""
    weights = _weights(folder)
    try:
        norm = torch.nn.LayerNorm(read_json(folder / "config.json")["dimension"])
        norm.load_state_dict({key.removeprefix("norm."): value for key, value in weights.items()})
    except (KeyError, TypeError, RuntimeError) as error:
        raise _unfit(folder, "LayerNorm", error) from error
    return norm


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} has no model.safetensors; convert its weights to safetensors")
    try:
        return load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise _unfit(folder, "module", error) from error


def _unfit(folder: Path, name: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder}: its configuration and its weights do not make a {name}: {first_line(error)[:200]}"
    )
