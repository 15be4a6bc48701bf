"""Inputs in the format of the vLLM and TensorRT-LLM backends are translated to this model's options."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from builder.runtime.fields import InputError
from builder.runtime.generation.checking import read_options
from builder.runtime.generation.dialects import FOREIGN
from builder.runtime.generation.options import COMMON, PROMPT, RequestOptions

FIELDS = [field.name for field in (*COMMON, *PROMPT)]
KINDS = {"TYPE_UINT64": np.uint64, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32, "TYPE_BOOL": np.bool_}


def read(**tensors: Any) -> RequestOptions:
    """Read tensors of shape [1, n], as TensorRT-LLM's clients send them, in the types of the configuration."""
    kinds = {field.name: KINDS.get(field.data_type, np.object_) for field in (*COMMON, *PROMPT)}
    arrays = {}
    for name, value in tensors.items():
        values = [v.encode() if isinstance(v, str) else v for v in (value if isinstance(value, list) else [value])]
        arrays[name] = np.array([values], kinds[name])
    return read_options(arrays, {}, {"temperature": 0.0}, FIELDS)


def vllm(**sampling: Any) -> RequestOptions:
    parameters = json.dumps(sampling)
    return read(text_input="a", stream=False, exclude_input_in_output=True, sampling_parameters=parameters)


def test_tensorrt_llm_request_is_translated() -> None:
    options = read(
        text_input="a",
        max_tokens=9,
        bad_words="",
        stop_words=["x", "y"],
        end_id=7,
        pad_id=7,
        top_k=1,
        top_p=1.0,
        temperature=1.0,
        length_penalty=1.0,
        repetition_penalty=1.0,
        min_length=2,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=2**64 - 1,
        return_log_probs=False,
        beam_width=1,
        stream=True,
    )
    assert options == RequestOptions(
        prompt="a",
        max_tokens=9,
        stop_words=("x", "y"),
        stop_token_ids=(7,),
        top_k=1,
        min_tokens=2,
        random_seed=2**63 - 1,
        stream=True,
    )
    assert read(text_input="a", beam_width=3, num_return_sequences=2, end_id=-1) == RequestOptions(
        prompt="a", num_beams=3, n=2, temperature=0.0
    )


def test_vllm_request_is_translated() -> None:
    options = vllm(
        n=2,
        best_of=1,
        temperature=0.5,
        top_k=-1,
        seed=3,
        stop="x",
        logit_bias={"4": 1},
        stop_token_ids=[5],
        max_tokens=4,
        logprobs=None,
        use_beam_search=False,
        skip_special_tokens=False,
        early_stopping=False,
    )
    assert options == RequestOptions(
        prompt="a",
        n=2,
        temperature=0.5,
        random_seed=3,
        stop_words=("x",),
        logit_bias={4: 1.0},
        stop_token_ids=(5,),
        max_tokens=4,
        skip_special_tokens=False,
    )
    assert read(text_input="a", exclude_input_in_output=False).echo
    assert read(text_input="a", max_tokens=2, sampling_parameters='{"max_tokens": 9}').max_tokens == 2
    counted = read(text_input="a", return_num_input_tokens=True, return_num_output_tokens=False)
    assert counted == RequestOptions(prompt="a", count_tokens=True, temperature=0.0)


@pytest.mark.parametrize("written", [dict, json.dumps])
def test_vllm_guides_are_translated(written: Any) -> None:
    for document, guide in (
        ({"json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"json": '{"type": "object"}', "regex": None, "backend": None}, {"json_schema": {"type": "object"}}),
        ({"choice": ["a"]}, {"choice": ["a"]}),
        ({"json_object": True}, {"json_object": True}),
    ):
        assert vllm(guided_decoding=written(document)).guide == guide
        assert vllm(structured_outputs=written(document)).guide == guide


def test_openai_frontend_request_for_vllm_is_translated() -> None:
    """Source: server r26.08 (b8040ad), python/openai/openai_frontend/engine/utils/triton.py.

    The function is _create_vllm_generate_request.
    """
    schema = {"type": "object"}
    others = ("regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag", "_backend")
    flags = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "_backend_was_auto")
    guide = {"json": json.dumps(schema), **dict.fromkeys(others), **dict.fromkeys(flags, False)}
    own = {"frequency_penalty": 0, "n": 1, "presence_penalty": 0, "temperature": 0.7, "top_p": 1}
    more = {"stop": ["x"], "seed": 3, "max_tokens": 16, "logprobs": 2, "structured_outputs": json.dumps(guide)}
    options = read(
        text_input="a",
        stream=True,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps({**own, **more}),
        return_logprobs=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert options == RequestOptions(
        prompt="a",
        stream=True,
        temperature=0.7,
        stop_words=("x",),
        random_seed=3,
        max_tokens=16,
        logprobs=2,
        return_logprobs=True,
        guide={"json_schema": schema},
        count_tokens=True,
    )


def test_openai_frontend_request_for_tensorrt_llm_is_translated() -> None:
    """Source: the same file, _create_trtllm_generate_request, used for every backend but vLLM."""
    options = read(
        text_input="a",
        stream=False,
        max_tokens=16,
        stop_words=["x", "y"],
        top_p=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        seed=3,
        temperature=0.7,
        exclude_input_in_output=True,
        guided_decoding_guide_type="json_schema",
        guided_decoding_guide='{"type": "object"}',
        return_num_input_tokens=True,
        return_num_output_tokens=True,
    )
    assert options == RequestOptions(
        prompt="a",
        max_tokens=16,
        stop_words=("x", "y"),
        random_seed=3,
        temperature=float(np.float32(0.7)),
        guide={"json_schema": {"type": "object"}},
        count_tokens=True,
    )


@pytest.mark.parametrize(
    ("tensors", "guide"),
    [
        ({"guided_decoding_guide_type": "json"}, {"json_object": True}),
        ({"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a+"}, {"regex": "a+"}),
    ],
)
def test_tensorrt_llm_guides_are_translated(tensors: dict[str, Any], guide: dict[str, Any]) -> None:
    assert read(text_input="a", **tensors).guide == guide


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"sampling_parameters": "{"}, "sampling_parameters is not JSON"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters has the JSON type array; expected object"),
        ({"sampling_parameters": '{"best_of": 3}'}, "'best_of' is not an option of this model"),
        ({"sampling_parameters": '{"lora_name": "a"}'}, "'lora_name' is not an option of this model"),
        ({"sampling_parameters": '{"temperature": "hot"}'}, "temperature is 'hot'; expected FP32"),
        ({"sampling_parameters": '{"temperature": NaN}'}, "temperature is nan"),
        ({"sampling_parameters": '{"seed": -1}'}, "seed of sampling_parameters is -1"),
        ({"sampling_parameters": '{"stop": [1]}'}, "stop_words is 1; expected STRING"),
        ({"sampling_parameters": '{"guided_decoding": {"json": {}, "regex": "a"}}'}, "exactly one of json"),
        ({"sampling_parameters": '{"guided_decoding": "x"}'}, "exactly one of json"),
        ({"return_log_probs": True}, "return_log_probs asks for what this model does not answer"),
        ({"return_context_logits": True}, "return_context_logits asks for"),
        ({"length_penalty": 0.5, "beam_width": 1}, "length_penalty is of beam search only"),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "x"}, "is 'ebnf_grammar'; expected"),
        ({"guided_decoding_guide_type": "json_schema"}, "with a guided_decoding_guide"),
        ({"guided_decoding_guide": "{}"}, "guided_decoding_guide_type is None"),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"}, "guided_decoding_guide is not"),
        ({"input_ids": [1, 2]}, "text_input and input_ids are both given"),
    ],
)
def test_unsupported_foreign_options_are_refused_by_name(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(text_input="a", **tensors)


def test_model_without_foreign_inputs_refuses_their_names() -> None:
    own = [name for name in FIELDS if name not in {field.name for field in FOREIGN}]
    with pytest.raises(InputError, match="'beam_width' is not an option of this model"):
        read_options({}, {"text_input": "a", "beam_width": 2}, {}, own)
