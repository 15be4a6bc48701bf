"""Define the fields that chats and completions share, and convert them to inputs of the model.

INPUT_NAMES maps OpenAI's names to the model's. A field that is an input of the model under its own name is passed on
unchanged, so that top_k, min_p, ignore_eos and others work as they do with vLLM. Every other field is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.guide import GUIDE_FIELDS, guide_inputs
from builder.serving.gateway.generation.pieces import TokenUsage
from builder.serving.gateway.http_responses import dumps
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody, StrictBody

INPUT_NAMES: Mapping[str, str] = {  # OpenAI's field -> the model's input
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "stop": "stop_words",
    "seed": "random_seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
DOCUMENTS = ("logit_bias", "chat_template_kwargs")  # inputs that take JSON
CLIENT_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS: Mapping[str, Any] = {"best_of": 1, "modalities": ["text"], "suffix": "", "echo": False, "top_logprobs": 0}
ROUTE_FIELDS = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "add_generation_prompt",
}  # handled by a route
COUNT_INPUTS = ("return_num_input_tokens", "return_num_output_tokens")
PERF = "return_perf_metrics"  # timings for usage and metrics
RESERVED_INPUTS = {  # inputs that no field sets under its own name
    "text_input",
    "input_ids",
    "sampling_parameters",
    "messages",
    "stream",
    "logprobs",
    "prompt_logprobs",
    "return_logprobs",
    "echo",
    "guide",
    "tools",
    "timeout_ms",
    *COUNT_INPUTS,
    PERF,
}


class StreamOptions(StrictBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage with every chunk


class GenerationRequest(ExtensibleBody):
    """Fields that chats and completions share; `option_inputs` checks the extra ones one by one."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=16)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def usage_member(body: GenerationRequest, usage: TokenUsage) -> str:
    """Return the usage of a chunk as JSON that follows its other members."""
    if not body.includes_usage:
        return ""
    return f',"usage":{dumps(usage.body)}' if body.has_continuous_usage else ',"usage":null'


def option_inputs(model: ServedModel, body: GenerationRequest) -> dict[str, Any]:
    """Return the inputs for a request's options. Raises ApiError for a field that the model does not support."""
    inputs: dict[str, Any] = {**guide_inputs(model, body), **_count_inputs(model, body)}
    explicit = {name: value for name, value in body if value is not None and value != []}
    handled = {*CLIENT_FIELDS, *GUIDE_FIELDS, *ROUTE_FIELDS.intersection(type(body).model_fields)}  # elsewhere
    for name, value in explicit.items():
        if name in handled or (name in HARMLESS and value == HARMLESS[name]):
            continue
        target = INPUT_NAMES.get(name, name)
        if target not in model.inputs or target in RESERVED_INPUTS:
            raise bad_field(name, f"{model.name} does not support {name}; leave it out")
        inputs[target] = dumps(value) if name in DOCUMENTS else value
    return inputs


def _count_inputs(model: ServedModel, body: GenerationRequest) -> dict[str, bool]:
    """Return the inputs that make every response count its tokens."""
    if not body.has_continuous_usage:
        return {}
    if not set(COUNT_INPUTS) <= set(model.inputs):
        raise bad_field(
            "stream_options", f"{model.name} counts its tokens at the end only; leave continuous_usage_stats out"
        )
    return dict.fromkeys(COUNT_INPUTS, True)
