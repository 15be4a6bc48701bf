"""Token ids that clients make with a tokeniser of OpenAI's, as text: the models here have tokenisers of their own.

LangChain's OpenAIEmbeddings counts a text's tokens with cl100k_base, whatever the model, and sends the tokens. What ids
mean only the file says that they were made with: tiktoken's, of a token in base64 and its number a line.
Source: https://github.com/openai/tiktoken, tiktoken/load.py.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.errors import SpecError


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, by its number."""

    name: str
    tokens: dict[int, bytes]

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`; half a character at an end is replaced. Raises KeyError for a number that is no token."""
        return b"".join(self.tokens[token] for token in ids).decode("utf-8", "replace")


def read_vocabulary(file: Path) -> Vocabulary:
    """Raises SpecError for a file that is not tiktoken's."""
    tokens, number = {}, 0
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):  # noqa: B007  (named in the error)
            token, rank = line.split()
            tokens[int(rank)] = base64.b64decode(token, validate=True)
    except OSError as error:
        raise SpecError(f"the vocabulary {file} cannot be read: {error.strerror or error}") from error
    except (ValueError, binascii.Error) as error:
        raise SpecError(
            f"{file}, line {number}, is not a token in base64 and its number, as in cl100k_base.tiktoken"
        ) from error
    if not tokens:
        raise SpecError(f"{file} holds no tokens; expected a vocabulary such as cl100k_base.tiktoken")
    return Vocabulary(file.stem, tokens)
