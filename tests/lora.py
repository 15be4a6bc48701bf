"""LoRA adapters with random matrices, in the files that PEFT's save_pretrained writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from builder.building.adapters import add_adapter
from builder.checkpoints.linear_layers import head_layers, linear_layers
from builder.checkpoints.lora import CONFIG, PREFIX, WEIGHTS
from builder.repository.adapters import remove_adapter
from builder.runtime.adapter_files import FOLDER, adapter_names

CONFIGURATION: dict[str, Any] = {  # what PEFT 0.21 writes for a LoraConfig of the same values
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "org/base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 8,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


@dataclass(frozen=True)
class AdaptedModel:
    """Model `m` of a repository, built with --adapters; its checkpoint; and adapters in PEFT's files, by name."""

    repository: Path
    checkpoint: Path
    saved: dict[str, Path]

    def add(self, name: str, source: str = "") -> None:
        """Add the saved adapter `source`, by default that of the same name."""
        add_adapter(self.repository, "m", name, str(self.saved[source or name]), str(self.checkpoint))

    def remove_all(self) -> None:
        """Remove its adapters."""
        for name in adapter_names(self.repository / "m" / FOLDER):
            remove_adapter(self.repository, "m", name)


def save_lora(
    folder: Path,
    model: PreTrainedModel,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    labels: int = 0,
    **fields: Any,
) -> Path:
    """Save an adapter of `rank` for the layers whose names end in one of `targets`; `fields`: of its configuration.

    `labels`: of its own head, which a classifier's adapter saves as a whole; 0 for no head.
    """
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, layer in linear_layers(model).items():
        if name.rpartition(".")[2] in targets:
            own = fields.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
            for part, shape in (("A", (own, layer.inputs)), ("B", (layer.outputs, own))):
                weights[f"{PREFIX}{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * size
    heads = head_layers(model) if labels else {}
    for name, layer in heads.items():
        outputs = labels if name == list(heads)[-1] else layer.outputs
        weights[f"{PREFIX}{name}.weight"] = torch.randn((outputs, layer.inputs), generator=generator) * size
        weights[f"{PREFIX}{name}.bias"] = torch.randn(outputs, generator=generator) * size
    if labels:
        fields["modules_to_save"] = ["classifier", "score"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS)
    write_configuration(folder, r=rank, target_modules=list(targets), **fields)
    return folder


def write_configuration(folder: Path, **fields: Any) -> None:
    (folder / CONFIG).write_text(json.dumps({**CONFIGURATION, **fields}))
