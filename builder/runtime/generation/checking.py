"""Check a request's tensors, or its JSON parameters, and build its options: types, ranges, contradictions.

Knows numpy arrays; knows no Triton.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..adapter_files import ADAPTER
from ..fields import JSON_TYPES, Field, InputError, Tensors
from .dialects import translated
from .options import (
    CHAT_OPTIONS,
    COMMON,
    COUNT,
    EARLY_STOPPING,
    FLAG,
    GUIDES,
    LANGUAGES,
    MAX_BIAS,
    MAX_KWARGS_LENGTH,
    MIN_TEMPERATURE,
    PROMPT,
    RANGES,
    REAL,
    SOURCE,
    TEXT,
    RequestOptions,
)

MEDIA = ("image", "audio", "video")  # in types and keys of parts of a message that are not text, such as input_audio


def read_options(
    tensors: Tensors, parameters: Mapping[str, Any], defaults: Mapping[str, Any], inputs: "Sequence[str]"
) -> RequestOptions:
    """Check one request: its tensors, then its JSON parameters, over the model's defaults. Raises InputError.

    `inputs`: the names of the fields that this model has.
    """
    known = {f.name: f for f in (*COMMON, *PROMPT, ADAPTER, *SOURCE, *LANGUAGES) if f.name in inputs}
    allowed = {**known, COUNT.name: COUNT}
    requested: "dict[str, Any]" = {}
    for name, array in tensors.items():
        requested[name] = _values(name, array)
    for name, value in parameters.items():
        if name not in known:
            raise InputError(f"{name!r} is not an option of this model; it has {', '.join(known)}")
        requested.setdefault(name, list(value) if isinstance(value, (list, tuple)) else [value])
    for name, values in requested.items():
        _refuse_untyped(known[name], values)
    requested = {name: values for name, values in requested.items() if values}  # an empty tensor: not set
    own = translated(requested)
    options = dict(defaults)
    for name, values in own.items():
        if name not in requested:  # from another backend's name, or from JSON
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
            expected = entry.data_type.replace("TYPE_", "")
            raise InputError(f"{entry.name} is {value!r}; expected {expected}")
        if isinstance(value, str):
            refuse_half_characters(entry.name, value)


def _value(entry: Field, values: "Sequence[Any]") -> Any:
    if entry.dims == (-1,):
        return tuple(values)
    return bool(values[0]) if entry.data_type == FLAG else values[0]


def _checked(options: "dict[str, Any]", requested: "set[str]") -> RequestOptions:
    _read_prompt(options, requested)
    _read_documents(options, requested)
    for name in requested & {"stop_words", "bad_words"}:
        if "" in options[name]:
            raise InputError(f"{name} holds an empty string, which is everywhere; send words of at least one character")
    _fill_in(options, requested)
    for name, (low, high) in RANGES.items():
        value = options.get(name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{name} is {value}; expected {_plain(low)} to {_plain(high)}")
    if 0 < options.get("temperature", 0) < MIN_TEMPERATURE:
        raise InputError(
            f"temperature is {options['temperature']}; expected 0, which takes the most probable token, or at least "
            f"{MIN_TEMPERATURE:g}"
        )
    return _consistent(RequestOptions(**options), requested)


def _read_prompt(options: "dict[str, Any]", requested: "set[str]") -> None:
    """Keep, in place, the only prompt: text, token ids or chat. Raises InputError unless exactly one is given."""
    prompts = [name for name in ("text_input", "input_ids", "messages") if name in requested and options.get(name)]
    if len(prompts) > 1:
        raise InputError(f"{' and '.join(prompts)} are both given; send one of them")
    if "messages" in requested and options.get("messages"):
        options["messages"] = _json("messages", options["messages"], list)
        bad = [m for m in options["messages"] if not isinstance(m, dict) or "role" not in m]
        if bad or not options["messages"]:
            raise InputError('messages must be a JSON list such as [{"role": "user", "content": "..."}]')
        _refuse_media(options["messages"])
    elif not options.get("text_input") and not options.get("input_ids"):
        raise InputError("text_input is missing or empty; send the prompt there, or a chat in messages")
    else:
        options.pop("messages", None)
    options["prompt"] = options.pop("text_input", "")


def _refuse_media(messages: "Sequence[Mapping[str, Any]]") -> None:
    """Raise InputError for a message with an image, sound or film, of which a template would write a placeholder.

    Templates find it by the type of a part or, as Qwen-VL's do, by a key.
    """
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            for kind in (str(part.get("type")), *part) if isinstance(part, dict) else ():
                if any(medium in kind for medium in MEDIA):
                    raise InputError(f"messages[{number}] has a part of type {kind}; the model reads text alone")


def _read_documents(options: "dict[str, Any]", requested: "set[str]") -> None:
    """Parse, in place, the options that are JSON. Raises InputError."""
    if options.get("tools"):
        options["tools"] = _tools(_json("tools", options["tools"], list), chat="messages" in options)
    for name in CHAT_OPTIONS:
        if options.get(name) and "messages" not in options:
            raise InputError(f"{name} is of a chat; send it in messages")
    if "chat_template_kwargs" in options:
        options["chat_template_kwargs"] = _template_kwargs(options["chat_template_kwargs"])
    if "logit_bias" in requested:
        options["logit_bias"] = _bias(_json("logit_bias", options["logit_bias"], dict))
    if options.get("guide"):
        options["guide"] = _guide(_json("guide", options["guide"], dict))


def _fill_in(options: "dict[str, Any]", requested: "set[str]") -> None:
    """Adjust, in place, options that the request leaves to the checkpoint to those that it sends."""
    if options.get("guide") and "min_tokens" not in requested:
        options["min_tokens"] = 0  # the guide, not the checkpoint, determines when an answer may end
    sampling = requested & {"top_k", "top_p", "min_p", "typical_p", "random_seed"}
    if sampling and "temperature" not in requested and options.get("temperature") == 0:
        options["temperature"] = 1.0  # a sampling option turns sampling on
    if "min_tokens" not in requested and options.get("max_tokens") is not None:
        minimum = options.get("min_tokens", 0)  # the checkpoint's: it must not exceed the request's maximum
        options["min_tokens"] = min(minimum, options["max_tokens"])
    if (sampling or "temperature" in requested) and "num_beams" not in requested:
        options["num_beams"] = 1  # ... and not for beam search, even if it is the checkpoint's default
    if "n" not in requested and options.get("n", 1) > 1:  # the checkpoint's own number of answers is limited as well
        beams = options.get("num_beams", 1)
        options["n"] = min(options["n"], beams) if beams > 1 or options.get("temperature") == 0 else options["n"]


def _plain(limit: float) -> str:
    """Format a limit without an exponent: 2147483648, not 2.14748e+09."""
    return str(int(limit)) if limit == int(limit) else str(limit)


def _bias(entries: "Mapping[str, Any]") -> "dict[int, float]":
    try:
        bias = {int(token): float(value) for token, value in entries.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f'logit_bias must map token ids to numbers, such as {{"42": -5}}: {error}') from error
    for token, value in bias.items():
        if not math.isfinite(value) or abs(value) > MAX_BIAS:
            raise InputError(
                f"logit_bias of token {token} is {value}; expected {-MAX_BIAS:g} to {MAX_BIAS:g} "
                "(-100 is enough to keep a token out)"
            )
    return bias


def _tools(documents: "list[Any]", chat: bool) -> "list[dict[str, Any]] | None":
    if not chat:
        raise InputError("tools are of a chat; send it in messages")
    if not all(isinstance(tool, dict) for tool in documents):
        raise InputError('tools must be a JSON list such as [{"type": "function", "function": {"name": "...", ...}}]')
    return documents or None


def _template_kwargs(text: str) -> "dict[str, Any]":
    if len(text) > MAX_KWARGS_LENGTH:
        raise InputError(f"chat_template_kwargs has {len(text)} characters; expected at most {MAX_KWARGS_LENGTH}")
    kwargs: "dict[str, Any]" = _json("chat_template_kwargs", text or "{}", dict)
    return kwargs


def _guide(requested: "dict[str, Any]") -> "dict[str, Any]":
    kind = next(iter(requested), "")
    value: Any = requested.get(kind)
    if len(requested) != 1 or not isinstance(value, GUIDES.get(kind, ())) or value is False:
        raise InputError(
            'guide must be a JSON object with one of "json_schema": {...}, "json_object": true, "regex": "...", '
            f'"grammar": "..." (Lark), "choice": ["...", ...]; it is {json.dumps(requested)[:100]}'
        )
    texts: "list[Any]" = requested.get("choice", ["any"])
    if not (texts and all(isinstance(text, str) and text for text in texts)):
        raise InputError("choice of guide must be a list of texts, none of them empty")
    return requested


def _consistent(options: RequestOptions, requested: "set[str]") -> RequestOptions:
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
        for name in sorted(requested & {"length_penalty", "early_stopping"}):
            if getattr(options, name) != getattr(RequestOptions, name):
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
    """Raise InputError for half of a surrogate pair, which JSON can spell and tokenisers do not accept."""
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
        raise InputError(f"{name} has the JSON type {JSON_TYPES[type(value)]}; expected {JSON_TYPES[kind]}")
    return value
