"""Split a text into words and find the tokens that stand for them, as GLiNER does.

Knows texts and encodings; knows nothing about tasks or engines. Source: gliner 0.2.29, data_processing/tokenizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import Encoding

WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


def words_of(text: str) -> "list[tuple[int, int]]":
    """Return the start and end of each word, in characters: letters and digits with hyphens, or another character."""
    return [match.span() for match in WORD.finditer(text)]


def tokens_of_words(encoding: Encoding, last: bool) -> "dict[int, int]":
    """Return the first token of each word of an encoding, or its last; none for a word of which nothing is left."""
    places: "dict[int, int]" = {}
    word_ids: "Sequence[int | None]" = encoding.word_ids
    for place, word in enumerate(word_ids):
        if word is not None and (last or word not in places):
            places[word] = place
    return places
