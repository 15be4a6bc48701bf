"""Tool calls that a model writes unasked, in each notation, split at every position, and the text around them."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.checkpoints.tool_calls import PARSERS, Part, ToolCall
from builder.serving.gateway.generation.tool_calling import ForcedCallParser

OSLO = ToolCall("weather", '{"city": "Oslo"}')
ROME = ToolCall("time_in", '{"city": "Rome", "hours": [1, -2.5, null, true]}')
BARE = ToolCall("now", "{}")
BRACES = ToolCall("run", json.dumps({"code": 'if (a) { b("}]") } </tool_call> \\ é'}, ensure_ascii=False))


def as_json(call: ToolCall, key: str) -> str:
    return json.dumps({"name": call.name, key: json.loads(call.arguments)}, ensure_ascii=False)


def hermes(*calls: ToolCall) -> str:
    return "\n".join(f"<tool_call>\n{as_json(call, 'arguments')}\n</tool_call>" for call in calls)


def llama3(*calls: ToolCall) -> str:
    return "; ".join(as_json(call, "parameters") for call in calls)


def mistral(*calls: ToolCall) -> str:
    return f"[TOOL_CALLS] [{', '.join(as_json(call, 'arguments') for call in calls)}]"


def mistral_11(*calls: ToolCall) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)


def pythonic(*calls: ToolCall) -> str:
    written = [
        f"{call.name}({', '.join(f'{k}={v!r}' for k, v in json.loads(call.arguments).items())})" for call in calls
    ]
    return f"[{', '.join(written)}]"


WRITERS = {
    "hermes": (hermes,),
    "llama3_json": (llama3, lambda *calls: f"<|python_tag|>{llama3(*calls)}"),
    "mistral": (mistral, mistral_11),
    "pythonic": (pythonic, lambda *calls: f"<|python_start|>{pythonic(*calls)}<|python_end|>"),
}
SPOKEN = [(name, write) for name, writers in WRITERS.items() for write in writers]


def merged(parts: list[Part]) -> list[Part]:
    """Merge neighbouring texts of `parts` into one."""
    whole: list[Part] = []
    for part in parts:
        if whole and isinstance(part, str) and isinstance(before := whole[-1], str):
            whole[-1] = before + part
        else:
            whole.append(part)
    return whole


def read(name: str, *pieces: str) -> list[Part]:
    parser = PARSERS[name]()
    return merged([*(part for piece in pieces for part in parser.push(piece)), *parser.finish()])


def read_all_ways(name: str, text: str) -> list[Part]:
    """Return the parts of `text`, which must not depend on where it is cut."""
    whole = read(name, text)
    assert read(name, *text) == whole, "a character at a time"
    for position in range(1, len(text)):
        assert read(name, text[:position], text[position:]) == whole, (text[:position], text[position:])
    return whole


@pytest.mark.parametrize(("name", "write"), SPOKEN)
@pytest.mark.parametrize("calls", [(OSLO,), (OSLO, ROME, BARE), (BRACES, OSLO)])
def test_tool_call_parser_reads_one_or_several_calls(name: str, write: Any, calls: tuple[ToolCall, ...]) -> None:
    assert read_all_ways(name, write(*calls)) == list(calls)


@pytest.mark.parametrize(("name", "write"), SPOKEN)
def test_text_around_calls_stays_without_separators(name: str, write: Any) -> None:
    parts = read_all_ways(name, f"Let me see. {write(OSLO)}\n Done: {write(BARE)} \n")
    assert parts == ["Let me see. ", OSLO, "\n Done: ", BARE]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "Nothing to call.",
        'a < b {c} [d](e) [f] {"title": {"x": 1}} [1, 2] ["x"] <tool',
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "a"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call> more',
        '<tool_call>{"name": "a", "arguments": {"x": ',
        '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "a"]</tool_call>',
        '{"name": "a", "parameters": 1}',
        '{"name": "a", "parameters": {}, "arguments": {}}',
        '<|python_tag|>print("x")',
        "[TOOL_CALLS]",
        "[TOOL_CALLS][]",
        "[TOOL_CALLS] [1]",
        '[TOOL_CALLS]two words{"x": 1}',
        "[TOOL_CALLS]a[ARGS]{x}",
        "[TOOL_CALLS]" + "a" * 300,
        "[f(1)]",
        "[f(x=y)]",
        "[f(x={1, 2})]",
        "[f(**x)]",
        "[f(x=1), 2]",
        "[f(x=1)(y=2)]",
        "[f(x='a]",
        "[f(x=1",
        "[f(x=1])",
        "<|python_start|>[f(x=1",
        "<|python_start|>x<|python_end|>",
    ],
)
def test_incomplete_call_is_text(name: str, text: str) -> None:
    assert read_all_ways(name, text) == ([text] if text else [])


def test_call_list_with_other_items_is_text() -> None:
    text = '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b"}]'
    assert read_all_ways("mistral", text) == [text]


def test_tool_call_parser_reads_every_notation() -> None:
    assert read_all_ways("hermes", '<tool_call>{"name": "now", "arguments": {}}') == [BARE], "without its end"
    assert read_all_ways("llama3_json", '{"name": "now", "arguments": {}}') == [BARE]
    assert read_all_ways("llama3_json", '{"type": "function", "name": "now", "parameters": {}}') == [BARE]
    assert read_all_ways("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}') == [BARE]
    assert read_all_ways("mistral", "[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}") == [BARE]
    assert read_all_ways("mistral", "[TOOL_CALLS]now{}") == [BARE]
    calls = read_all_ways("pythonic", r"[f(a=true, b=null, c=-1, d={'e': [False]}, f='\d')]")
    assert calls == [ToolCall("f", json.dumps({"a": True, "b": None, "c": -1, "d": {"e": [False]}, "f": "\\d"}))]
    assert read_all_ways("hermes", f"<tool_call>no</tool_call>{hermes(OSLO)}") == ["<tool_call>no</tool_call>", OSLO]


def test_text_streams_and_calls_arrive_complete() -> None:
    parser = PARSERS["hermes"]()
    assert parser.push("I will ") == ["I will "]
    assert parser.push("look <to") == ["look "]
    assert parser.push("morrow> ") == ["<tomorrow> "]
    first, second = hermes(OSLO), hermes(BARE)
    assert parser.push(first[:-1]) == []
    assert parser.push(first[-1]) == [OSLO]
    assert parser.push("\n") == []
    assert parser.push(second) == [BARE]
    code = PARSERS["llama3_json"]()
    assert code.push('int main() { puts("') == ['int main() { puts("'], "braces of a program wait for nothing"


@given(st.data())
def test_tool_call_parser_ignores_chunk_boundaries(data: st.DataObject) -> None:
    name, write = data.draw(st.sampled_from(SPOKEN))
    marks = ["{", "}", "[", "]", "(", '"', "\\", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f(x=1)"]
    part = st.sampled_from([write(OSLO), write(BARE), *marks, " ", "\n", "a", ";", ",", "<|python_tag|>"])
    text = "".join(data.draw(st.lists(part, max_size=8)))
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    whole = read(name, text)
    assert read(name, *(text[a:b] for a, b in pairwise(cuts))) == whole
    if not any(isinstance(part, ToolCall) for part in whole):
        assert "".join(map(str, whole)) == text


@pytest.mark.parametrize("name", PARSERS)
def test_tool_call_parser_takes_linear_time(name: str) -> None:
    call = ToolCall("run", json.dumps({"code": "{[( x " * 20_000}))
    text = WRITERS[name][0](call)
    begun = time.thread_time()
    assert read(name, *(text[at : at + 30] for at in range(0, len(text), 30))) == [call]
    assert time.thread_time() - begun < 20


@pytest.mark.parametrize("arguments", ['{"x":1e999}', '{"x" : 1.50, "x":[{"}":"\\u00e9"}]}', "{}", '{"x":-0.0}'])
def test_forced_call_keeps_the_text_of_its_arguments(arguments: str) -> None:
    """Regression: numbers were parsed and written again, and 1e999 became Infinity, which is not JSON."""
    reader = ForcedCallParser()
    assert reader.push(f'{{"name":"a", "arguments":{arguments}}}') == []
    assert reader.finish() == [ToolCall("a", arguments)]


@pytest.mark.parametrize(
    "text", ['{"name":"a","arguments":{"x":Infinity}}', '{"name":"a","arguments":{"x":', "[" * 9999]
)
def test_forced_call_that_is_not_json_is_text(text: str) -> None:
    reader = ForcedCallParser()
    reader.push(text)
    assert reader.finish() == [text]
