"""A tokeniser that transformers has only in Python becomes one file that makes the same ids, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from transformers import AutoTokenizer, MarianTokenizer

from builder.checkpoint.decoding import cleans_up
from builder.checkpoint.resolve import resolve, tokenizer_json
from builder.checkpoint.slow_tokenizers import as_fast
from builder.errors import CheckpointError
from builder.samples import TEXTS
from builder.spec import make_spec
from tests.seq2seqs import make_seq2seq

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")


def make_marian_tokenizer(folder: Path, kind: str = "unigram") -> MarianTokenizer:
    """Two SentencePiece models of the packaged samples, and a vocab.json that numbers their pieces in its own order."""
    folder.mkdir()
    lines = {"source": TEXTS[:26], "target": [text.upper() for text in TEXTS[:20]]}
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


def test_a_checkpoint_of_pieces_and_a_vocabulary_is_served_as_it_was_trained(tmp_path: Path) -> None:
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


def test_no_text_is_cut_into_pieces_of_the_other_language(tmp_path: Path) -> None:
    """A name in the language of the answers, say: one long piece of that was likelier than many short ones."""
    slow = make_marian_tokenizer(tmp_path / "pieces")
    fast = as_fast(slow)
    pieces = {slow.spm_source.id_to_piece(index) for index in range(len(slow.spm_source))}
    words = {word for text in TEXTS[:20] for word in text.upper().split() if set(word) <= pieces}
    assert len(words) > 10
    assert any(f"▁{word}" in set(slow.encoder) - pieces for word in words), "one piece, of the other language alone"
    for word in words:
        assert fast(word)["input_ids"] == slow(word)["input_ids"], word


def test_what_cannot_be_written_as_one_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a unigram model"):
        as_fast(make_marian_tokenizer(tmp_path / "bpe", kind="bpe"))
