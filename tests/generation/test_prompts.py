"""Source texts of an encoder: prefixes, language pairs, language tokens, and their errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import CodeLlamaTokenizer, MBart50Tokenizer

from builder.checkpoints.tokenizer import languages, nearest_language, tokenizer_json
from builder.runtime.contract import Chat, EncoderInput
from builder.runtime.fields import InputError
from builder.runtime.generation.chat_prompts import ChatPrompts
from builder.runtime.generation.decoder_prompts import DecoderPrompts
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.prompts import token_ids
from builder.runtime.generation.source_texts import SourceTexts
from builder.runtime.panics import TokenizerError
from tests.seq2seqs import make_multilingual_tokenizer
from tests.tiny_encoders import make_tokenizer

PLAIN = EncoderInput(max_length=30, layers=(), encoder="encoder.onnx", token_budget=64, start=2)


def texts(tokenizer: Any, **source: Any) -> SourceTexts:
    return SourceTexts(replace(PLAIN, **source), Tokenizer.from_str(tokenizer_json(tokenizer)))


def test_source_text_is_tokenised_as_by_transformers() -> None:
    tokenizer = make_tokenizer("bpe", type_ids=False)
    prompt = texts(tokenizer)(RequestOptions(prompt="The train leaves."))
    assert list(prompt.source) == tokenizer("The train leaves.")["input_ids"]
    assert (prompt.tokens, prompt.first, prompt.length) == ((2,), None, len(prompt.source))


def test_source_text_gets_the_prefix_of_its_task_or_languages() -> None:
    tokenizer = make_tokenizer("bpe", type_ids=False)
    prompt = texts(tokenizer, prefix="summarize: ")(RequestOptions(prompt="The train."))
    assert list(prompt.source) == tokenizer("summarize: The train.")["input_ids"]
    pairs = {"en to de": "translate English to German: "}
    both = texts(tokenizer, pairs=pairs, source_language="en", target_language="de")
    assert list(both(RequestOptions(prompt="Hi")).source) == tokenizer("translate English to German: Hi")["input_ids"]
    with pytest.raises(InputError, match="target_language is 'fr'; this model knows en to de"):
        both(RequestOptions(prompt="Hi", target_language="fr"))


def test_language_tokens_equal_the_tokenisers() -> None:
    tokenizer = make_multilingual_tokenizer()
    known = languages(tokenizer)
    assert {"en_XX", "ro_RO", "de_DE"} <= set(known)
    assert len(known) == 52
    reader = texts(tokenizer, languages=known, source_language="en_XX")
    for code in ("en_XX", "de_DE"):
        tokenizer.src_lang = code
        options = RequestOptions(prompt="the train", source_language=code, target_language="ro_RO")
        prompt = reader(options)
        assert list(prompt.source) == tokenizer("the train")["input_ids"]
        assert prompt.first == tokenizer.convert_tokens_to_ids("ro_RO")
    with pytest.raises(InputError, match="target_language is missing; this model knows af_ZA, ar_AR"):
        reader(RequestOptions(prompt="the train"))
    with pytest.raises(InputError, match="source_language is 'xx'; this model knows af_ZA, ar_AR"):
        reader(RequestOptions(prompt="the train", source_language="xx", target_language="ro_RO"))


def test_language_can_have_a_short_name() -> None:
    known = languages(make_multilingual_tokenizer())
    assert nearest_language("de", known) == "de_DE"
    assert nearest_language("de_DE", known) == "de_DE"
    assert nearest_language("xx", known) is None
    assert languages(make_tokenizer("bpe", type_ids=False)) == {}
    assert isinstance(make_multilingual_tokenizer(), MBart50Tokenizer)


def test_source_text_beyond_the_limit_is_refused() -> None:
    with pytest.raises(InputError, match=r"the text has \d+ tokens; this model reads at most 30"):
        texts(make_tokenizer("bpe", type_ids=False))(RequestOptions(prompt="word " * 40))


def test_chat_with_half_characters_or_without_template_is_refused() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(make_tokenizer("bpe", type_ids=False)))
    chat = RequestOptions(messages=[{"role": "user", "content": "a\ud800"}])
    with pytest.raises(InputError, match=r"messages: character 1 is '\\ud800', half of one"):
        ChatPrompts(64, Chat("{{ messages[0].content }}"), tokenizer)(chat)
    broken = ChatPrompts(64, Chat("{% endif %}"), tokenizer)  # and the server starts
    assert broken(RequestOptions(prompt="The train.")).tokens
    with pytest.raises(InputError, match="chat template does not compile: line 1"):
        broken(chat)


def test_tokenisation_does_not_block_other_threads() -> None:
    """The decode loop must run during tokenisation; the tokeniser's own `encode` blocks all threads."""
    tokenizer = Tokenizer.from_str(tokenizer_json(make_tokenizer("bpe", type_ids=False)))
    turns, over = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not over.wait(0.0005):
            turns += 1

    def seen() -> int:
        """Return how often the other thread ran during a long tokenisation."""
        before = turns
        assert len(token_ids(tokenizer, ["The train leaves. " * 20_000], special=False)[0]) > 20_000
        return turns - before

    other = threading.Thread(target=count)
    other.start()
    try:
        assert any(seen() >= 5 for _ in range(100)), "where the system gives it a core"
    finally:
        over.set()
        other.join()


def test_prompt_reports_a_panic_of_the_tokeniser() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(make_tokenizer("bpe", type_ids=False)))
    tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(0)
    with pytest.raises(TokenizerError, match="fails here: chunk size must be non-zero"):
        DecoderPrompts(64, tokenizer)(RequestOptions(prompt="The train."))


def test_tools_need_a_template_that_reads_them() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(make_tokenizer("bpe", type_ids=False)))
    knows = "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}{{ messages[0].content }}"
    options = RequestOptions(messages=[{"role": "user", "content": "hi"}], tools=[{"name": "weather"}])
    assert ChatPrompts(64, Chat(knows), tokenizer)(options).text == "<weather>hi"
    with pytest.raises(InputError, match="chat template does not know tools; describe them in a message"):
        ChatPrompts(64, Chat("{% set tools = 1 %}{{ messages[0].content }}"), tokenizer)(options)


def test_prompt_with_a_fill_mark_is_refused() -> None:
    """Regression: the fill mark, after which Code Llama's tokeniser moves text to the front, was read as text."""
    theirs = CodeLlamaTokenizer()
    tokenizer = Tokenizer.from_str(tokenizer_json(make_tokenizer("bpe", type_ids=False)))
    prompts = ChatPrompts(64, Chat("{{ messages[0].content }}"), tokenizer, theirs.fill_token)
    gap = f"def half(x): {theirs.fill_token} return y"
    for options in (RequestOptions(prompt=gap), RequestOptions(messages=[{"role": "user", "content": gap}])):
        with pytest.raises(InputError, match="the prompt has <FILL_ME>, at which this checkpoint's tokeniser parts"):
            prompts(options)
    assert prompts(RequestOptions(prompt="def half(x): return")).tokens
