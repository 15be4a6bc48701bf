"""Read the config.json of a checkpoint as transformers does, without the settings that would make it load code."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from builder.common.errors import CheckpointError, first_line

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")  # by transformers' common names


def read_configuration(folder: Path, model: str) -> PreTrainedConfig:
    """Return the configuration in `folder`. Raises CheckpointError, which names `model`."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except RecursionError as error:
        raise CheckpointError(
            f"the config.json of {model} is nested too deeply; expected the one that save_pretrained writes"
        ) from error
    except Exception as error:  # transformers raises errors of any type for a broken file
        raise CheckpointError(f"{model} has no configuration that transformers knows: {first_line(error)}") from error
    for name in SIZES:
        value = getattr(config, name, None)
        if value is not None and not (isinstance(value, int) and value >= 1):
            raise CheckpointError(f"the config.json of {model} says {name} {value!r}; expected a number of at least 1")
    _forget_implementations(config)
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
