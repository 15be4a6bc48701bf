"""Define the options of a request, the fields that carry them, and their limits.

The names are those of Triton's vLLM and TensorRT-LLM backends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..fields import Field
from ..tokens import TOKENIZE, TOKENS
from .dialects import FOREIGN, FOREIGN_OUTPUTS

UNSET_SEED = -1


@dataclass(frozen=True)
class RequestOptions:
    """Checked options of one request. The prompt is `prompt` (text), `messages` of a chat, or `input_ids`."""

    prompt: str = ""
    input_ids: "tuple[int, ...]" = ()
    messages: "list[dict[str, Any]] | None" = None
    tools: "list[dict[str, Any]] | None" = None
    chat_template_kwargs: "dict[str, Any]" = field(default_factory=dict)
    reasoning_effort: str = ""
    continue_final_message: bool = False
    max_tokens: "int | None" = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    renormalize_logits: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    logit_bias: "dict[int, float]" = field(default_factory=dict)
    bad_words: "tuple[str, ...]" = ()
    stop_words: "tuple[str, ...]" = ()
    stop_token_ids: "tuple[int, ...]" = ()
    random_seed: int = UNSET_SEED
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: str = "false"
    source_language: str = ""
    target_language: str = ""
    logprobs: int = -1
    prompt_logprobs: int = -1
    guide: "dict[str, Any] | None" = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    count_tokens: bool = False  # also under the names of other backends
    return_logprobs: bool = False  # also in the form of vLLM's backend
    return_perf_metrics: bool = False
    tokenize: bool = False
    lora_name: str = ""
    stream: bool = False
    priority: int = 0
    timeout_ms: int = 0


TEXT, WHOLE, REAL, FLAG = "TYPE_STRING", "TYPE_INT32", "TYPE_FP32", "TYPE_BOOL"
COMMON = (
    Field("text_input", TEXT, optional=True),
    Field("max_tokens", WHOLE, optional=True),
    Field("min_tokens", WHOLE, optional=True),
    Field("temperature", REAL, optional=True),
    Field("top_k", WHOLE, optional=True),
    Field("top_p", REAL, optional=True),
    Field("min_p", REAL, optional=True),
    Field("typical_p", REAL, optional=True),
    Field("repetition_penalty", REAL, optional=True),
    Field("presence_penalty", REAL, optional=True),
    Field("frequency_penalty", REAL, optional=True),
    Field("no_repeat_ngram_size", WHOLE, optional=True),
    Field("logit_bias", TEXT, optional=True),
    Field("bad_words", TEXT, (-1,), optional=True),
    Field("stop_words", TEXT, (-1,), optional=True),
    Field("stop_token_ids", WHOLE, (-1,), optional=True),
    Field("random_seed", "TYPE_INT64", optional=True),
    Field("n", WHOLE, optional=True),
    Field("num_beams", WHOLE, optional=True),
    Field("length_penalty", REAL, optional=True),
    Field("early_stopping", TEXT, optional=True),
    Field("logprobs", WHOLE, optional=True),
    Field("ignore_eos", FLAG, optional=True),
    Field("skip_special_tokens", FLAG, optional=True),
    Field("guide", TEXT, optional=True),
    Field("return_perf_metrics", FLAG, optional=True),
    Field("stream", FLAG, optional=True),
    Field("priority", WHOLE, optional=True),
    Field("timeout_ms", WHOLE, optional=True),
)
PROMPT = (  # of a decoder, which continues its input
    Field("input_ids", WHOLE, (-1,), optional=True),
    Field("messages", TEXT, optional=True),
    Field("tools", TEXT, optional=True),
    Field("chat_template_kwargs", TEXT, optional=True),
    Field("reasoning_effort", TEXT, optional=True),
    Field("continue_final_message", FLAG, optional=True),
    Field("echo", FLAG, optional=True),
    Field("prompt_logprobs", WHOLE, optional=True),
    TOKENIZE,
    *FOREIGN,
)
SOURCE = (Field("encoder_no_repeat_ngram_size", WHOLE, optional=True),)
LANGUAGES = (Field("source_language", TEXT, optional=True), Field("target_language", TEXT, optional=True))
OUTPUTS = (
    Field("text_output", TEXT, (-1,)),
    Field("finish_reason", TEXT, (-1,)),
    Field("index", WHOLE, (-1,)),
    Field("prompt_tokens", WHOLE, (1,)),
    Field("completion_tokens", WHOLE, (-1,)),
    Field("cached_tokens", WHOLE, (1,)),
    Field("queue_seconds", REAL, (1,)),
    Field("logprobs_output", TEXT, (-1,)),
    Field("scores", REAL, (-1,)),
)
PROMPT_OUTPUTS = (
    Field("thinking", FLAG, (1,)),
    Field("prompt_logprobs_output", TEXT, (1,)),
    TOKENS,
    *FOREIGN_OUTPUTS,
)
LISTS = tuple(f.name for f in COMMON if f.dims == (-1,))  # each of bounded length
COUNT = Field("count_tokens", FLAG, optional=True)  # the name that dialects.py uses
GUIDES: "dict[str, type]" = {"json_schema": dict, "json_object": bool, "regex": str, "grammar": str, "choice": list}
CHAT_OPTIONS = ("chat_template_kwargs", "reasoning_effort", "continue_final_message")
EARLY_STOPPING = ("true", "false", "never")
RANGES: "dict[str, tuple[float, float]]" = {  # inclusive, of every number that has limits of its own
    "min_tokens": (0, 2**31),
    "temperature": (0.0, 100.0),
    "top_k": (0, 2**31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "random_seed": (-1, 2**63 - 1),
    "no_repeat_ngram_size": (0, 2**31),
    "encoder_no_repeat_ngram_size": (0, 2**31),
    "n": (1, 16),
    "num_beams": (1, 64),
    "length_penalty": (-50.0, 50.0),
    "logprobs": (-1, 20),
    "prompt_logprobs": (-1, 20),
    "priority": (-(2**31), 2**31 - 1),
    "timeout_ms": (0, 2**31),
}
MIN_TEMPERATURE = 1e-3  # temperature; below it, scores divided by it overflow, and 0 has the same effect
MAX_KWARGS_LENGTH = 16 * 1024  # characters of chat_template_kwargs
MAX_BIAS = 1e9  # more would overflow, and no score comes near it
