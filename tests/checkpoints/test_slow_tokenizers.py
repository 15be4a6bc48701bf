"""Tokenisers that transformers implements only in Python are converted to tokenizer.json, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer, MarianTokenizer

from builder.checkpoints.resolve import resolve
from builder.checkpoints.slow_tokenizers import as_fast
from builder.checkpoints.tokenizer import cleans_up, tokenizer_json
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.runtime.generation.text import Detokenizer
from tests.seq2seqs import make_seq2seq

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


OTHER_SCRIPT = {ord(letter): chr(0x410 + index) for index, letter in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZ")}


def make_marian_tokenizer(
    folder: Path, kind: str = "unigram", script: Mapping[int, str] = MappingProxyType({})
) -> MarianTokenizer:
    """Write two SentencePiece models of the packaged samples, and a vocab.json with its own order of their pieces.

    The language of the answers is written in capitals, each as `script` writes it.
    """
    folder.mkdir()
    lines = {"source": TEXTS[:26], "target": [text.upper().translate(script) for text in TEXTS[:20]]}
    pieces: list[str] = []
    for side, texts in lines.items():
        (folder / f"{side}.txt").write_text("\n".join(texts))
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / f"{side}.txt"),
            model_prefix=str(folder / side),
            vocab_size=240,
            model_type=kind,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        model = sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm"))
        pieces += [model.id_to_piece(index) for index in range(3, len(model))]
    unique = sorted(set(pieces))
    shuffled = [unique[index] for index in np.random.default_rng(0).permutation(len(unique))]
    vocabulary = ["</s>", "<unk>", *shuffled, ">>fra<<", ">>deu<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({piece: index for index, piece in enumerate(vocabulary)}))
    tokenizer = MarianTokenizer(str(folder / "source.spm"), str(folder / "target.spm"), str(folder / "vocab.json"))
    tokenizer.save_pretrained(folder / "saved")
    return tokenizer


def test_slow_tokenizer_is_converted_and_served(tmp_path: Path) -> None:
    slow = make_marian_tokenizer(tmp_path / "pieces")
    model = make_seq2seq("marian", decoder_vocab_size=None)
    model.save_pretrained(tmp_path / "pieces" / "saved")
    checkpoint = resolve(make_spec(model=str(tmp_path / "pieces" / "saved"), name="m"))
    fast = AutoTokenizer.from_pretrained(tmp_path / "pieces" / "saved")
    assert not fast.is_fast, "transformers has no fast one, so this test is about something"
    for text in (*TEXTS, ">>deu<< The train leaves.", "naïve ﬁsh №5 …", "日本"):
        assert checkpoint.tokenizer(text)["input_ids"] == slow(text)["input_ids"]
    ids = slow("The train to the coast leaves at nine.")["input_ids"]
    assert checkpoint.tokenizer.decode(ids, skip_special_tokens=True) == slow.decode(ids, skip_special_tokens=True)
    slow.clean_up_tokenization_spaces = True
    assert cleans_up(as_fast(slow)), "transformers cleans up after the slow one"
    assert '"Unigram"' in tokenizer_json(checkpoint.tokenizer)


def test_converted_tokenizer_uses_no_pieces_of_the_other_language(tmp_path: Path) -> None:
    """Regression: one long piece of the target language was preferred to short pieces of the source language."""
    slow = make_marian_tokenizer(tmp_path / "pieces")
    fast = as_fast(slow)
    pieces = {slow.spm_source.id_to_piece(index) for index in range(len(slow.spm_source))}
    words = {word for text in TEXTS[:20] for word in text.upper().split() if set(word) <= pieces}
    assert len(words) > 10
    assert any(f"▁{word}" in set(slow.encoder) - pieces for word in words), "one piece, of the other language alone"
    for word in words:
        assert fast(word)["input_ids"] == slow(word)["input_ids"], word


def test_converted_tokenizer_treats_unknown_letters_like_the_slow_one(tmp_path: Path) -> None:
    """A run of unknown letters is looked up as a whole in the other vocabulary, and never split."""
    slow = make_marian_tokenizer(tmp_path / "pieces", script=OTHER_SCRIPT)
    fast = as_fast(slow)
    runs = [piece.strip("▁") for piece in slow.encoder if set(piece.strip("▁")) & set(OTHER_SCRIPT.values())]
    letters = [run for run in runs if len(run) == 1]
    whole = [run for run in runs if len(run) > 1 and run in slow.encoder]
    words = sorted({word for text in TEXTS[:20] for word in text.upper().translate(OTHER_SCRIPT).split()})
    assert min(len(letters), len(whole)) > 10, "single letters, and longer pieces that begin no word"
    unknown = slow.unk_token_id
    assert any(slow(word)["input_ids"].count(unknown) == 1 for word in words), "what is no piece is one unknown token"
    pairs = [a + b for a, b in zip(letters, reversed(letters), strict=True)]
    for run in (*letters, *whole, *pairs, *words):
        for text in (run, f"the {run} train", f"the{run}train {run}", f"{run}, {run}{run[0]}.", f"日{run}\x01{run}"):
            assert fast(text)["input_ids"] == slow(text)["input_ids"], text
    ids = [slow.encoder[piece] for piece in (*letters, *whole)]
    assert fast.decode(ids) == slow.decode(ids)
    assert fast(letters[0])["input_ids"] == [slow.encoder["▁"], slow.encoder[letters[0]], slow.eos_token_id]


def test_converted_tokenizer_decodes_like_the_slow_one(tmp_path: Path) -> None:
    """Compare whole texts and streamed pieces; language codes are decoded as text."""
    slow = make_marian_tokenizer(tmp_path / "pieces")
    fast = as_fast(slow)
    space, code = slow.encoder["▁"], slow.encoder[">>fra<<"]
    word, other = [slow.encoder[piece] for piece in sorted(slow.encoder) if re.fullmatch("▁[a-z]{3}", piece)][:2]
    part = slow.encoder["a"]
    for ids in ([space, word, other, space], [space, space, part, space, space], [word, code, part], [space]):
        detokenizer = Detokenizer(fast.backend_tokenizer, [])
        streamed = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        written = slow.decode(ids, skip_special_tokens=True)
        assert fast.decode(ids, skip_special_tokens=True) == streamed == written


def test_slow_tokenizer_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a unigram model"):
        as_fast(make_marian_tokenizer(tmp_path / "bpe", kind="bpe"))
