"""Fields that chats and completions share, and their conversion to inputs of the model.

MEANING maps OpenAI's names to the model's. A field that is an input of the model under its own name is passed on
unchanged, so that top_k, min_p, ignore_eos and others work as they do with vLLM. Every other field is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.guide import GUIDING, guide_inputs
from builder.serving.gateway.generation.pieces import Usage
from builder.serving.gateway.models import Model
from builder.serving.gateway.responses import dumps

MEANING: Mapping[str, str] = {  # OpenAI's field -> the model's input
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
ABOUT_THE_CLIENT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS: Mapping[str, Any] = {"best_of": 1, "modalities": ["text"], "suffix": "", "echo": False, "top_logprobs": 0}
ROUTED = {
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
COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
PERF = "return_perf_metrics"  # timings for usage and metrics
OF_THE_ROUTE = {  # inputs that no field sets under its own name
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
    *COUNTS,
    PERF,
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage with every chunk


class Body(BaseModel):
    """Fields that chats and completions share; `option_inputs` checks the extra ones one by one."""

    model_config = ConfigDict(extra="allow", strict=True)

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
    def usage_wanted(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_of_each(self) -> bool:
        return self.usage_wanted and self.stream_options is not None and self.stream_options.continuous_usage_stats


def usage_member(body: Body, usage: Usage) -> str:
    """Return the usage of a chunk as JSON that follows its other members."""
    if not body.usage_wanted:
        return ""
    return f',"usage":{dumps(usage.body)}' if body.usage_of_each else ',"usage":null'


def option_inputs(model: Model, body: Body) -> dict[str, Any]:
    """Return the inputs for a request's options. Raises ApiError for a field that the model does not support."""
    inputs: dict[str, Any] = {**guide_inputs(model, body), **_counting(model, body)}
    stated = {name: value for name, value in body if value is not None and value != []}
    looked_at = {*ABOUT_THE_CLIENT, *GUIDING, *ROUTED.intersection(type(body).model_fields)}  # elsewhere
    for name, value in stated.items():
        if name in looked_at or (name in HARMLESS and value == HARMLESS[name]):
            continue
        target = MEANING.get(name, name)
        if target not in model.inputs or target in OF_THE_ROUTE:
            raise bad_field(name, f"{name} is not something that {model.name} can heed; leave it out")
        inputs[target] = dumps(value) if name in DOCUMENTS else value
    return inputs


def _counting(model: Model, body: Body) -> dict[str, bool]:
    """Return the inputs that make every response count its tokens."""
    if not body.usage_of_each:
        return {}
    if not set(COUNTS) <= set(model.inputs):
        raise bad_field(
            "stream_options", f"{model.name} counts its tokens at the end; leave continuous_usage_stats out"
        )
    return dict.fromkeys(COUNTS, True)
