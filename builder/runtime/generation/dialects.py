"""Translate requests written for Triton's vLLM and TensorRT-LLM backends into the options of this model.

Sources: vllm_backend, src/utils/request.py, and vLLM's SamplingParams; TensorRT-LLM, triton_backend/all_models,
inflight_batcher_llm/ensemble/config.pbtxt; and the requests that NVIDIA's OpenAI front sends to either:
server r26.08 (b8040ad), python/openai/openai_frontend/engine/utils/triton.py.
Knows names and values; knows no ranges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..fields import JSON_TYPES, Field, InputError

FLAG, WHOLE, TEXT = "TYPE_BOOL", "TYPE_INT32", "TYPE_STRING"
FOREIGN = (
    Field("sampling_parameters", TEXT, optional=True),
    Field("exclude_input_in_output", FLAG, optional=True),
    Field("return_num_input_tokens", FLAG, optional=True),
    Field("return_num_output_tokens", FLAG, optional=True),
    Field("return_finish_reason", FLAG, optional=True),
    Field("return_logprobs", FLAG, optional=True),
    Field("return_cumulative_logprob", FLAG, optional=True),
    Field("return_log_probs", FLAG, optional=True),
    Field("return_context_logits", FLAG, optional=True),
    Field("return_generation_logits", FLAG, optional=True),
    Field("beam_width", WHOLE, optional=True),
    Field("num_return_sequences", WHOLE, optional=True),
    Field("min_length", WHOLE, optional=True),
    Field("end_id", WHOLE, optional=True),
    Field("pad_id", WHOLE, optional=True),
    Field("seed", "TYPE_UINT64", optional=True),
    Field("guided_decoding_guide_type", TEXT, optional=True),
    Field("guided_decoding_guide", TEXT, optional=True),
)
FOREIGN_OUTPUTS = (
    Field("num_input_tokens", "TYPE_UINT32", (1,)),
    Field("num_output_tokens", "TYPE_UINT32", (-1,)),
    Field("logprobs", TEXT, (-1,)),
)
RENAMED = {
    "beam_width": "num_beams",
    "num_return_sequences": "n",
    "min_length": "min_tokens",
    "stop": "stop_words",
}
NOT_GIVEN = (  # outputs of these backends that this model lacks
    "return_cumulative_logprob",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
)
WITHOUT_MEANING = ("pad_id", "return_finish_reason")  # nothing is padded; the reason is always given
COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
HARMLESS: "Mapping[str, Any]" = {  # values of SamplingParams that change nothing here
    "best_of": 1,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "logprobs": False,
}
GUIDES = {"json": "json_schema", **{name: name for name in ("json_object", "regex", "grammar", "choice")}}
GUIDE_TYPES = {"json": "json_object", "json_schema": "json_schema", "regex": "regex"}  # names in TensorRT-LLM
LARGEST_SEED = 2**63 - 1


def translated(inputs: "Mapping[str, list[Any]]") -> "dict[str, list[Any]]":
    """Return the values of a request by this model's names. Raises InputError for unsupported values.

    This model's own name takes precedence over another backend's name and over `sampling_parameters`.
    """
    known = {name: values for name, values in inputs.items() if name not in _FOREIGN_NAMES and values}
    foreign = {name: values[0] for name, values in inputs.items() if name in _FOREIGN_NAMES and values}
    for name in ("stop_words", "bad_words"):
        if known.get(name) == [""]:  # TensorRT-LLM's value for none
            del known[name]
    sampling = _sampling_parameters(foreign.pop("sampling_parameters", "{}"))
    kind, guide = (foreign.pop(name, None) for name in ("guided_decoding_guide_type", "guided_decoding_guide"))
    if kind is not None or guide is not None:
        sampling["guide"] = _typed_guide(kind, guide)
    for name, value in {**sampling, **foreign}.items():
        for own, values in _translate(name, value).items():
            known.setdefault(own, values)
    return known


def _translate(name: str, value: Any) -> "dict[str, list[Any]]":
    """Return one value by its name here; nothing if it asks for the default behaviour."""
    if name in NOT_GIVEN:
        if value:
            raise InputError(f"{name} asks for what this model does not answer; send logprobs for log-probabilities")
        return {}
    if name in WITHOUT_MEANING:
        return {}
    if name == "exclude_input_in_output":
        return {"echo": [not value]}
    if name in COUNTS:
        return {"count_tokens": [True]} if value else {}
    if name == "end_id":
        return {"stop_token_ids": [value]} if value >= 0 else {}
    if name == "seed":
        return {"random_seed": [value & LARGEST_SEED]}
    return {RENAMED.get(name, name): value if isinstance(value, list) else [value]}


def _sampling_parameters(text: str) -> "dict[str, Any]":
    """Return vLLM's SamplingParams, sent as JSON, by this model's names; raise InputError for other JSON."""
    try:
        parameters = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"sampling_parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise InputError(f"sampling_parameters has the JSON type {JSON_TYPES[type(parameters)]}; expected object")
    options: "dict[str, Any]" = {}
    for name, value in parameters.items():
        if value is None or (name in HARMLESS and value is HARMLESS[name]):
            continue
        if name in ("guided_decoding", "structured_outputs"):
            options["guide"] = _guide(name, value)
        elif name == "logit_bias":
            options[name] = json.dumps(value)
        elif name == "early_stopping":
            options[name] = str(value).lower()
        elif name == "seed" and not (isinstance(value, int) and value >= 0):
            raise InputError(f"seed of sampling_parameters is {value!r}; expected a whole number of at least 0")
        else:
            options[name] = 0 if name == "top_k" and value == -1 else value
    return options


def _guide(name: str, value: Any) -> str:
    """Return vLLM's guide as this model's. JSON within JSON, as NVIDIA's front sends it, is also read."""
    try:
        document = json.loads(value) if isinstance(value, str) else value
        guides = {key: guide for key, guide in document.items() if key in GUIDES and guide not in (None, False)}
        ((kind, guide),) = guides.items()
        if kind == "json" and isinstance(guide, str):
            guide = json.loads(guide)
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{name} does not name exactly one of {', '.join(GUIDES)}") from error
    return json.dumps({GUIDES[kind]: guide})


def _typed_guide(kind: "str | None", guide: "str | None") -> str:
    """Return TensorRT-LLM's guide as this model's. Its grammars have another notation, and are refused."""
    if kind not in GUIDE_TYPES or (guide is None and kind != "json"):
        raise InputError(
            f"guided_decoding_guide_type is {kind!r}; expected one of {', '.join(GUIDE_TYPES)}, the last two with "
            "a guided_decoding_guide"
        )
    try:
        return json.dumps({GUIDE_TYPES[kind]: _read_guide(kind, guide)})
    except (ValueError, RecursionError) as error:
        raise InputError(f"guided_decoding_guide is not JSON: {error}") from error


def _read_guide(kind: str, guide: "str | None") -> Any:
    if guide is None or kind == "json":
        return True
    return json.loads(guide) if kind == "json_schema" else guide


_FOREIGN_NAMES = frozenset(field.name for field in FOREIGN)
