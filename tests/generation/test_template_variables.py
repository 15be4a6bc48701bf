"""What a request adds to a chat template: its variables, an effort of reasoning, an answer that was begun."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from builder.runtime.contract import Chat
from builder.runtime.fields import InputError
from builder.runtime.generation.chat import ChatTemplate
from builder.runtime.generation.options import Options
from builder.runtime.generation.prompts import DecoderPrompts
from tests.checkpoints import make_tokenizer

QWEN3 = (  # how Qwen3's begins an answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EFFORT = "{{ reasoning_effort | default('medium') }}{{ messages[0].content }}"  # as gpt-oss's
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " A cat is  "}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("bpe", type_ids=False)


@pytest.mark.parametrize("added", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_variables_of_a_request_reach_the_template(added: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Regression: Qwen3's thinking could not be turned off."""
    wanted = tokenizer.apply_chat_template(
        MESSAGES, chat_template=QWEN3, tokenize=False, add_generation_prompt=True, **added
    )
    chat = ChatTemplate(QWEN3, {})
    assert chat(MESSAGES, added=chat.variables(added)) == wanted
    assert wanted.endswith("</think>\n\n") is (added.get("enable_thinking") is False)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "eos_token", "raise_exception", "other"]
)
def test_a_variable_that_is_not_for_requests_is_refused(name: str) -> None:
    template = f"{{{{ {name} }}}}" if name != "other" else QWEN3
    with pytest.raises(InputError, match=f"chat_template_kwargs has '{name}'"):
        ChatTemplate(template, {"eos_token": "</s>"}).variables({name: 1})


def test_an_effort_means_what_the_template_reads() -> None:
    assert ChatTemplate(EFFORT, {}).variables({}, "high") == {"reasoning_effort": "high"}
    qwen = ChatTemplate(QWEN3, {})
    assert [qwen.variables({}, effort) for effort in ("none", "low")] == [
        {"enable_thinking": False},
        {"enable_thinking": True},
    ]
    assert qwen.variables({"enable_thinking": False}, "high") == {"enable_thinking": False}, "said in so many words"
    with pytest.raises(InputError, match="reasoning_effort is 'huge'"):
        qwen.variables({}, "huge")
    with pytest.raises(InputError, match="reasoning_effort is not something"):
        ChatTemplate("{{ messages[0].content }}", {}).variables({}, "low")


@pytest.mark.parametrize("template", [QWEN3, QWEN3.replace(" | trim", "")])
@pytest.mark.parametrize("content", ["A cat is", " A cat is  ", "", [{"type": "text", "text": "A cat"}]])
def test_an_answer_that_was_begun_goes_on(template: str, content: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    if isinstance(content, list):
        template = template.replace("m.content", "m.content[0].text if m.content is not string else m.content")
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    wanted = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    assert ChatTemplate(template, {})(messages, continues=True) == wanted
    assert "<|im_end|>" not in wanted[-12:]


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}]])
def test_an_answer_without_text_cannot_go_on(content: Any) -> None:
    with pytest.raises(InputError, match="continue_final_message needs text"):
        ChatTemplate(QWEN3, {})([{"role": "assistant", "content": content}], continues=True)


def test_a_template_that_leaves_the_last_message_out_is_refused() -> None:
    with pytest.raises(InputError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}", {})(MESSAGES, continues=True)


def test_prompts_are_rendered_as_the_request_says(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = DecoderPrompts(512, Chat(QWEN3), tokenizer.backend_tokenizer)
    quick = Options(messages=MESSAGES[:1], chat_template_kwargs={"enable_thinking": False})
    assert prompts(quick).text.endswith("<think>\n\n</think>\n\n")
    assert prompts(Options(messages=MESSAGES[:1], reasoning_effort="none")).text == prompts(quick).text
    assert prompts(Options(messages=MESSAGES, continue_final_message=True)).text.endswith("A cat is")
