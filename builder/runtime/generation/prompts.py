"""Define the prompt from which a model starts an answer; built by decoder_prompts, chat_prompts and source_texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from ..panics import call_tokenizer
from .options import RequestOptions


@dataclass(frozen=True)
class Prompt:
    """`tokens` a decoder starts from; `source` an encoder reads first; `first` the token every answer begins with.

    `thinking`: True if the text ends within a model's reasoning, which the answer continues.
    """

    text: str
    tokens: "tuple[int, ...]"
    source: "tuple[int, ...]" = ()
    first: "int | None" = None
    thinking: bool = False

    @property
    def length(self) -> int:
        """Number of tokens of the request's input."""
        return len(self.source or self.tokens)


def token_ids(tokenizer: Tokenizer, texts: "Sequence[str]", special: bool) -> "list[list[int]]":
    """Return the tokens of each text.

    A batch, even of one text, lets other threads run meanwhile; `encode` does not.
    """
    encodings = call_tokenizer(tokenizer.encode_batch_fast, list(texts), add_special_tokens=special)
    return [encoding.ids for encoding in encodings]


class Prompts(Protocol):
    """Builder of prompts. Only those of decoders have `tokens`, for requests with the option `tokenize`."""

    def __call__(self, options: RequestOptions) -> Prompt: ...

    def tokens(self, options: RequestOptions) -> "tuple[str, str]": ...
