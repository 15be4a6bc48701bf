"""The tool parser is recognised by the calls that the chat template renders."""

from __future__ import annotations

import pytest

from builder.checkpoints.chat_template import tool_parser
from builder.runtime.contract import Chat

BEGIN = "{% if tools %}{{ tools | tojson }} <tool_call>{}</tool_call> [TOOL_CALLS]{% endif %}{% for m in messages %}"
END = "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SAID = "{% if not m.tool_calls %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
TEMPLATES = {
    "hermes": "<tool_call>\n{{ f | tojson }}\n</tool_call>",
    "llama3_json": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "mistral": '[TOOL_CALLS] [{{ (f | tojson)[:-1] }}, "id": "{{ c.id }}"}]',
    "pythonic": "[{{ f.name }}(place={{ f.arguments.place | tojson }})]",
}
VARIANTS = {
    "<|python_tag|>" + TEMPLATES["llama3_json"]: "llama3_json",
    "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}": "mistral",
    "<|python_start|>" + TEMPLATES["pythonic"] + "<|python_end|>": "pythonic",
    "<|tool_call|>[{{ f | tojson }}]<|/tool_call|>": None,
    "<function={{ f.name }}><parameter=place>{{ f.arguments.place }}</parameter></function>": None,
    "{{ raise_exception('no tools') }}": None,
    "": None,
}


def chat(call: str, think: str = "") -> Chat:
    return Chat(f"{BEGIN}<{{{{ m.role }}}}>{think}{SAID}{call}{{% endfor %}}{END}")


@pytest.mark.parametrize(("name", "call"), TEMPLATES.items())
def test_tool_parser_recognises_each_notation_in_the_template(name: str, call: str) -> None:
    assert tool_parser(chat(call)) == name
    thinks = "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    assert tool_parser(chat(call, thinks)) == name


@pytest.mark.parametrize(("call", "name"), VARIANTS.items())
def test_tool_parser_recognises_variants_and_no_unknown_notation(call: str, name: str | None) -> None:
    assert tool_parser(chat(call)) == name


def test_template_without_tools_has_no_tool_parser() -> None:
    assert tool_parser(Chat("{% for m in messages %}{{ m.content }}{% endfor %}")) is None
    assert tool_parser(Chat("{% endif %}")) is None
