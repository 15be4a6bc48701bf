"""Tokenisers that transformers has only in Python, as the one file that the emitted code reads.

One kind: a SentencePiece model (unigram, arXiv:1808.06226) whose pieces a vocab.json numbers, as translation models
of the OPUS-MT project have it. Knows tokenisers; knows no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.sentencepiece_model_pb2_new import ModelProto

from builder.errors import CheckpointError
from builder.samples import TEXTS

UNIGRAM = 1  # of sentencepiece_model.proto's ModelType
UNLIKELY = 1e4  # below the least likely piece, for each letter of a piece of the other language: no text has such
LONGEST = 20  # pieces of the other language, the longest, that the two have to cut in the same way
PROBES = (*TEXTS, "", " ", "  two  spaces ", "Ünïcödé ﬁ … №", "日本語", "a\tb\nc", "<unk> </s>", ">>fra<< Hello")


def as_fast(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """`tokenizer` as a fast one, shown to make the same ids. Raises CheckpointError where that cannot be."""
    name = type(tokenizer).__name__
    if not hasattr(tokenizer, "spm_source") or getattr(tokenizer, "separate_vocabs", False):
        raise CheckpointError(f"there is only a slow tokenizer ({name}); add a tokenizer.json")
    proto = ModelProto.FromString(tokenizer.spm_source.serialized_model_proto())
    numbered = {index: piece for piece, index in tokenizer.encoder.items()}
    if proto.trainer_spec.model_type != UNIGRAM or sorted(numbered) != list(range(len(numbered))):
        raise CheckpointError(f"{name}: expected a unigram model and a vocab.json without holes; add a tokenizer.json")
    scores = {piece.piece: piece.score for piece in proto.pieces}
    least = min(scores.values())
    pieces = [numbered[index] for index in range(len(numbered))]
    vocabulary = [(piece, scores.get(piece, least - UNLIKELY * len(piece))) for piece in pieces]
    fast = Tokenizer(models.Unigram(vocabulary, unk_id=tokenizer.encoder[tokenizer.unk_token]))
    spaces = [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    charsmap = proto.normalizer_spec.precompiled_charsmap
    fast.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap), *spaces] if charsmap else spaces)
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    codes = [AddedToken(code, special=True, normalized=False) for code in tokenizer.supported_language_codes]
    fast.add_special_tokens(codes)
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
    tokenizer.punc_normalizer = str  # as transformers does without sacremoses, which the emitted code has not
    words = _of_the_other_language(pieces, scores)
    known = [word for word in words if tokenizer.unk_token_id not in tokenizer(word)["input_ids"]]
    for text in (*PROBES, " ".join(known)):
        if converted(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise CheckpointError(
                f"{name} cannot be written as a tokenizer.json that tokenises {text[:40]!r} in the same way; "
                "add a tokenizer.json"
            )
    return converted


def _of_the_other_language(pieces: Iterable[str], scores: Mapping[str, float]) -> list[str]:
    """The longest pieces that only the language of the answers has, in letters that both languages have."""
    foreign = [piece.replace("▁", "") for piece in pieces if piece not in scores and "<" not in piece]  # no special one
    return sorted((word for word in foreign if set(word) <= set(scores)), key=len)[-LONGEST:]
