"""Streamed text: whole characters, whole words, nothing of a stop string, and all of it in the end."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from builder.runtime.generation.text import BROKEN, Detokenizer, StopStrings
from builder.runtime.panics import TokenizerError
from tests.checkpoints import VOCABULARY, make_tokenizer


def byte_tokenizer() -> Tokenizer:
    """One token a byte: each character beyond ASCII takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain words", "naïve café 😀 done", "日本語のテキスト", "👩‍👩‍👧 family", "é" * 20])
def test_characters_come_whole(text: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert all(BROKEN not in piece for piece in pieces)
    assert len(pieces) == len(text.encode())


def test_bytes_that_never_become_a_character_show_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a😀").ids[:-1]
    detokenizer = Detokenizer(tokenizer, [])
    assert "".join(detokenizer.push(token) for token in ids) == "a"
    assert BROKEN in detokenizer.flush()


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_the_pieces_are_the_text_that_follows_the_prompt(kind: str) -> None:
    tokenizer = make_tokenizer(kind, type_ids=False).backend_tokenizer
    generator = np.random.default_rng(0)
    for length in (1, 4, 20, 60):
        prompt = tokenizer.encode("The museum in Oslo", add_special_tokens=False).ids
        tokens = generator.integers(5, tokenizer.get_vocab_size(), length).tolist()
        detokenizer = Detokenizer(tokenizer, prompt)
        text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *tokens])
    assert tokenizer.get_vocab_size() <= VOCABULARY


def test_special_tokens_are_text_where_that_is_asked_for() -> None:
    """As the marks of a call of a tool are, in some checkpoints."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[CALL]"])
    ids = tokenizer.encode("a[CALL]é").ids
    for skip_special, text in ((True, "aé"), (False, "a[CALL]é")):
        detokenizer = Detokenizer(tokenizer, [], skip_special)
        assert "".join(map(detokenizer.push, ids)) == text


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_stop_string_never_leaks(size: int) -> None:
    text = "one two thr ENDLESS three END four"
    for words in (("END ",), ("three", "END "), ("thr EX", "four"), ("zzz",), ("ENDL", "ND four")):
        stops = StopStrings(words)
        shown = ""
        for start in range(0, len(text), size):
            shown += stops.push(text[start : start + size])
            places = [text.find(word) for word in words if word in text]
            if places:
                assert len(shown) <= min(places)
            if stops.found:
                break
        shown += stops.flush()
        first = min((text.find(word) for word in words if word in text), default=len(text))
        assert shown == text[:first]
        assert stops.found == (first < len(text))


def test_a_panic_of_the_tokeniser_is_an_error() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "": 1}, []))
    tokenizer.decoder = decoders.Strip("a", 3, 3)
    with pytest.raises(TokenizerError, match="fails here: index out of bounds"):
        Detokenizer(tokenizer, []).push(1)
