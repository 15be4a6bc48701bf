"""Options of requests, and the errors of invalid ones."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from builder.runtime.fields import InputError
from builder.runtime.generation.checking import read_options
from builder.runtime.generation.options import COMMON, LANGUAGES, PROMPT, SOURCE, RequestOptions

GREEDY = {"temperature": 0.0}
FIELDS = [field.name for field in (*COMMON, *PROMPT, *SOURCE, *LANGUAGES)]


def read(parameters: dict[str, Any] | None = None, **tensors: Any) -> RequestOptions:
    arrays = {}
    for name, value in tensors.items():
        values = value if isinstance(value, list) else [value]
        kind = np.object_ if isinstance(values[0], (str, bytes)) else None
        encoded = [v.encode() if isinstance(v, str) else v for v in values]
        arrays[name] = np.array(encoded, dtype=kind)
    return read_options(arrays, parameters or {}, GREEDY, FIELDS)


def test_only_the_prompt_is_required() -> None:
    options = read(text_input="Hello")
    assert options == RequestOptions(prompt="Hello", temperature=0.0)
    assert read(text_input="Hello", stop_words=["a", "b"], n=2).stop_words == ("a", "b")
    assert read({"top_k": 3, "stop_words": ["x"]}, text_input="Hello").stop_words == ("x",)


def test_sampling_option_turns_sampling_on() -> None:
    assert read(text_input="Hello", top_p=np.float32(0.9)).temperature == 1.0
    assert read(text_input="Hello", top_p=np.float32(0.9), temperature=np.float32(0)).temperature == 0.0


def test_empty_tensor_is_an_absent_option() -> None:
    assert (
        read_options(
            {"text_input": np.array([b"Hello"], object), "stop_words": np.zeros(0, object)}, {}, GREEDY, FIELDS
        ).stop_words
        == ()
    )


@pytest.mark.parametrize(
    ("tensors", "parameters", "message"),
    [
        ({}, {}, "text_input is missing"),
        ({"text_input": ""}, {}, "text_input is missing or empty"),
        ({"text_input": "a", "messages": '[{"role": "user"}]'}, {}, "are both given"),
        ({"messages": "{not json"}, {}, "messages is not JSON"),
        ({"messages": '{"role": "user"}'}, {}, "messages has the JSON type object; expected array"),
        ({"messages": '["hello"]'}, {}, "must be a JSON list"),
        ({"messages": "[]"}, {}, "must be a JSON list"),
        (
            {"messages": '[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]'},
            {},
            "messages[0] has a part of type image; the model reads text alone",
        ),
        ({"messages": '[{"role": "user", "content": [{"type": "input_audio"}]}]'}, {}, "a part of type input_audio"),
        ({"messages": '[{"role": "user", "content": [{"image": "http://a/b"}]}]'}, {}, "a part of type image"),
        (
            {"messages": '[{"role": "user", "content": [{"type": "text", "text": "a", "video_url": null}]}]'},
            {},
            "a part of type video_url",
        ),
        ({"text_input": b"\xff\xfe"}, {}, "byte 0 is not UTF-8"),
        ({"text_input": "a", "temperature": -1.0}, {}, "temperature is -1.0; expected 0 to 100"),
        ({"text_input": "a", "temperature": float("nan")}, {}, "temperature is nan"),
        ({"text_input": "a", "top_p": 1.5}, {}, "top_p is 1.5; expected 0 to 1"),
        ({"text_input": "a", "n": 99}, {}, "n is 99; expected 1 to 16"),
        ({"text_input": "a", "tools": '[{"type": "function"}]'}, {}, "tools are of a chat; send it in messages"),
        ({"messages": '[{"role": "user"}]', "tools": "{}"}, {}, "tools has the JSON type object; expected array"),
        ({"messages": '[{"role": "user"}]', "tools": "[1]"}, {}, "tools must be a JSON list such as"),
        ({"text_input": "a", "chat_template_kwargs": '{"a": 1}'}, {}, "chat_template_kwargs is of a chat"),
        ({"text_input": "a", "reasoning_effort": "low"}, {}, "reasoning_effort is of a chat"),
        ({"text_input": "a", "continue_final_message": True}, {}, "continue_final_message is of a chat"),
        (
            {"messages": '[{"role": "user"}]', "chat_template_kwargs": "[1]"},
            {},
            "has the JSON type array; expected object",
        ),
        ({"messages": '[{"role": "user"}]', "chat_template_kwargs": "{" * 20000}, {}, "expected at most 16384"),
        ({"text_input": "a", "guide": "[1]"}, {}, "guide has the JSON type array; expected object"),
        ({"text_input": "a", "guide": "{}"}, {}, "guide must be a JSON object with one of"),
        ({"text_input": "a", "logit_bias": "[1]"}, {}, "expected object"),
        ({"text_input": "a", "logit_bias": '{"x": 1}'}, {}, "must map token ids to numbers"),
        ({"text_input": "a", "logit_bias": '{"4": NaN}'}, {}, "logit_bias of token 4 is nan; expected -1e+09 to 1e+09"),
        ({"text_input": "a", "logit_bias": '{"4": -Infinity}'}, {}, "logit_bias of token 4 is -inf"),
        ({"text_input": "a", "logit_bias": '{"4": "1e39"}'}, {}, "logit_bias of token 4 is 1e+39"),
        ({"text_input": "a", "logit_bias": "[" * 100_000}, {}, "logit_bias is JSON of too many levels"),
        ({"text_input": "a", "temperature": 1e-38}, {}, "temperature is 1e-38; expected 0, which takes"),
        ({"text_input": "a"}, {"temperature": 1e-9}, "temperature is 1e-09; expected 0, which takes"),
        ({"text_input": "a", "stop_words": ["x", ""]}, {}, "stop_words holds an empty string"),
        ({"text_input": "a"}, {"bad_words": ["", "x"]}, "bad_words holds an empty string"),
        ({"text_input": "a"}, {"stop_words": ["x\ud800"]}, r"stop_words: character 1 is '\ud800', half of one"),
        ({}, {"text_input": "\ud83d"}, r"text_input: character 0 is '\ud83d', half of one; send both"),
        ({"text_input": "a"}, {"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"text_input": "a"}, {"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"text_input": "a"}, {"top_k": -(10**30)}, "top_k is -1000000000000000000000000000000; expected 0"),
        ({"text_input": "a", "timeout_ms": -1}, {}, "timeout_ms is -1; expected 0 to 2147483648"),
        ({"text_input": "a", "repetition_penalty": 0.0}, {}, "repetition_penalty is 0.0; expected 0.01 to 100"),
        ({"text_input": "a"}, {"random_seed": -2}, "random_seed is -2; expected -1 to 9223372036854775807"),
        ({"text_input": "a"}, {"priority": 10**30}, "priority is 1000000000000000000000000000000; expected"),
        ({"text_input": "a"}, {"num_beams": 2, "length_penalty": 90.0}, "length_penalty is 90.0; expected -50 to 50"),
        ({"text_input": ["a", "b"]}, {}, "text_input has 2 values; expected one"),
        ({"text_input": "a"}, {"best_of": 3}, "'best_of' is not an option of this model; it has text_input"),
        ({"text_input": "a"}, {"max_tokens": "many"}, "max_tokens is 'many'; expected INT32"),
        ({"text_input": "a"}, {"max_tokens": True}, "max_tokens is True; expected INT32"),
    ],
)
def test_invalid_requests_are_refused_with_the_reason(
    tensors: dict[str, Any], parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(parameters, **tensors)


def test_checkpoints_number_of_answers_is_limited() -> None:
    def n(defaults: dict[str, Any], **parameters: Any) -> int:
        tensors = {"text_input": np.array([b"Hello"], object)}
        return read_options(tensors, parameters, {"n": 4, **defaults}, FIELDS).n

    assert n({"temperature": 1.0}) == 4
    assert n({"temperature": 1.0}, temperature=0.0) == 1
    assert n({"temperature": 0.0, "num_beams": 4}, num_beams=2) == 2
    assert n({"temperature": 1.0}, n=3) == 3
