"""Convert tokenizers that transformers has only in Python to the one file that the emitted code reads.

One kind: a SentencePiece model (unigram, arXiv:1808.06226) whose pieces a vocab.json numbers, as translation models
of the OPUS-MT project have it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS

UNIGRAM = 1  # of sentencepiece_model.proto's ModelType
SPLIT_TYPES = (1, 4)  # its types of pieces that texts are split into: normal and user-defined
MIN_SCORE = 32.0  # of the least likely piece; in both libraries an unknown letter has 10 less, so two are likelier
LONE_LETTER_SCORE = 4 * MIN_SCORE  # of an unknown letter that stands alone and is a piece of the other language
MARK = "\x01"  # before such a letter, in texts and in its piece: elsewhere it is part of an unknown run
OTHER_MARK = "\x02"  # replaces a text's own MARK
COMPARED_PIECES = 20  # the longest pieces of the other language, which both tokenizers have to split in one way
PROBES = (*TEXTS, "", " ", "  two  spaces ", "Ünïcödé ﬁ … №", "日本語", "a\tb\nc", "<unk> </s>", ">>fra<< Hello")


def as_fast(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Return `tokenizer` as a fast one that makes the same ids. Raises CheckpointError if there is none."""
    name = type(tokenizer).__name__
    if not hasattr(tokenizer, "spm_source") or getattr(tokenizer, "separate_vocabs", False):
        raise CheckpointError(f"there is only a slow tokenizer ({name}); add a tokenizer.json")
    proto = ModelProto.FromString(tokenizer.spm_source.serialized_model_proto())
    numbered = {index: piece for piece, index in tokenizer.encoder.items()}
    if proto.trainer_spec.model_type != UNIGRAM or sorted(numbered) != list(range(len(numbered))):
        raise CheckpointError(f"{name}: expected a unigram model and a vocab.json without holes; add a tokenizer.json")
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in SPLIT_TYPES}
    pieces = [numbered[index] for index in range(len(numbered))]
    fast = Tokenizer(models.Unigram(_vocabulary(pieces, scores), unk_id=tokenizer.encoder[tokenizer.unk_token]))
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    charsmap = proto.normalizer_spec.precompiled_charsmap
    steps = [normalizers.Precompiled(charsmap), *spaces] if charsmap else spaces
    fast.normalizer = normalizers.Sequence([*steps, *_marking(scores)])
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    outside = decoders.Replace(Regex(r"\A +| +\z"), "")
    fast.decoder = decoders.Sequence([decoders.Replace(MARK, ""), decoders.Metaspace(), decoders.Fuse(), outside])
    fast.add_tokens([AddedToken(code, normalized=False) for code in tokenizer.supported_language_codes])
    end = tokenizer.eos_token
    fast.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.encoder[end])]
    )
    converted = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        eos_token=end,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        model_max_length=tokenizer.model_max_length,
        model_input_names=list(tokenizer.model_input_names),
        clean_up_tokenization_spaces=tokenizer.clean_up_tokenization_spaces,
    )
    tokenizer.punc_normalizer = str  # as transformers does without sacremoses, which the emitted code does not have
    words = _of_the_other_language(pieces, scores)
    known = [word for word in words if tokenizer.unk_token_id not in tokenizer(word)["input_ids"]]
    strange = sorted(piece for piece in pieces if _is_foreign_letter(piece, scores))
    for text in (*PROBES, " ".join(known), " ".join(strange), "".join(strange), "".join(strange[:2])):
        if converted(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise CheckpointError(
                f"{name} cannot be written as a tokenizer.json that tokenises {text[:40]!r} in the same way; "
                "add a tokenizer.json"
            )
    return converted


def _vocabulary(pieces: Iterable[str], scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return `pieces` with scores that cut texts as the source model, which has `scores`, cuts them.

    transformers cuts texts with the source's model alone. It looks up each run of letters that the model does not know
    in the shared vocabulary, with the pieces of the other language, and makes it one unknown token if it is not there.
    So `pieces` contains these pieces, but no text may be cut into them: the score of every letter is raised until the
    letters of a piece, unknown ones too, score higher than the piece. All ways to cut a text have the same letters, so
    the order of cuts into the source's own pieces stays the same.
    """
    shift = math.ceil(MIN_SCORE - min(scores.values()))
    lowest = min(scores.values()) + shift
    return [
        (MARK + piece, LONE_LETTER_SCORE + lowest)
        if _is_foreign_letter(piece, scores)
        else (piece, scores[piece] + shift * len(piece) if piece in scores else lowest)
        for piece in pieces
    ]


def _marking(scores: Mapping[str, float]) -> list[normalizers.Normalizer]:
    """Return normalisers that put MARK before each letter that stands alone and is not in the source's `scores`."""
    known = "".join(f"\\x{{{ord(letter):x}}}" for letter in sorted({" ", *"".join(scores)}))
    alone = f"(?<![^{known}])(?=[^{known}](?![^{known}]))"
    return [normalizers.Replace(MARK, OTHER_MARK), normalizers.Replace(Regex(alone), MARK)]


def _is_foreign_letter(piece: str, scores: Mapping[str, float]) -> bool:
    return len(piece) == 1 and piece not in scores


def _of_the_other_language(pieces: Iterable[str], scores: Mapping[str, float]) -> list[str]:
    """Return the longest pieces that only the language of the answers has, in letters that both languages have."""
    foreign = [piece.replace("▁", "") for piece in pieces if piece not in scores and "<" not in piece]
    return sorted((word for word in foreign if set(word) <= set(scores)), key=len)[-COMPARED_PIECES:]
