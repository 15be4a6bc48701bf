"""Chats through the checkpoint's own template: as transformers renders them, and in a sandbox."""

from __future__ import annotations

import pytest

from builder.runtime.fields import InputError
from builder.runtime.generation.chat import ChatTemplate
from tests.checkpoints import make_tokenizer
from tests.decoders import CHAT

TEMPLATES = {
    "own": CHAT,
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{%- for m in messages %}\n    {%- if loop.first %}\n{{ bos_token }}\n    {%- endif %}\n"
    "    {{- m.content | tojson }}\n    {%- break %}\n{%- endfor %}\n",
}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Grüße, <b>you</b> & 'me' 😀 "}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_as_transformers_renders_it(name: str) -> None:
    tokenizer = make_tokenizer("bpe", type_ids=False)
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    tokenizer.chat_template = TEMPLATES[name]
    tokens = {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(TEMPLATES[name], tokens)(MESSAGES) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_a_template_reaches_nothing(template: str) -> None:
    with pytest.raises(InputError, match="refuses these messages"):
        ChatTemplate(template, {})(MESSAGES)


def test_what_the_template_raises_is_told() -> None:
    with pytest.raises(InputError, match="unknown role tool"):
        ChatTemplate(CHAT, {"bos_token": ""})([{"role": "tool", "content": "x"}])
