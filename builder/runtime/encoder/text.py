"""Convert text to token ids with the Rust tokeniser, and never cut a text without notice.

Knows the tokeniser file and the length limit; knows nothing about tasks, engines or Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Union, cast

from tokenizers import Encoding, Tokenizer

from ..panics import call_tokenizer
from ..tokens import tokens_of

Text = Union[str, tuple[str, str], list[str]]  # a list is of words


@dataclass(frozen=True)
class Truncation:
    """Rule for cutting a text to `max_length` tokens, special tokens included.

    `strategy` is one of tokenizers' longest_first, only_first, only_second; with `stride` > 0 the parts cut
    off come back as further, overlapping encodings in `Encoding.overflowing`.
    """

    max_length: int
    strategy: str = "longest_first"
    stride: int = 0


class TextEncoder:
    """A fast tokeniser without padding; it truncates only when asked to, call by call."""

    def __init__(
        self, tokenizer_file: Path, offsets: bool, truncation_side: str = "right", split_words: bool = False
    ) -> None:
        """`split_words`: True if every text is a list of words."""
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.truncation_side = truncation_side
        encode = self.tokenizer.encode_batch if offsets else self.tokenizer.encode_batch_fast
        self._encode_batch = partial(encode, is_pretokenized=split_words)

    def __call__(self, texts: Sequence[Text], truncation: Truncation | None = None) -> list[Encoding]:
        """Encode all `texts` (str, or pairs of str) in one call of the tokeniser, special tokens included."""
        if truncation is None:
            return self._encoded(texts)
        self.tokenizer.enable_truncation(
            truncation.max_length,
            stride=truncation.stride,
            strategy=truncation.strategy,
            direction=self.truncation_side,
        )
        try:
            return self._encoded(texts)
        finally:
            self.tokenizer.no_truncation()

    def _encoded(self, texts: Sequence[Text]) -> list[Encoding]:
        encodings: list[Encoding] = call_tokenizer(self._encode_batch, list(texts))
        return encodings

    def ids_of(self, texts: Sequence[Text]) -> list[list[int]]:
        """Return the token ids of each text, of any length, without the special tokens around it."""
        encodings = call_tokenizer(
            lambda batch: self.tokenizer.encode_batch(batch, add_special_tokens=False), list(texts)
        )
        return [cast(Encoding, encoding).ids for encoding in encodings]

    def with_offsets(self, text: Text) -> Encoding:
        """Encode one text, of any length, with the offsets of its tokens."""
        (encoding,) = call_tokenizer(self.tokenizer.encode_batch, [text])
        return cast(Encoding, encoding)

    def tokens(self, texts: Sequence[Text]) -> list[str]:
        """Return the tokens of each text, of any length, as JSON."""
        return tokens_of(self.tokenizer, texts)

    def to_string(self, tokens: list[str]) -> str:
        """Join tokens into text, as `convert_tokens_to_string` of a fast tokeniser does."""
        decoder = self.tokenizer.decoder
        return str(call_tokenizer(decoder.decode, tokens)) if decoder is not None else " ".join(tokens)
