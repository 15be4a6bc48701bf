"""Decoding of tokens to text as transformers does it, and a comparison of the emitted code with it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS
from builder.runtime.generation.text import Detokenizer

FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
PROBES = (*TEXTS[:8], "Ça va ? Oui , c ' est vrai ! We ' re n't 's .", "  two  spaces ", "日本語 😀", "a\tb\nc", "")


def cleans_up(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if transformers removes spaces before punctuation as it decodes; for BPE only if it is forced to."""
    pieces = type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces) and (pieces or bool(getattr(tokenizer, FORCED, False)))


def refuse_other_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise CheckpointError if the emitted code decodes tokens to another text than transformers."""
    for probe in PROBES:
        tokens = tokenizer(probe)["input_ids"]
        detokenizer = Detokenizer(tokenizer.backend_tokenizer, [], clean_up=cleans_up(tokenizer))
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
        expected = tokenizer.decode(tokens, skip_special_tokens=True)
        if text != expected:
            pairs = enumerate(zip(text, expected, strict=False))
            position = next((at for at, (a, b) in pairs if a != b), min(len(text), len(expected)))
            ours, theirs = (whole[max(0, position - 20) : position + 40] for whole in (text, expected))
            raise CheckpointError(
                f"tokens of this checkpoint are written {ours!r} here and {theirs!r} by transformers: a bug worth "
                f"reporting, with its tokenizer class, {type(tokenizer).__name__}. A decoder can be served with "
                "--engine vllm, which writes text itself"
            )
