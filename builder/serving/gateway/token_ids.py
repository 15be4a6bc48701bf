"""Convert token ids of OpenAI's tokenisers, sent by clients, to text: the models here have other tokenisers.

LangChain's OpenAIEmbeddings tokenises texts with cl100k_base, whatever the model, and sends the ids. Only tiktoken's
vocabulary file, with a token in base64 and its number on each line, defines these ids. Source:
https://github.com/openai/tiktoken, tiktoken/load.py.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.common.errors import SpecError


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, by its id."""

    name: str
    tokens: dict[int, bytes]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; half a character at an end is replaced. Raises KeyError for an unknown id."""
        return b"".join(self.tokens[token] for token in ids).decode("utf-8", "replace")


def read_vocabulary(file: Path) -> Vocabulary:
    """Read a tiktoken vocabulary. Raises SpecError for any other file."""
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
