"""Configuration and model of a checkpoint; the model in fp32 with every weight from its files, or without any."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForMultimodalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from builder.checkpoints.checkpoint import CheckpointFiles
from builder.checkpoints.generation_config import FILE, generation_file
from builder.checkpoints.gliner.weights import encoder_weights
from builder.checkpoints.grids import StoredWeights
from builder.checkpoints.json_files import read_json
from builder.checkpoints.mapped import widened
from builder.checkpoints.packed import packed_format, unpacked, without_quantisation
from builder.checkpoints.static_embedding import StaticConfig, StaticModel, load_static
from builder.checkpoints.tasks import Task
from builder.checkpoints.text_part import text_config, text_part, without_missing_libraries
from builder.checkpoints.unloaded import why_not_loaded
from builder.common.errors import BuilderError, CheckpointError, first_line

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")  # by transformers' common names
POSITION_TABLES = ("position_embeddings", "embed_positions", "wpe")
# Encoders of encoder-decoders, for features of a text; sentence-transformers takes the same classes (its
# base/modules/transformer.py, 6.2). The auto class would load models that also need the tokens of an answer.
ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}


def read_configuration(folder: Path, model: str) -> PreTrainedConfig:
    """Return the configuration in `folder`, without the settings with which transformers would load code.

    Raises CheckpointError, which names `model`.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except RecursionError as error:
        raise CheckpointError(
            f"the config.json of {model} is nested too deeply; expected the one that save_pretrained writes"
        ) from error
    except Exception as error:  # transformers raises errors of any type for a broken file
        code = read_json(folder / "config.json", {}).get("auto_map")
        if isinstance(code, dict) and "AutoConfig" in code:
            reason = f"its code ({code['AutoConfig']}) would have to run, and code of a checkpoint is never run"
        else:
            reason = first_line(error)
        raise CheckpointError(f"{model} has no configuration that transformers knows: {reason}") from error
    return check_configuration(config, model)


def check_configuration(config: PreTrainedConfig, model: str) -> PreTrainedConfig:
    """Return `config` without the settings with which transformers would load code.

    Raises CheckpointError, which names `model`, for sizes that no model has.
    """
    for part, name in itertools.product((config, text_config(config)), SIZES):
        try:
            value = getattr(part, name, None)
        except AmbiguousGlobalPerLayerAttributeError:  # each layer has its own
            continue
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise CheckpointError(f"the config.json of {model} says {name} {value!r}; expected a number of at least 1")
    _forget_implementations(config)
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0  # RWKV would divide weights, for fp16, in memory that is read from their file again
    return config


def _forget_implementations(config: PreTrainedConfig) -> None:
    """Let transformers choose how attention and experts are computed, in `config` and those in it.

    A checkpoint's own choice may name a kernel on the Hub, which transformers would download and import
    (integrations/hub_kernels.py, load_and_register_attn_kernel, 5.23), whatever trust_remote_code says.
    """
    config._attn_implementation = config._experts_implementation = None
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            _forget_implementations(value)


def load_model(files: CheckpointFiles) -> tuple[PreTrainedModel, StoredWeights | None]:
    """Load the task's model class in fp32, every weight of it from the checkpoint, and the grids of its matrices.

    A checkpoint without a head, which adapters replace, gets the same random one each time. If the task has use for
    text alone, load the part for text of a model that reads images or audio too. Raises
    CheckpointError, and RepositoryError for a full disk.
    """
    task, config = files.task, files.config
    if isinstance(config, StaticConfig):
        return load_static(config, files.folder), None
    kind, is_part = _model_class(task, config), _is_part(task, config)
    try:
        with without_missing_libraries(config), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # of a head that the checkpoint need not have
            model, info, grids = _loaded(kind, files)
    except BuilderError:
        raise
    except Exception as error:  # transformers raises errors of any type for a broken checkpoint
        why = why_not_loaded(kind, config, error)
        raise CheckpointError(f"the checkpoint does not load for {task.name}: {why}") from error
    missing = sorted(key for key in info["missing_keys"] if not key.startswith(task.unused_weights))
    if files.headless:
        missing = [key for key in missing if key.startswith(f"{model.base_model_prefix}.")]
    if is_part and not missing:
        model = text_part(model)
    mismatched = sorted(str(key) for key in info.get("mismatched_keys", ()))
    if missing or mismatched:
        have = ", ".join(config.architectures or ["unknown"])
        raise CheckpointError(
            f"the checkpoint ({have}) has no head for {task.name}: {len(missing) + len(mismatched)} weights would "
            f"be random, such as {(missing + mismatched)[0]}. Choose a task it was trained for with --task"
        )
    return model.eval(), grids


def _loaded(kind: Any, files: CheckpointFiles) -> tuple[PreTrainedModel, dict[str, Any], StoredWeights | None]:
    """Load the weights of `files` into a model of `kind`, a class or an auto class; return what was missing too."""
    config = files.config
    packed = packed_format(config, files.source)
    if files.gliner is not None:
        own, weights = _on_meta(kind, config).__class__, encoder_weights(files)
        return *own.from_pretrained(None, **_loading(config), state_dict=weights), None
    if packed is None:
        with widened(files.folder, files.weights) as folder:
            return *kind.from_pretrained(folder, **_loading(config), use_safetensors=True), None
    config = without_quantisation(config)
    with unpacked(packed, files.folder, files.weights, _on_meta(kind, config)) as (folder, stored):
        return *kind.from_pretrained(folder, **_loading(config), use_safetensors=True), stored


def model_without_weights(files: CheckpointFiles) -> PreTrainedModel:
    """Return the task's model on the meta device, where its tensors have shapes and no memory."""
    if isinstance(files.config, StaticConfig):
        return _on_meta(StaticModel, files.config)
    kind, config, is_part = _model_class(files.task, files.config), files.config, _is_part(files.task, files.config)
    with without_missing_libraries(config):
        model = _on_meta(kind, without_quantisation(config))
    if is_part:
        model = text_part(model)
    model.set_experts_implementation("batched_mm")  # grouped_mm takes bfloat16 alone on the meta device
    _read_generation_config(model, files.folder)
    return model.eval()


def _model_class(task: Task, config: PreTrainedConfig) -> Any:
    """Return transformers' auto class for the head of `task`, or the class of an encoder alone."""
    if _is_part(task, config):
        return AutoModelForMultimodalLM
    name = ENCODERS.get(config.model_type) if task.head == "feature-extraction" else None
    return task.auto_class() if name is None else getattr(transformers, name)


def _is_part(task: Task, config: PreTrainedConfig) -> bool:
    """Return True if `task` has use for the text part alone of a model that reads more."""
    return task.text_alone and text_config(config) is not None


def _on_meta(kind: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of `kind`, a class or an auto class, whose tensors have shapes and no memory."""
    with torch.device("meta"):
        model: PreTrainedModel = getattr(kind, "from_config", kind)(config)
    return model


def _loading(config: PreTrainedConfig) -> dict[str, Any]:
    return {"config": config, "dtype": torch.float32, "output_loading_info": True}


def _read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Read the generation settings as `from_pretrained` does; old checkpoints have them in their config.json."""
    if model.can_generate():
        file = generation_file(folder)
        named: dict[str, Any] = {} if file == FILE else {"config_file_name": file, "_from_model_config": True}
        model.generation_config = GenerationConfig.from_pretrained(folder, **named)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many tokens the learned position tables of `model` hold; None if it has none.

    A table with a padding index starts counting after it, as RoBERTa's does. Some are not torch's own embedding:
    I-BERT's is a class that can be quantised.
    """
    limits = [
        int(module.weight.shape[0]) - (0 if module.padding_idx is None else int(module.padding_idx) + 1)  # type: ignore[arg-type]
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in POSITION_TABLES and hasattr(module, "weight") and hasattr(module, "padding_idx")
    ]
    declared: Any = getattr(model.config, "max_position_embeddings", None)
    if declared and declared > 0:  # further rows of a table may have another meaning
        limits.append(int(declared))
    return min(limits, default=None)


def is_causal(model: PreTrainedModel) -> bool:
    """Return True if a token of `model` sees only those before it."""
    return any(getattr(module, "is_causal", False) for module in model.modules())
