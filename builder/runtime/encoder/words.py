"""Split a text into words and find the tokens that stand for them, as GLiNER and GLiNER2 do.

Knows texts and encodings; knows nothing about tasks or engines. Sources: gliner 0.2.29, data_processing/tokenizer.py;
gliner2 2.1.0, processing/word_splitter.py.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from tokenizers import Encoding

WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


def words_of(text: str) -> "list[tuple[int, int]]":
    """Return the start and end of each word, in characters: letters and digits with hyphens, or another character."""
    return [match.span() for match in WORD.finditer(text)]


# The start of a mail address, or a run of its characters without one. Each run is read once: an alternative in the
# pattern of words would read the rest of a run at each of its characters.
MAIL = re.compile(r"[a-z0-9._%+-]+(?=(@[a-z0-9.-]+\.[a-z]{2,})?)", re.IGNORECASE)


@cache
def _pattern_with_marks() -> "re.Pattern[str]":
    """Return the pattern of a web address, a name after @, a word with its combining marks, or a character."""
    characters = map(chr, range(sys.maxunicode + 1))
    marks = "".join(one for one in characters if unicodedata.category(one).startswith("M"))
    word = rf"[\w{marks}\u200c\u200d]+"  # with the two joiners that have no width
    return re.compile(rf"((?:https?://|www\.)\S+)|@[a-z0-9_]+|{word}(?:[-_]{word})*|\S", re.IGNORECASE)


def words_with_marks(text: str) -> "list[tuple[int, int]]":
    """Return the start and end of each word, in characters: addresses and combining marks are not divided."""
    pattern, words, place = _pattern_with_marks(), list[tuple[int, int]](), 0
    for mail in MAIL.finditer(text):
        while mail[1] and place < mail.end():
            word = pattern.search(text, place)
            assert word is not None
            is_mail = word.start() >= mail.start() and not word[1]
            words.append((word.start(), mail.end(1) if is_mail else word.end()))
            place = words[-1][1]
    return words + [match.span() for match in pattern.finditer(text, place)]


def tokens_of_words(encoding: Encoding, last: bool) -> "dict[int, int]":
    """Return the first token of each word of an encoding, or its last; none for a word of which nothing is left."""
    places: "dict[int, int]" = {}
    word_ids: "Sequence[int | None]" = encoding.word_ids
    for place, word in enumerate(word_ids):
        if word is not None and (last or word not in places):
            places[word] = place
    return places


def places_of_words(encoding: Encoding, words: range) -> "list[int]":
    """Return, for each of `words`, the last of the encoding, the first token that is not before it, and their end."""
    first, place = tokens_of_words(encoding, last=False), len(encoding)
    while place and encoding.word_ids[place - 1] is None:
        place -= 1
    places = [place]
    for word in reversed(words):
        places.append(first.get(word, places[-1]))
    return places[::-1]


def end_of_window(places: "Sequence[int]", start: int, tokens: int) -> int:
    """Return the word before which a window of at most `tokens` tokens, from the word `start` on, has to end."""
    return bisect_right(places, places[start] + tokens) - 1


def shared_words(words: int, max_width: int) -> int:
    """Return how many of its words a window shares with the next: enough for any span, if there is room."""
    return min(max(max_width - 1, words // 8), words // 2)
