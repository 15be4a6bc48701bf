"""Text that continues a prompt or answers a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builder.checkpoints.tasks.base import Task
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
    samples = tuple({"text_input": text} for text in TEXTS)

    def fields(self, parameters: Mapping[str, Any]) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
        return (*COMMON, *PROMPT), (*OUTPUTS, *PROMPT_OUTPUTS)


TASK = TextGeneration()
