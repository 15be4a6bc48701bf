"""Options of a request for the chat template: variables, a reasoning effort, a prefilled answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from builder.runtime.contract import Chat, Thinking, dump
from builder.runtime.fields import InputError
from builder.runtime.generation import service as service_module
from builder.runtime.generation.chat import ChatTemplate
from builder.runtime.generation.chat_prompts import ChatPrompts
from builder.runtime.generation.decoder_prompts import DecoderPrompts
from builder.runtime.generation.options import COMMON, PROMPT, RequestOptions
from builder.runtime.generation.service import Service
from tests.generation.executors import SumExecutor
from tests.servings import answered, decoder_serving
from tests.tiny_encoders import make_tokenizer

QWEN3 = (  # Qwen3's beginning of an answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
EFFORT = "{{ reasoning_effort | default('medium') }}{{ messages[0].content }}"  # like gpt-oss's
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " A cat is  "}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("bpe", type_ids=False)


@pytest.mark.parametrize("added", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_template_gets_the_variables_of_a_request(added: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> None:
    """Regression: Qwen3's thinking could not be disabled."""
    wanted = tokenizer.apply_chat_template(
        MESSAGES, chat_template=QWEN3, tokenize=False, add_generation_prompt=True, **added
    )
    chat = ChatTemplate(QWEN3, {})
    assert chat(MESSAGES, added=chat.variables(added)) == wanted
    assert wanted.endswith("</think>\n\n") is (added.get("enable_thinking") is False)


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "eos_token", "raise_exception", "other"]
)
def test_template_variable_that_is_reserved_is_refused(name: str) -> None:
    template = f"{{{{ {name} }}}}" if name != "other" else QWEN3
    with pytest.raises(InputError, match=f"chat_template_kwargs has '{name}'"):
        ChatTemplate(template, {"eos_token": "</s>"}).variables({name: 1})


def test_reasoning_effort_sets_the_templates_variables() -> None:
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
def test_final_message_is_continued(template: str, content: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    if isinstance(content, list):
        template = template.replace("m.content", "m.content[0].text if m.content is not string else m.content")
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    wanted = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    assert ChatTemplate(template, {})(messages, continues=True) == wanted
    assert "<|im_end|>" not in wanted[-12:]


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}]])
def test_final_message_without_text_cannot_be_continued(content: Any) -> None:
    with pytest.raises(InputError, match="continue_final_message needs text"):
        ChatTemplate(QWEN3, {})([{"role": "assistant", "content": content}], continues=True)


def test_template_that_omits_the_last_message_is_refused() -> None:
    with pytest.raises(InputError, match="leaves the last message out"):
        ChatTemplate("{{ messages[0].content }}", {})(MESSAGES, continues=True)


def test_prompt_is_rendered_with_the_requests_variables(tokenizer: PreTrainedTokenizerFast) -> None:
    prompts = ChatPrompts(512, Chat(QWEN3), tokenizer.backend_tokenizer)
    quick = RequestOptions(messages=MESSAGES[:1], chat_template_kwargs={"enable_thinking": False})
    assert prompts(quick).text.endswith("<think>\n\n</think>\n\n")
    assert prompts(RequestOptions(messages=MESSAGES[:1], reasoning_effort="none")).text == prompts(quick).text
    assert prompts(RequestOptions(messages=MESSAGES, continue_final_message=True)).text.endswith("A cat is")


THINKING = Thinking("<think>", "</think>")
R1 = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a><think>\n"
GUIDE = {"json_object": True}


def test_prompt_reports_if_it_ends_in_reasoning(tokenizer: PreTrainedTokenizerFast) -> None:
    asks, begun = MESSAGES[:1], [MESSAGES[0], {"role": "assistant", "content": "<think>\nwell"}]
    talks_of_it = [{"role": "user", "content": "What does <think> mean?"}]

    def ends(template: str, messages: list[dict[str, Any]], **options: Any) -> bool:
        prompts = ChatPrompts(512, Chat(template, thinking=THINKING), tokenizer.backend_tokenizer)
        return prompts(RequestOptions(messages=messages, **options)).thinking

    assert ends(R1, asks)
    assert not ends(QWEN3, asks)
    assert not ends(QWEN3, asks, chat_template_kwargs={"enable_thinking": False})
    assert not ends(QWEN3, talks_of_it)
    assert ends(QWEN3, begun, continue_final_message=True)
    assert not ends(
        QWEN3, [*asks, {"role": "assistant", "content": "<think></think>Well"}], continue_final_message=True
    )
    assert not ChatPrompts(512, Chat(R1), tokenizer.backend_tokenizer)(RequestOptions(messages=asks)).thinking
    assert not DecoderPrompts(512, tokenizer.backend_tokenizer)(RequestOptions(prompt="<think>")).thinking


@pytest.mark.parametrize("template", [QWEN3, R1])
def test_guided_answer_has_no_reasoning(template: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """A guide determines the beginning of an answer."""
    prompts = ChatPrompts(512, Chat(template, thinking=THINKING), tokenizer.backend_tokenizer)
    prompt = prompts(RequestOptions(messages=MESSAGES[:1], guide=GUIDE))
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    assert not prompt.thinking


@pytest.mark.parametrize(("stream", "n"), [(True, 1), (True, 2), (False, 2)])
def test_answers_report_opened_reasoning_once(
    stream: bool, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(models.WordLevel({chr(ord("A") + number): number for number in range(50)}, unk_token="A"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    fields, chat = [field.name for field in (*COMMON, *PROMPT)], Chat(R1, thinking=THINKING)
    serving = decoder_serving(fields=fields, defaults={"temperature": 0.0}, chat=chat)
    (tmp_path / "serving.json").write_text(dump(serving))
    monkeypatch.setattr(service_module, "make_executor", lambda *arguments: SumExecutor(4, 64))
    messages = {"messages": np.array([b'[{"role": "user", "content": "B"}]'], object)}
    service, answers = Service(tmp_path), list[Any]()
    asked = {"n": n, "stream": stream, "max_tokens": 4, "temperature": 1.0}
    service.submit(messages, asked, lambda answer, last: answers.append(answered(answer)))
    service.loop.run_until_idle()
    says = [answer for answer in answers if "thinking" in answer]
    numbers = [int(answer["index"][0]) if "index" in answer else 0 for answer in says]
    assert sorted(numbers) == (list(range(n)) if stream else [0])
