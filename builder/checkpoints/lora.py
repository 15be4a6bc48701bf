"""LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

Everything of an adapter that the graph cannot express is refused by its name in that configuration.
Source: peft 0.21, tuners/lora/config.py, tuners/lora/layer.py and utils/save_and_load.py. Knows files and matrices.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from builder.checkpoints.fetch import fetch, refuse_damaged, source_name
from builder.checkpoints.json_files import read_json
from builder.checkpoints.linear_layers import NO_LAYERS, LinearLayer, linear_layers
from builder.checkpoints.untrusted import refuse_files
from builder.common.errors import CheckpointError
from builder.common.hashing import sha256_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # of PEFT's names, before a layer's own
KEY = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight")
# Fields that are read here, or change nothing of an adapter that is trained. `init_lora_weights` and `bias` have values
# that do: PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the model's own matrices as well.
READ = ("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "base_model_name_or_path")
OF_HEADS = "modules_to_save"  # read where the model has a head that adapters may replace
LABELS = ("id2label", "problem_type")  # of a config.json beside the adapter: PEFT itself writes none
WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "target_modules", "exclude_modules",
    "lora_dropout", "fan_in_fan_out", "layers_to_transform", "layers_pattern", "megatron_core", "runtime_config",
    "eva_config", "qalora_group_size",
)  # fmt: skip
HARMLESS = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal")}


@dataclass(frozen=True)
class LoraLayer:
    """Change of one layer: `scale` * B @ A, with A (rank, inputs) and B (outputs, rank) in float32."""

    a: np.ndarray
    b: np.ndarray
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """Adapter: its `layers` by name, and where it is from. `base`: the model that it was trained on, as PEFT noted.

    `head`: parameters of its own head, by name: (outputs, inputs) and (outputs,). `labels`: settings of a configuration
    that name them.
    """

    source: str
    revision: str | None
    sha256: str
    base: str | None
    layers: Mapping[str, LoraLayer]
    head: Mapping[str, np.ndarray]
    labels: Mapping[str, Any]

    @property
    def rank(self) -> int:
        """Largest rank of a layer."""
        return max(len(layer.a) for layer in self.layers.values())


def read_lora(
    source: str,
    layers: Mapping[str, LinearLayer],
    max_rank: int,
    unread: tuple[str, ...] = (),
    heads: Mapping[str, LinearLayer] = NO_LAYERS,
) -> LoraAdapter:
    """Read the adapter in a folder or of a Hub id, for a model in which adapters of `max_rank` may change `layers`.

    Layers whose names begin with one of `unread` change no answer and are left out. It may replace the layers `heads`,
    the last one with at most as many outputs.
    Raises CheckpointError for an adapter that the graph cannot express.
    """
    folder, revision = fetch(source, None, weights=True)
    refuse_files(folder, source)
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{source} has no {missing[0]}; expected an adapter as PEFT's save_pretrained writes it")
    refuse_damaged([folder / WEIGHTS], source)
    config = _read_config(folder / CONFIG, source, (*READ, OF_HEADS) if heads else READ)
    matrices = {name: tensor.float().numpy() for name, tensor in load_file(folder / WEIGHTS).items()}
    parameters = [f"{name}.{kind}" for name in heads for kind in ("weight", "bias")]
    head = {name: matrices.pop(key) for name in parameters if (key := f"{PREFIX}{name}") in matrices}
    _refuse_head(source, head, heads)
    names = [name for name in _layer_names(matrices, source) if not name.startswith(unread)]
    if not names:
        raise CheckpointError(f"{source} changes {' and '.join(unread)} alone, which no answer of this task reads")
    read = {}
    for name in names:
        a, b = (matrices[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
        _refuse_misfit(source, name, a, b, layers, max_rank)
        read[name] = LoraLayer(a, b, _scale(source, name, len(a), config))
    labels = _read_labels(folder / "config.json") if heads else {}
    base = config.get("base_model_name_or_path")
    return LoraAdapter(source_name(source, revision), revision, sha256_of(folder / WEIGHTS), base, read, head, labels)


@contextmanager
def merged(model: PreTrainedModel, adapter: LoraAdapter) -> Iterator[None]:
    """Add the adapter to the matrices of `model` for the block, as PEFT's `merge_adapter` does."""
    layers, before = linear_layers(model), {}
    own = {name: torch.nn.Parameter(torch.from_numpy(values)) for name, values in adapter.head.items()}
    with torch.no_grad(), _replaced(model, own):
        for name, layer in adapter.layers.items():
            weight = model.get_submodule(name).weight
            assert isinstance(weight, torch.nn.Parameter)
            before[name] = weight.detach().clone()
            change = torch.from_numpy(layer.b @ layer.a) * layer.scale
            weight.copy_(weight + (change.T if layers[name].transposed else change))
        try:
            yield
        finally:
            for name, values in before.items():
                model.get_submodule(name).weight.copy_(values)


@contextmanager
def _replaced(model: PreTrainedModel, parameters: Mapping[str, torch.nn.Parameter]) -> Iterator[None]:
    """Use `parameters`, which may have other shapes, instead of those of these names for the block."""
    places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in parameters}
    before = {name: getattr(*place) for name, place in places.items()}
    try:
        for name, place in places.items():
            setattr(*place, parameters[name])
        yield
    finally:
        for name, place in places.items():
            setattr(*place, before[name])


def _read_config(path: Path, source: str, read: Sequence[str]) -> dict[str, Any]:
    """Return the configuration, of which the fields `read` are used.

    Raises CheckpointError for another field with an effect that the graph does not have.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"the {CONFIG} of {source} is not JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise CheckpointError(f"the {CONFIG} of {source} has the peft_type {kind!r}; expected 'LORA'")
    for field, value in config.items():
        if field in HARMLESS:
            is_usable = value in HARMLESS[field]
        else:
            is_usable = field in read or field in WITHOUT_EFFECT or not value
        if not is_usable:
            raise CheckpointError(
                f"{source} has {field}={json.dumps(value)[:60]} in its {CONFIG}, which is not served here; merge the "
                "adapter into its model instead: PeftModel.from_pretrained(...).merge_and_unload()"
            )
    return config


def _refuse_head(source: str, head: Mapping[str, np.ndarray], heads: Mapping[str, LinearLayer]) -> None:
    """Raise CheckpointError unless the parameters `head` are finite and fit the layers `heads`."""
    for name, values in head.items():
        layer, kind = name.rpartition(".")[::2]
        own, is_last = heads[layer], layer == list(heads)[-1]
        outputs = values.shape[0] if values.ndim else 0
        if is_last and outputs > own.outputs:
            raise CheckpointError(
                f"{source} has {outputs} labels, and the model was built for at most {own.outputs}: build it with "
                f"--adapter-labels {outputs}"
            )
        expected = (outputs if is_last else own.outputs, *([own.inputs] if kind == "weight" else []))
        if not outputs or values.shape != expected:
            raise CheckpointError(
                f"{source} has {name} of shape {values.shape}, and the model needs {expected}: it is for another model"
            )
        if not np.isfinite(values).all():
            raise CheckpointError(f"{source} has numbers in {name} that are not finite: it is damaged")


def _read_labels(path: Path) -> dict[str, Any]:
    """Return the settings LABELS of the configuration `path`, which may be absent. Raises CheckpointError."""
    found = {name: value for name, value in read_json(path, {}).items() if name in LABELS}
    names = found.get("id2label", {})
    if not isinstance(names, dict) or not all(key.isdecimal() for key in names):
        raise CheckpointError(f"{path} has the id2label {json.dumps(names)[:60]}; expected names by number")
    return found


def _layer_names(matrices: Mapping[str, np.ndarray], source: str) -> list[str]:
    """Return the layers that have both matrices. Raises CheckpointError for weights that are not LoRA matrices."""
    found: dict[str, set[str]] = {}
    for name in sorted(matrices):
        match = KEY.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{source} has the weight {name}; expected only {PREFIX}LAYER.lora_A.weight and .lora_B.weight: "
                "embeddings, and whole layers (modules_to_save) other than a classifier's head, are not served as "
                "adapters"
            )
        found.setdefault(match[1], set()).add(match[2])
    incomplete = [name for name, parts in found.items() if parts != {"A", "B"}]
    if incomplete or not found:
        raise CheckpointError(f"{source} has one of two matrices of {incomplete[0]}" if found else f"{source} is empty")
    return list(found)


def _scale(source: str, name: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return the factor of the change of the layer `name`. Raises CheckpointError unless `config` is of that layer."""
    try:
        alpha = _setting(config, "lora_alpha", "alpha_pattern", name)
        expected = _setting(config, "r", "rank_pattern", name)
    except (KeyError, TypeError, ValueError, re.error) as error:
        raise CheckpointError(f"the ranks or alphas in the {CONFIG} of {source} cannot be read: {error!r}") from error
    if expected != rank:
        raise CheckpointError(f"{source} has rank {rank} in {name} and {expected:g} by its {CONFIG}")
    if not math.isfinite(alpha):
        raise CheckpointError(f"the {CONFIG} of {source} has the alpha {alpha} for {name}; expected a finite number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _setting(config: Mapping[str, Any], name: str, patterns: str, layer: str) -> float:
    """Return the setting `name` of a layer: that of the first of `patterns` that its name ends in, if there is one."""
    own = config.get(patterns) or {}
    pattern = next((pattern for pattern in own if re.match(rf"(.*\.)?({pattern})$", layer)), None)
    return float(config[name] if pattern is None else own[pattern])


def _refuse_misfit(
    source: str, name: str, a: np.ndarray, b: np.ndarray, layers: Mapping[str, LinearLayer], max_rank: int
) -> None:
    """Raise CheckpointError unless `a` and `b` are finite matrices that fit the layer `name`."""
    if name not in layers:
        raise CheckpointError(
            f"{source} changes {name}, which adapters of the model cannot; they can change "
            f"{', '.join(sorted({known.rpartition('.')[2] for known in layers}))}"
        )
    own, shapes = layers[name], (a.shape, b.shape)
    rank = a.shape[0] if a.ndim else 0
    if not rank or shapes != ((rank, own.inputs), (own.outputs, rank)):
        raise CheckpointError(
            f"{source} has matrices {shapes[0]} and {shapes[1]} of {name}; a model with {own.inputs} inputs and "
            f"{own.outputs} outputs there needs (rank, {own.inputs}) and ({own.outputs}, rank): it is for another model"
        )
    if rank > max_rank:
        raise CheckpointError(
            f"{source} has rank {rank} in {name}, and the model was built for at most {max_rank}: build it with "
            f"--adapter-rank {rank}"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{source} has numbers in {name} that are not finite: it is damaged")
