"""Chat templates: rendered like transformers, in a sandbox."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from builder.checkpoints import chat_probe
from builder.checkpoints import chat_template as chat_templates
from builder.checkpoints.chat_samples import TOOLS
from builder.checkpoints.chat_template import chat_template, part_roles, tool_template
from builder.common import limited
from builder.common.errors import CheckpointError
from builder.repository.check import check
from builder.runtime.contract import FILE, Chat, dump
from builder.runtime.fields import InputError
from builder.runtime.generation import sandbox
from builder.runtime.generation.chat import ChatTemplate
from builder.runtime.generation.chat_prompts import ChatPrompts
from builder.runtime.generation.options import RequestOptions
from tests.decoders import CHAT
from tests.servings import decoder_serving
from tests.tiny_encoders import make_tokenizer

TEMPLATES = {
    "own": CHAT,
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if loop.first %}\n{{ bos_token }}\n    {%- endif %}\n"
    "    {{- m.content | tojson }}\n    {%- break %}\n{%- endfor %}\n",
    "absent": "{% if tools is not none %}tools{% endif %}{% if documents is none %}no documents{% endif %}"
    "{% if tools is defined %} defined{% endif %}",
    "special tokens": "{{ sep_token }}{{ cls_token }}{{ mask_token }}{{ pad_token }}{{ unk_token }}{{ eos_token }}",
    "json": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ tools | tojson(separators=(',', ':')) }}"
    "{{ messages[0].content | tojson(ensure_ascii=true) }}",
    "generation": "{% for m in messages %}{% set x = 1 %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}"
    "{% endgeneration %}{{ x }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ 'content' in m }}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "namespace": "{% set n = namespace(found=false, self=3) %}{% for m in messages %}{% set n.found = m.role %}"
    "{% endfor %}{{ n.found }}{{ n.self }}{{ dict(a=1) }}{{ dict.fromkeys('ab', 0) }}",
    "tools": "{% if tools %}{% for t in tools %}{{ t.function.name }}{{ t | tojson }}{% endfor %}{% endif %}",
}
THOUGHT = {"role": "assistant", "content": None, "thinking": "hm"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Grüße, <b>you</b> & 'me' 😀 "},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    built = make_tokenizer("bpe", type_ids=False)
    built.bos_token, built.eos_token = "[CLS]", "[SEP]"
    return built


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_renders_as_transformers(name: str, tools: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    messages = [*MESSAGES, THOUGHT] if name in ("reasoning", "json") else MESSAGES
    expected = tokenizer.apply_chat_template(messages, chat_template=TEMPLATES[name], **options)
    assert ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map)(messages, tools) == expected


@pytest.fixture
def _probe_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the process with limits, which imports transformers for each template."""
    monkeypatch.setattr(chat_templates, "run_limited", lambda function, request, seconds: chat_probe.render(request))


@pytest.mark.usefixtures("_probe_in_this_process")
@pytest.mark.parametrize("template", TEMPLATES.values())
def test_build_accepts_a_template_that_renders_alike(template: str, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = template
    assert chat_template(tokenizer) == template
    tokenizer.chat_template = {"default": template, "tool_use": "other"}
    assert chat_template(tokenizer) == template


def test_chat_with_tools_uses_the_tool_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Regression: tools were refused, or got the chat template, where transformers uses `tool_use`."""
    tokenizer.chat_template = {"default": TEMPLATES["chatml"], "tool_use": TEMPLATES["tools"]}
    assert chat_template(tokenizer) == TEMPLATES["chatml"]
    chat = Chat(TEMPLATES["chatml"], tokenizer.special_tokens_map, tool_template(tokenizer))
    prompts = ChatPrompts(512, chat, tokenizer.backend_tokenizer)
    offered: list[Any] = list(TOOLS)
    for tools in (None, offered):
        wanted = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        assert prompts(RequestOptions(messages=MESSAGES, tools=tools)).text == wanted
    tokenizer.chat_template = {"default": TEMPLATES["chatml"], "tool_use": "{% endif %}"}
    with pytest.raises(CheckpointError, match="does not compile"):
        chat_template(tokenizer)


READS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PARTS_OF_USERS = READS_PARTS.replace("m.content is string", "m.content is string or m.role != 'user'")
FIRST_OF_SYSTEM = READS_PARTS.replace(
    "{% for m in messages %}",
    "{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}",
)
NEVER = (*TEMPLATES.values(), "{{ messages[0].content }}", "{{ messages[0].content | trim }}", "{{ x() }}")


@pytest.mark.parametrize(
    ("template", "roles"),
    [
        (READS_PARTS, ["system", "user", "assistant", "tool"]),  # as others write, one text after the other
        (PARTS_OF_USERS, ["user"]),
        (FIRST_OF_SYSTEM, ["user", "assistant", "tool"]),  # as Gemma 3's
        (READS_PARTS + "{% if tools and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}",
         ["user", "assistant", "tool"]),
        *((template, []) for template in NEVER),
    ],
)  # fmt: skip
def test_roles_whose_message_parts_a_template_reads_are_found(template: str, roles: list[str]) -> None:
    """Regression: line feeds between parts changed the prompt, and parts that the template does not read broke it."""
    assert part_roles(Chat(template)) == roles
    assert part_roles(Chat(READS_PARTS, tool_template=template)) == roles


def test_message_parts_render_as_transformers(tokenizer: PreTrainedTokenizerFast) -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    for template, whole in ((READS_PARTS, True), (PARTS_OF_USERS, False)):
        rendered = tokenizer.apply_chat_template([message], chat_template=template, tokenize=False)
        assert (rendered == "ab") is whole, "else it is Python's list"
        assert ("tool" in part_roles(Chat(template))) is whole


def test_build_refuses_a_template_that_does_not_compile(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for m in messages %}\n{{ m.content }"
    with pytest.raises(CheckpointError, match="does not compile: line 2"):
        chat_template(tokenizer)


def test_build_refuses_a_template_that_renders_differently(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.chat_template = "{{ messages[0].role }}{{ messages | length }}"
    monkeypatch.setattr(chat_templates, "PROBE", f"{__name__}:render_otherwise")
    chat_templates._answer.cache_clear()
    with pytest.raises(CheckpointError, match=r"a system message differently here \('user1'\) and in .*'system2'"):
        chat_template(tokenizer)
    chat_templates._answer.cache_clear()


def render_otherwise(request: dict[str, Any]) -> dict[str, Any]:
    """Return other prompts for transformers than for the sandbox."""
    answer = chat_probe.render(request)
    return {**answer, "prompts": [("user1", theirs) for _, theirs in answer["prompts"]]}


@pytest.mark.parametrize("template", ["{% if %}", "{{ a }", "{% unknown %}", "(" * 10 + "{{" + "(" * 5000])
def test_uncompilable_template_refuses_only_chats(template: str) -> None:
    """The model still loads and answers texts."""
    chat = ChatTemplate(template, {})
    assert chat.problem.startswith("the model's chat template does not compile: ")
    with pytest.raises(InputError, match=r"does not compile.*send the prompt as text_input"):
        chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ dict.__class__.__mro__ }}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ 1 // 0 }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_template_reaches_no_python_object(template: str) -> None:
    with pytest.raises(InputError, match="refuses these messages"):
        ChatTemplate(template, {})(MESSAGES)


LOOP = "{% for i in range(99999) %}"
HOSTILE = {
    "nested loops": LOOP * 4 + "{% endfor %}" * 4,
    "loops that say nothing": f"{LOOP}{LOOP}{{% set x = i %}}{{% endfor %}}{{% endfor %}}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a loop that calls itself": "{% for x in [[[[[[]]]]]] * 3000 recursive %}{% for i in range(3000) %}{{ loop(x) }}"
    "{% endfor %}{% endfor %}",
    "a string that doubles": "{% set n = namespace(x='aaaa') %}" + LOOP + "{% set n.x = n.x + n.x %}{% endfor %}",
    "a string that doubles otherwise": "{% set n = namespace(x='a') %}"
    + LOOP
    + "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a long string": "{{ 'a' * 4000000000 }}",
    "a long list": "{{ ([0] * 4000000000) | length }}",
    "a large power": "{{ 9 ** 999999999 }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a wide format, by its width": "{{ '%*d' % (999999999, 1) }}",
    "another wide format": "{{ '{:999999999}'.format(1) }}",
    "a wide filter": "{{ 'a' | center(4000000000) }}",
    "a wide method": "{{ 'a'.ljust(4000000000) }}",
    "much text": LOOP + "{{ 'a' * 4000 }}{% endfor %}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=list(HOSTILE))
def test_endless_template_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits apply to time and to memory."""
    monkeypatch.setattr(sandbox, "SECONDS", 0.1)
    chat = ChatTemplate(template, {})
    begun = time.thread_time()
    with pytest.raises(InputError, match="refuses these messages: "):
        chat(MESSAGES)
    assert time.thread_time() - begun < 10


@pytest.mark.parametrize(
    "template",
    [
        HOSTILE["nested loops"],
        HOSTILE["a string that doubles"],
        "{{ ('a' * 10**10) | length }}",
        "{% set n = namespace(x=[]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
        "{{ ('a' * 4000000) | replace('a', 'b' * 4000) | length }}",
        "{% if '_steps' is filter %}a{% else %}{{ ('a' * 10**10) | length }}{% endif %}",
    ],
    ids=["loops", "doubling text", "long text", "doubling lists", "replacement", "for transformers alone"],
)
def test_build_refuses_a_hostile_template(
    template: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: transformers rendered it first, without limits, for 100 s or with 10 GB."""
    monkeypatch.setattr(limited, "MEMORY_LIMIT", 256 << 20)
    monkeypatch.setattr(chat_templates, "SECONDS", 5)
    monkeypatch.setattr(tokenizer, "apply_chat_template", None)  # nothing is rendered in this process
    monkeypatch.setattr(ChatTemplate, "__call__", None)
    tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=r"the model's chat template .*Mend or remove it"):
        chat_template(tokenizer)


def test_long_chat_with_long_numbers_is_rendered() -> None:
    messages = [{"role": "user", "content": "call 5551234567 " * 200}] * 300
    prompt = ChatTemplate(
        TEMPLATES["chatml"].replace("m['content']", "m['content'].strip().replace('call', 'ring')"), {}
    )
    assert len(prompt(messages)) > 900_000


def test_error_of_a_template_reaches_the_client() -> None:
    with pytest.raises(InputError, match="unknown role tool"):
        ChatTemplate(CHAT, {"bos_token": ""})([{"role": "tool", "content": "x"}])


def test_check_compiles_the_template(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m"\nbackend: "python"\n')
    (version / "model.py").write_text("class TritonPythonModel:\n    def execute(self, requests):\n        return []\n")
    for template, problems in ((CHAT, 0), ("{% endfor %}", 1)):
        (version / FILE).write_text(dump(decoder_serving(chat=Chat(template))))
        findings = check(tmp_path)
        assert len(findings) == problems
    assert "does not compile: line 1" in findings[0]
