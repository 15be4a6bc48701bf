"""sentence-transformers folders: modules.json says how token features become one embedding.

Knows that format's files; the modules become part of the exported graph.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from builder.errors import CheckpointError

POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {"Tanh": torch.nn.Tanh, "Identity": torch.nn.Identity, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU}


@dataclass(frozen=True)
class SentenceModules:
    """What a sentence-transformers folder adds to its transformer."""

    transformer: Path
    pooling: tuple[str, ...]
    dense: tuple[Path, ...]
    normalize: bool
    max_length: int | None
    lower_case: bool
    prompts: dict[str, str]
    default_prompt: str | None


def read_modules(root: Path) -> SentenceModules | None:
    """Read modules.json of `root`; None where there is none.

    Raises CheckpointError for a module this builder does not have: leaving one out would change answers.
    """
    if not (root / "modules.json").is_file():
        return None
    pooling: tuple[str, ...] = ()
    dense: list[Path] = []
    normalize = False
    transformer = root
    for module in _json(root / "modules.json"):
        kind = module["type"].rsplit(".", 1)[-1]
        folder = root / module["path"]
        if kind == "Transformer":
            transformer = folder
        elif kind == "Pooling":
            pooling = _pooling(_json(folder / "config.json"), root)
        elif kind == "Dense" and not normalize:
            dense.append(folder)
        elif kind == "Normalize":
            normalize = True
        else:
            raise CheckpointError(
                f"{root.name} has a module {module['type']} at place {module['idx']}; known, in this order, are "
                "Transformer, Pooling, Dense and Normalize"
            )
    if not pooling:
        raise CheckpointError(f"{root.name} has no Pooling module; give the transformer's own folder and --pooling")
    settings = _json(transformer / "sentence_bert_config.json", {})
    prompts = _json(root / "config_sentence_transformers.json", {})
    return SentenceModules(
        transformer=transformer,
        pooling=pooling,
        dense=tuple(dense),
        normalize=normalize,
        max_length=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case", False)),
        prompts={name: text for name, text in (prompts.get("prompts") or {}).items() if text},
        default_prompt=prompts.get("default_prompt_name"),
    )


def _pooling(config: dict[str, Any], root: Path) -> tuple[str, ...]:
    if not config.get("include_prompt", True):
        raise CheckpointError(f"{root.name} pools without its prompt (include_prompt: false), which is not supported")
    if mode := config.get("pooling_mode"):
        return (mode,) if isinstance(mode, str) else tuple(mode)
    return tuple(mode for key, mode in POOLING_KEYS.items() if config.get(key))


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


class Pooler(torch.nn.Module):
    """Token features (batch, sequence, size) and their mask (batch, sequence) to embeddings (batch, size').

    Pooling as in sentence-transformers' Pooling module; several modes are concatenated.
    """

    def __init__(self, modes: tuple[str, ...], dense: tuple[Path, ...] = (), normalize: bool = False) -> None:
        super().__init__()
        unknown = set(modes) - set(POOLING_KEYS.values())
        if unknown:
            raise CheckpointError(
                f"pooling {min(unknown)!r} is not known; known are {', '.join(POOLING_KEYS.values())}"
            )
        self.modes = modes
        self.dense = torch.nn.Sequential(*(layer for folder in dense for layer in _dense(folder)))
        self.normalize = normalize

    def forward(self, features: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.unsqueeze(-1).to(features.dtype)
        pooled = self.dense(torch.cat([self._pool(mode, features, mask) for mode in self.modes], dim=-1))
        return torch.nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled

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
    """The linear layer and activation of a sentence-transformers Dense module."""
    config = _json(folder / "config.json")
    activation = config["activation_function"].rsplit(".", 1)[-1]
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{folder}: activation {activation} is not known; known are {', '.join(ACTIVATIONS)}")
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder} has no model.safetensors; convert its weights to safetensors")
    linear = torch.nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    weights = load_file(folder / "model.safetensors")
    linear.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    return [linear, ACTIVATIONS[activation]()]
