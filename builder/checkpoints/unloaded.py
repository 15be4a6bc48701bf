"""Why transformers does not load a checkpoint for a task, in words about the model where its configuration tells."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from builder.common.errors import first_line

TOGETHER = "Its weights, its config.json (id2label too) and the task must belong together"


def why_not_loaded(kind: Any, config: PreTrainedConfig, error: Exception) -> str:
    """Return the reason of `error`, which transformers raised as the class or auto class `kind` loaded a checkpoint."""
    if drafts(config):
        return "all of its layers read keys and values of the model that it drafts for: give it to that one as --draft"
    mapping = getattr(kind, "_model_mapping", None)
    if mapping is None:
        return f"{first_line(error)[:300]}. {TOGETHER}"
    if type(config) not in mapping:
        return (
            f"transformers has no class of {config.model_type} for it ({kind.__name__}). Choose a task that it was "
            "trained for with --task"
        )
    expected = mapping[type(config)].config_class
    if not isinstance(config, expected) and not isinstance(getattr(config, "text_config", None), expected):
        return (
            f"{config.model_type} is several models in one, and the one for this task, {expected.model_type}, is not "
            "served without the others"
        )
    return f"{first_line(error)[:300]}. {TOGETHER}"


def drafts(config: PreTrainedConfig) -> bool:
    """Return True if each layer shares the keys and values of another, so that all are those of another model."""
    text = config.get_text_config(decoder=True)
    return 0 < getattr(text, "num_hidden_layers", 0) <= (getattr(text, "num_kv_shared_layers", 0) or 0)
