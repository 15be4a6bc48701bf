"""What one request asks for: its options, their limits, and how they are read from tensors or JSON parameters.

Names are those that clients of Triton's vLLM and TensorRT-LLM backends send. Knows numpy arrays; knows no Triton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..fields import Field, InputError, Tensors
from ..tokens import TOKENIZE, TOKENS
from .dialects import FOREIGN, FOREIGN_OUTPUTS, translated

UNSET_SEED = -1


@dataclass(frozen=True)
class Options:
    """One request, checked. `prompt` is text, or `messages` of a chat, or `input_ids`; token limits are in tokens."""

    prompt: str = ""
    input_ids: "tuple[int, ...]" = ()
    messages: "list[dict[str, Any]] | None" = None
    tools: "list[dict[str, Any]] | None" = None
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
    count_tokens: bool = False  # also by the names of other backends
    return_logprobs: bool = False  # also as vLLM's backend writes them
    return_perf_metrics: bool = False
    tokenize: bool = False
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
PROMPT = (  # of a decoder, which goes on with what it is given
    Field("input_ids", WHOLE, (-1,), optional=True),
    Field("messages", TEXT, optional=True),
    Field("tools", TEXT, optional=True),
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
PROMPT_OUTPUTS = (Field("prompt_logprobs_output", TEXT, (1,)), TOKENS, *FOREIGN_OUTPUTS)
LISTS = tuple(f.name for f in COMMON if f.dims == (-1,))  # each of bounded length
COUNT = Field("count_tokens", FLAG, optional=True)  # as `dialects` calls it
GUIDES: "dict[str, type]" = {"json_schema": dict, "json_object": bool, "regex": str, "grammar": str, "choice": list}
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
COLDEST = 1e-3  # temperature; below it, scores divided by it overflow, and 0 says the same
LARGEST_BIAS = 1e9  # more would overflow, and no score comes near it


def read_options(
    tensors: Tensors, parameters: Mapping[str, Any], defaults: Mapping[str, Any], inputs: "Sequence[str]"
) -> Options:
    """Check one request: its tensors, then its JSON parameters, over the model's defaults. Raises InputError.

    `inputs`: the names of the fields that this model has.
    """
    known = {f.name: f for f in (*COMMON, *PROMPT, *SOURCE, *LANGUAGES) if f.name in inputs}
    allowed = {**known, COUNT.name: COUNT}
    stated: "dict[str, Any]" = {}
    for name, array in tensors.items():
        stated[name] = _values(name, array)
    for name, value in parameters.items():
        if name not in known:
            raise InputError(f"{name!r} is not an option of this model; it has {', '.join(known)}")
        stated.setdefault(name, list(value) if isinstance(value, (list, tuple)) else [value])
    for name, values in stated.items():
        _refuse_untyped(known[name], values)
    stated = {name: values for name, values in stated.items() if values}  # an empty tensor is an option left out
    own = translated(stated)
    options = dict(defaults)
    for name, values in own.items():
        if name not in stated:  # of another backend's name, or of JSON
            if name not in allowed:
                raise InputError(f"{name!r} is not an option of this model; it has {', '.join(known)}")
            _refuse_untyped(allowed[name], values)
        options[name] = _value(allowed[name], values)
    return _checked(options, set(own))


def _values(name: str, array: np.ndarray) -> "list[Any]":
    values = []
    for value in array.ravel().tolist():
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{name}: byte {error.start} is not UTF-8 ({error.reason}); send UTF-8") from error
        values.append(value)
    return values


def _refuse_untyped(entry: Field, values: "Sequence[Any]") -> None:
    """Raise InputError for values of another type, or more of them than the option has."""
    kinds: "dict[str, tuple[type, ...]]" = {TEXT: (str,), FLAG: (bool, int), REAL: (int, float)}
    allowed = kinds.get(entry.data_type, (int,))
    if entry.dims != (-1,) and len(values) > 1:
        raise InputError(f"{entry.name} has {len(values)} values; expected one")
    for value in values:
        if not isinstance(value, allowed) or (isinstance(value, bool) and entry.data_type != FLAG):
            wanted = entry.data_type.replace("TYPE_", "")
            raise InputError(f"{entry.name} is {value!r}; expected {wanted}")
        if isinstance(value, str):
            refuse_half_characters(entry.name, value)


def _value(entry: Field, values: "Sequence[Any]") -> Any:
    if entry.dims == (-1,):
        return tuple(values)
    return bool(values[0]) if entry.data_type == FLAG else values[0]


def _checked(options: "dict[str, Any]", stated: "set[str]") -> Options:
    _read_prompt(options, stated)
    _read_documents(options, stated)
    for name in stated & {"stop_words", "bad_words"}:
        if "" in options[name]:
            raise InputError(f"{name} holds an empty string, which is everywhere; send words of at least one character")
    _fill_in(options, stated)
    for name, (low, high) in RANGES.items():
        value = options.get(name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{name} is {value}; expected {_plain(low)} to {_plain(high)}")
    if 0 < options.get("temperature", 0) < COLDEST:
        raise InputError(
            f"temperature is {options['temperature']}; expected 0, which takes the most probable token, or at least "
            f"{COLDEST:g}"
        )
    return _consistent(Options(**options), stated)


def _read_prompt(options: "dict[str, Any]", stated: "set[str]") -> None:
    """In place: the one of text, token ids and chat that is given. Raises InputError unless there is one."""
    prompts = [name for name in ("text_input", "input_ids", "messages") if name in stated and options.get(name)]
    if len(prompts) > 1:
        raise InputError(f"{' and '.join(prompts)} are both given; send one of them")
    if "messages" in stated and options.get("messages"):
        options["messages"] = _json("messages", options["messages"], list)
        bad = [m for m in options["messages"] if not isinstance(m, dict) or "role" not in m]
        if bad or not options["messages"]:
            raise InputError('messages must be a JSON list such as [{"role": "user", "content": "..."}]')
    elif not options.get("text_input") and not options.get("input_ids"):
        raise InputError("text_input is missing or empty; send the prompt there, or a chat in messages")
    else:
        options.pop("messages", None)
    options["prompt"] = options.pop("text_input", "")


def _read_documents(options: "dict[str, Any]", stated: "set[str]") -> None:
    """In place: options that are JSON, read. Raises InputError."""
    if options.get("tools"):
        options["tools"] = _tools(_json("tools", options["tools"], list), chat="messages" in options)
    if "logit_bias" in stated:
        options["logit_bias"] = _bias(_json("logit_bias", options["logit_bias"], dict))
    if options.get("guide"):
        options["guide"] = _guide(_json("guide", options["guide"], dict))


def _fill_in(options: "dict[str, Any]", stated: "set[str]") -> None:
    """In place: what a stated option means for others, of which only the checkpoint's own value is known."""
    if options.get("guide") and "min_tokens" not in stated:
        options["min_tokens"] = 0  # the guide says when an answer may end, not the checkpoint
    sampling = stated & {"top_k", "top_p", "min_p", "typical_p", "random_seed"}
    if sampling and "temperature" not in stated and options.get("temperature") == 0:
        options["temperature"] = 1.0  # an option of sampling means that sampling is wanted
    if "min_tokens" not in stated and options.get("max_tokens") is not None:
        least = options.get("min_tokens", 0)  # of the checkpoint: it must not exceed the maximum that is asked for
        options["min_tokens"] = min(least, options["max_tokens"])
    if (sampling or "temperature" in stated) and "num_beams" not in stated:
        options["num_beams"] = 1  # ... and beam search is not, even if it is the checkpoint's default
    if "n" not in stated and options.get("n", 1) > 1:  # the checkpoint's own number of answers is limited as well
        beams = options.get("num_beams", 1)
        options["n"] = min(options["n"], beams) if beams > 1 or options.get("temperature") == 0 else options["n"]


def _plain(limit: float) -> str:
    """A limit as people write it: 2147483648, not 2.14748e+09."""
    return str(int(limit)) if limit == int(limit) else str(limit)


def _bias(entries: "Mapping[str, Any]") -> "dict[int, float]":
    try:
        bias = {int(token): float(value) for token, value in entries.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f'logit_bias must map token ids to numbers, such as {{"42": -5}}: {error}') from error
    for token, value in bias.items():
        if not math.isfinite(value) or abs(value) > LARGEST_BIAS:
            raise InputError(
                f"logit_bias of token {token} is {value}; expected {-LARGEST_BIAS:g} to {LARGEST_BIAS:g} "
                "(-100 is enough to keep a token out)"
            )
    return bias


def _tools(documents: "list[Any]", chat: bool) -> "list[dict[str, Any]] | None":
    if not chat:
        raise InputError("tools are of a chat; send it in messages")
    if not all(isinstance(tool, dict) for tool in documents):
        raise InputError('tools must be a JSON list such as [{"type": "function", "function": {"name": "...", ...}}]')
    return documents or None


def _guide(stated: "dict[str, Any]") -> "dict[str, Any]":
    kind = next(iter(stated), "")
    value: Any = stated.get(kind)
    if len(stated) != 1 or not isinstance(value, GUIDES.get(kind, ())) or value is False:
        raise InputError(
            'guide must be a JSON object with one of "json_schema": {...}, "json_object": true, "regex": "...", '
            f'"grammar": "..." (Lark), "choice": ["...", ...]; it is {json.dumps(stated)[:100]}'
        )
    texts: "list[Any]" = stated.get("choice", ["any"])
    if not (texts and all(isinstance(text, str) and text for text in texts)):
        raise InputError("choice of guide must be a list of texts, none of them empty")
    return stated


def _consistent(options: Options, stated: "set[str]") -> Options:
    """Refuse options that contradict one another. Raises InputError."""
    if options.early_stopping not in EARLY_STOPPING:
        raise InputError(f"early_stopping is {options.early_stopping!r}; expected one of {', '.join(EARLY_STOPPING)}")
    if options.guide is not None:
        for name, present in (
            ("num_beams", options.num_beams > 1),
            ("min_tokens", options.min_tokens > 0),
            ("ignore_eos", options.ignore_eos),
        ):
            if present:
                raise InputError(f"guide and {name} contradict each other; send one of them")
    if options.num_beams == 1:
        for name in sorted(stated & {"length_penalty", "early_stopping"}):
            if getattr(options, name) != getattr(Options, name):
                raise InputError(f"{name} is of beam search only; send num_beams of at least 2 with it")
        return options
    contradictions = {
        "a temperature above 0": options.temperature > 0,
        "stop_words": bool(options.stop_words),
        "logprobs": options.logprobs >= 0,
    }
    for name, present in contradictions.items():
        if present:
            raise InputError(f"{name} and num_beams {options.num_beams} contradict each other; send one of them")
    if options.n > options.num_beams:
        raise InputError(f"n is {options.n}, more than num_beams, {options.num_beams}: a search ends with that many")
    return options


def refuse_half_characters(name: str, text: str) -> None:
    """Raise InputError for half of a surrogate pair, which JSON can spell and no tokeniser takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: character {error.start} is {text[error.start]!r}, half of one; send both") from error


def _json(name: str, text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise InputError(f"{name} is JSON of too many levels") from error
    except ValueError as error:
        raise InputError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise InputError(f"{name} holds a JSON {type(value).__name__}; expected a {kind.__name__}")
    return value
