"""Parsers of the tool calls that a model writes of its own accord, one file per notation, with vLLM's names.

A build detects the notation of a checkpoint's chat template (builder/checkpoints/chat_template.py) and writes its name
to config.pbtxt; the gateway parses answers with it. Standard library only.
Source of the names: https://docs.vllm.ai/en/latest/features/tool_calling.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from builder.checkpoints.tool_calls.finder import Finder, Part, ToolCall
from builder.checkpoints.tool_calls.hermes import Hermes
from builder.checkpoints.tool_calls.llama3_json import Llama3Json
from builder.checkpoints.tool_calls.mistral import Mistral
from builder.checkpoints.tool_calls.pythonic import Pythonic

__all__ = ["PARSERS", "Finder", "Part", "ToolCall"]

PARSERS: Mapping[str, Callable[[], Finder]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
}
