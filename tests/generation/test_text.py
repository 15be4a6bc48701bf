"""Streamed text: complete characters and words, no part of a stop string, and all of the text at the end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from builder.checkpoints.tokenizer import cleans_up, refuse_other_text
from builder.common.errors import CheckpointError
from builder.runtime.contract import dump
from builder.runtime.fields import InputError
from builder.runtime.generation import service as service_module
from builder.runtime.generation.block_manager import BlockManager
from builder.runtime.generation.options import COMMON, PROMPT
from builder.runtime.generation.service import Service
from builder.runtime.generation.text import BROKEN, Detokenizer, Spelling, StopStrings
from builder.runtime.panics import TokenizerError
from builder.runtime.spaces import Cleaner
from tests.generation.executors import SumExecutor
from tests.generation.test_prompt_logprobs import answers_of
from tests.servings import decoder_serving
from tests.tiny_encoders import VOCABULARY, make_tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level tokeniser: each character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("text", ["plain words", "naïve café 😀 done", "日本語のテキスト", "👩‍👩‍👧 family", "é" * 20])
def test_detokenizer_emits_whole_characters(text: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert all(BROKEN not in piece for piece in pieces)
    assert len(pieces) == len(text.encode())


def test_detokenizer_shows_incomplete_bytes_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a😀").ids[:-1]
    detokenizer = Detokenizer(tokenizer, [])
    assert "".join(detokenizer.push(token) for token in ids) == "a"
    assert BROKEN in detokenizer.flush()


def test_broken_character_leaves_the_text_before_it() -> None:
    """The decoder of Llama 2's and Gemma's byte tokens replaces each byte of an invalid run by U+FFFD."""
    bytes_of = {f"<0x{byte:02X}>": byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE({**bytes_of, "a": 256}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    half, whole = list("😀".encode()[:2]), list("😀".encode())
    assert tokenizer.decode([*whole, *half]) == BROKEN * 6
    for tokens, wanted in (([*whole, *half], f"😀{BROKEN * 2}"), ([*whole, *half, 256], f"😀{BROKEN * 2}a")):
        detokenizer = Detokenizer(tokenizer, [])
        assert "".join(map(detokenizer.push, tokens)) + detokenizer.flush() == wanted


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_pieces_add_up_to_the_text_after_the_prompt(kind: str) -> None:
    tokenizer = make_tokenizer(kind, type_ids=False).backend_tokenizer
    generator = np.random.default_rng(0)
    for length in (1, 4, 20, 60):
        prompt = tokenizer.encode("The museum in Oslo", add_special_tokens=False).ids
        tokens = generator.integers(5, tokenizer.get_vocab_size(), length).tolist()
        detokenizer = Detokenizer(tokenizer, prompt)
        text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *tokens])
    assert tokenizer.get_vocab_size() <= VOCABULARY


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_logprob_tokens_are_spelled_as_in_the_text(kind: str) -> None:
    """Regression: tokens that begin a word lost their space, and shared a key with those that do not."""
    tokenizer = make_tokenizer(kind, type_ids=False).backend_tokenizer
    prompt = tokenizer.encode("The museum", add_special_tokens=False).ids
    tokens = tokenizer.encode("The museum in Oslo is closed for repairs", add_special_tokens=False).ids[len(prompt) :]
    detokenizer = Detokenizer(tokenizer, prompt)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    spelling = Spelling(tokenizer, (), prompt)
    assert "".join(spelling([token])[token] for token in tokens) == text


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
@pytest.mark.parametrize("skipped", [True, False])
def test_first_token_is_spelled_without_a_leading_space(kind: str, skipped: bool) -> None:
    """Regression: an encoder-decoder's answer starts with tokens without text, and all offsets were one too high."""
    fast = make_tokenizer(kind, type_ids=False)
    tokenizer, start, language = fast.backend_tokenizer, fast.pad_token_id, fast.mask_token_id
    tokens = [language, *tokenizer.encode("The museum in Oslo", add_special_tokens=False).ids]
    detokenizer = Detokenizer(tokenizer, [start], skipped)
    pieces = [detokenizer.push(token) for token in tokens]
    spelling = Spelling(tokenizer, {start, language} if skipped else (), [start])
    texts = [spelling([token, tokens[1]]) for token in tokens]
    assert [text[token] for text, token in zip(texts, tokens, strict=True)][1:] == pieces[1:]
    assert texts[0][tokens[1]] == texts[1][tokens[1]] or not skipped, "what might have come instead, too"


def test_token_is_spelled_after_its_predecessor() -> None:
    """The space depends on the end-of-word mark of the token before, not on every predecessor."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "a</w>": 2, "b</w>": 3}, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    spelling = Spelling(tokenizer, ())
    assert [spelling([token, 1])[token] for token in (0, 3, 2, 1, 2)] == ["a", "b", " a", " b", "a"]


def test_parts_of_characters_are_spelled_alike_everywhere() -> None:
    tokenizer = byte_tokenizer()
    spelling = Spelling(tokenizer, ())
    texts = [spelling([token])[token] for token in tokenizer.encode("aé b").ids]
    assert texts == ["a", BROKEN, BROKEN, " ", "b"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_clean_up_equals_transformers(kind: str) -> None:
    """Follows clean_up_tokenization_spaces, also for French punctuation; BPE tokenisers keep their spaces."""
    tokenizer = make_tokenizer(kind, type_ids=False)
    tokenizer.add_tokens([" .", " ' ", " n't", " ?", " 's"])
    tokenizer.clean_up_tokenization_spaces = True
    generator = np.random.default_rng(0)
    marks = range(len(tokenizer) - 5, len(tokenizer))
    for length in (1, 8, 40):
        words = generator.integers(5, len(tokenizer), length).tolist()
        tokens = [token for word in words for token in (word, int(generator.choice(marks)))]
        detokenizer = Detokenizer(tokenizer.backend_tokenizer, [], clean_up=cleans_up(tokenizer))
        text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    refuse_other_text(tokenizer)


def test_clean_up_of_pieces_equals_that_of_the_whole() -> None:
    tokenizer = make_tokenizer("unigram", type_ids=False)
    generator = np.random.default_rng(0)
    for _ in range(500):
        text = "".join(generator.choice(list("  .?!,'ntmsvreé"), int(generator.integers(1, 30))))
        cuts = sorted(generator.integers(0, len(text) + 1, 4).tolist())
        for places in ([0, *cuts, len(text)], range(len(text) + 1)):
            cleaner = Cleaner()
            pieces = [cleaner.push(text[begin:end]) for begin, end in itertools.pairwise(places)]
            assert "".join(pieces) + cleaner.flush() == tokenizer.clean_up_tokenization(text), repr(text)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("日本語のテキストです。", 0),
        ("https://example.org/a?b=c", 0),
        ("It ' s no rhythm , and we  ' ve 't n'to vary n ' t , l'été", 5),
        ("a" + " " * 20 + "b", 2),
    ],
)
def test_clean_up_holds_back_only_what_may_change(text: str, most: int) -> None:
    """Text is streamed as it is generated, even without spaces."""
    cleaner = Cleaner()
    held = []
    for character in text:
        cleaner.push(character)
        held.append(len(cleaner.held))
    assert max(held) == most


@pytest.mark.parametrize("stream", [True, False])
def test_service_cleans_up_its_answers(stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = [
        b"".join(
            answer["text_output"][0]
            for answer in answers_of(
                service_of(" .", clean_up, tmp_path, monkeypatch), prompt(), stream=stream, max_tokens=6
            )
        ).decode()
        for clean_up in (False, True)
    ]
    assert written[0].count(" .") == 6
    assert written[1] == written[0].replace(" .", ".")


@pytest.mark.parametrize("before", ["", " ", " ."])
def test_stop_word_ends_a_cleaned_answer_at_once(before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(before, True, tmp_path, monkeypatch)
    *pieces, last = answers_of(service, prompt(), stream=True, max_tokens=6)
    text = b"".join(answer["text_output"][0] for answer in (*pieces, last)).decode().replace(" ", "").replace(".", "")
    assert len(pieces) >= 5
    assert len(text) == 6
    (stopped,) = answers_of(service, prompt(), stop_words=[text[3]], max_tokens=6)
    assert stopped["finish_reason"].tolist() == [b"stop"]
    assert stopped["completion_tokens"].tolist() == [text.index(text[3]) + 1]


def test_stop_word_that_is_a_special_token_ends_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: <|im_end|> was searched for in text that omits it, and the answer continued."""
    service = service_of("", False, tmp_path, monkeypatch)
    (whole,) = answers_of(service, prompt(), max_tokens=6)
    text = whole["text_output"][0].decode()
    service.tokenizer.add_special_tokens([text[3]])
    service.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (stopped,) = answers_of(Service(tmp_path), prompt(), stop_words=[text[3]], max_tokens=6)
    assert stopped["finish_reason"].tolist() == [b"stop"]
    assert stopped["text_output"][0].decode() == text[: text.index(text[3])]


def test_default_answer_length_fits_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a search without max_tokens was refused if the checkpoint's default is long."""
    service = service_of("", False, tmp_path, monkeypatch)
    service.serving = replace(service.serving, beams=4, max_tokens=60)
    service.loop.cache.blocks = BlockManager(slots=4, num_blocks=10, block_size=4)
    texts = prompt()

    def longest(**options: object) -> int:
        (sequence, *_) = service.prepare(texts, options, lambda answer, last: None)
        return sequence.request.max_tokens

    assert (longest(), longest(num_beams=2), longest(num_beams=4)) == (39, 19, 7)
    with pytest.raises(InputError, match="4 beams of up to 9 tokens need 12 blocks of the cache, of 10: lower max_tok"):
        longest(num_beams=4, max_tokens=8)
    texts = {"input_ids": np.array([1] * 8)}
    with pytest.raises(InputError, match="of 10: send a shorter prompt or fewer num_beams, or build"):
        longest(num_beams=4)


def test_prompt_past_the_checkpoint_max_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: it was answered with one token; transformers' generate raises."""
    service = service_of("", False, tmp_path, monkeypatch)
    service.serving = replace(service.serving, total_length=8)

    def longest(prompt: int, **options: object) -> int:
        (sequence,) = service.prepare({"input_ids": np.array([1] * prompt)}, options, lambda answer, last: None)
        return sequence.request.max_tokens

    assert (longest(7), longest(8, max_tokens=5)) == (1, 5)
    for length in (8, 9):
        with pytest.raises(InputError, match=f"{length} tokens.*max_length allows 8.*send max_tokens"):
            longest(length)


def prompt() -> dict[str, np.ndarray]:
    return {"text_input": np.array([b"x"], object)}


def service_of(before: str, clean_up: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return a service of a SumExecutor whose tokens are letters, each preceded by `before`."""
    marks = {f"{before}{chr(ord('A') + number)}": number for number in range(50)}
    tokenizer = Tokenizer(models.WordLevel(marks, unk_token=f"{before}A"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    monkeypatch.setattr(service_module, "make_executor", lambda *arguments: SumExecutor(4, 64))
    fields = [field.name for field in (*COMMON, *PROMPT)]
    serving = decoder_serving(fields=fields, end_ids=(), clean_up=clean_up, defaults={"temperature": 0.0})
    (folder / "serving.json").write_text(dump(serving))
    return Service(folder)


def test_tokeniser_that_decodes_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer("bpe", type_ids=False)
    refuse_other_text(tokenizer)
    own = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda tokens, **options: own(tokens, **options).replace(" ", "_"))
    with pytest.raises(CheckpointError, match=r"The_train_to_the_coast_leaves_at_nine.* with --engine vllm"):
        refuse_other_text(tokenizer)


def test_difference_of_a_tokeniser_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the message showed only equal beginnings of the two texts."""
    tokenizer = make_tokenizer("bpe", type_ids=False)
    own = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda tokens, **options: own(tokens, **options) + "_at_its_end")
    with pytest.raises(CheckpointError, match=r"and '.{20}_at_its_end' by transformers"):
        refuse_other_text(tokenizer)


def test_special_tokens_are_text_on_request() -> None:
    """Some checkpoints mark tool calls with special tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["[CALL]"])
    ids = tokenizer.encode("a[CALL]é").ids
    for skip_special, text in ((True, "aé"), (False, "a[CALL]é")):
        detokenizer = Detokenizer(tokenizer, [], skip_special)
        assert "".join(map(detokenizer.push, ids)) == text


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stop_string_never_leaks(size: int) -> None:
    text = "one two thr ENDLESS three END four"
    for words in (("END ",), ("three", "END "), ("thr EX", "four"), ("zzz",), ("ENDL", "ND four")):
        stops = StopStrings(words)
        shown = ""
        for start in range(0, len(text), size):
            shown += stops.push(text[start : start + size])
            places = [text.find(word) for word in words if word in text]
            if places:
                assert len(shown) <= min(places)
            if stops.matched:
                break
        shown += stops.flush()
        first = min((text.find(word) for word in words if word in text), default=len(text))
        assert shown == text[:first]
        assert stops.matched == (first < len(text))


def test_detokenizer_reports_a_panic_of_the_tokeniser() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "": 1}, []))
    tokenizer.decoder = decoders.Strip("a", 3, 3)
    with pytest.raises(TokenizerError, match="fails here: index out of bounds"):
        Detokenizer(tokenizer, []).push(1)
