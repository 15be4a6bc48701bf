"""Text that continues a prompt or answers a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoModelForMultimodalLM, PreTrainedConfig

from builder.checkpoints.tasks.base import Task, model_class_names
from builder.checkpoints.text_part import text_config
from builder.common.samples import TEXTS
from builder.runtime.fields import Field
from builder.runtime.generation.options import COMMON, OUTPUTS, PROMPT, PROMPT_OUTPUTS


class TextGeneration(Task):
    name = "text-generation"
    family = "decoder"
    head = "text-generation"
    unused_weights = ()
    longest = 2048
    metric = "next-token agreement"
    threshold = 0.95
    text_alone = True
    samples = tuple({"text_input": text} for text in TEXTS)

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        if text_config(config) is None:
            return super().claims(config, saved_by)
        return any(name in model_class_names(AutoModelForMultimodalLM).values() for name in config.architectures or [])

    def fields(self, parameters: Mapping[str, Any]) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        return (*COMMON, *PROMPT), (*OUTPUTS, *PROMPT_OUTPUTS)


TASK = TextGeneration()
