"""Settings of the modules after the transformer, each as its class of sentence-transformers saves it.

What the modules compute is in builder/checkpoints/pooling.py and in the tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.checkpoints.json_files import read_json
from builder.checkpoints.sentence_transformers.chain import ModuleFolder
from builder.common.errors import CheckpointError

POOLING_KEYS = {  # in the order in which sentence-transformers concatenates them
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_NAMES = {"mean_sqrt_len_tokens": "mean_sqrt_len"}  # a newer config.json's names that differ from ours
CAUSAL_LOGITS = "causal_logits"  # what LogitScore reads
SPLADE_ACTIVATIONS = ("relu", "log1p_relu")
EMBEDDING = "sentence_embedding"  # the features of one vector a text


@dataclass(frozen=True)
class Pooling:
    """Token features to one vector; several modes are concatenated.

    `include_prompt`: if False, the tokens of a prompt do not count, and neither does a special token before them.
    """

    modes: tuple[str, ...]
    include_prompt: bool = True


@dataclass(frozen=True)
class WeightedLayers:
    """Weighted mean of a token's vectors after all layers from `start` on (0: the embeddings), weights in `folder`."""

    folder: Path
    start: int


@dataclass(frozen=True)
class Dense:
    """Linear layer and activation over the embedding, with weights in `folder`."""

    folder: Path


@dataclass(frozen=True)
class LayerNorm:
    """Layer normalisation of the embedding, with weights in `folder`."""

    folder: Path


@dataclass(frozen=True)
class Normalize:
    """Scale the embedding to length 1."""


@dataclass(frozen=True)
class SpladePooling:
    """Logits of a masked language model to weights: log(1 + relu), maximum over the tokens.

    `activation`: "relu", or "log1p_relu", which takes the logarithm twice.
    """

    activation: str = "relu"


@dataclass(frozen=True)
class LogitScore:
    """Score of a causal language model: a token's logit after the text, minus that of `false` if there is one."""

    true: int
    false: int | None


@dataclass(frozen=True)
class MultiVectorMask:
    """Choice of the tokens that have a vector; sentence-transformers reads its settings."""


Module = MultiVectorMask | WeightedLayers | Pooling | Dense | LayerNorm | Normalize | SpladePooling | LogitScore


def read_module(module: ModuleFolder, source: str, features: str = EMBEDDING) -> Module:
    """Return the settings of one module after the transformer, which reads and writes `features`.

    Raises CheckpointError, which names `source`.
    """
    return READERS[module.name](module.folder, source, features)


def _pooling(folder: Path, source: str, features: str) -> Pooling:
    config = read_json(folder / "config.json")
    if mode := config.get("pooling_mode"):
        modes = tuple(POOLING_NAMES.get(name, name) for name in ([mode] if isinstance(mode, str) else mode))
    else:
        modes = tuple(mode for key, mode in POOLING_KEYS.items() if config.get(key)) or ("mean",)
    include_prompt = bool(config.get("include_prompt", True))
    if not include_prompt and modes != ("mean",):
        raise CheckpointError(
            f"{source} pools {' and '.join(modes)} without its prompt (include_prompt: false), which is supported for "
            "the mean alone"
        )
    return Pooling(modes, include_prompt)


def _weighted_layers(folder: Path, source: str, features: str) -> WeightedLayers:
    start = read_json(folder / "config.json").get("layer_start", 4)
    if not isinstance(start, int) or start < 0:
        raise CheckpointError(f"{source} weighs layers from {start!r} on (layer_start); expected a number from 0 on")
    return WeightedLayers(folder, start)


def _dense(folder: Path, source: str, features: str) -> Dense:
    config = read_json(folder / "config.json")
    if config.get("use_residual") or _reads_parts(config, features):
        raise CheckpointError(f"{folder}: a Dense with a residual, or not of the whole embedding, is not supported")
    return Dense(folder)


def _normalize(folder: Path, source: str, features: str) -> Normalize:
    config = read_json(folder / "config.json", {})
    if names := _reads_parts(config, features):
        raise CheckpointError(f"{source} normalises {names[0]}, which is not supported")
    return Normalize()


def _reads_parts(config: Mapping[str, Any], features: str) -> list[Any]:
    """Return what, other than `features`, a module reads or writes."""
    names = [config.get(key) or features for key in ("module_input_name", "module_output_name")]
    return [name for name in names if name != features]


def _splade_pooling(folder: Path, source: str, features: str) -> SpladePooling:
    """Refuse a pooling of logits other than the largest weight of each token, over all."""
    merged = {"pooling_strategy": "max", "activation_function": "relu", **read_json(folder / "config.json")}
    for name, known in (("pooling_strategy", ("max",)), ("activation_function", SPLADE_ACTIVATIONS)):
        if merged[name] not in known:
            raise CheckpointError(
                f"{source} has a {name} {merged[name]!r} of its SpladePooling; known is {' or '.join(known)}"
            )
    return SpladePooling(merged["activation_function"])


def _logit_score(folder: Path, source: str, features: str) -> LogitScore:
    config = read_json(folder / "config.json")
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(true, int) or not isinstance(false, int | None):
        raise CheckpointError(f"{folder}: true_token_id {true!r} and false_token_id {false!r} are not ids of tokens")
    if config.get("module_input_name", CAUSAL_LOGITS) != CAUSAL_LOGITS:
        raise CheckpointError(f"{source} scores {config['module_input_name']}; known is {CAUSAL_LOGITS}")
    return LogitScore(true, false)


READERS: Mapping[str, Callable[[Path, str, str], Module]] = {
    "WeightedLayerPooling": _weighted_layers,
    "Pooling": _pooling,
    "Dense": _dense,
    "LayerNorm": lambda folder, source, features: LayerNorm(folder),
    "MultiVectorMask": lambda folder, source, features: MultiVectorMask(),
    "Normalize": _normalize,
    "SpladePooling": _splade_pooling,
    "LogitScore": _logit_score,
}
