"""Spaces that a decoded text has before marks and short forms, left out as transformers leaves them out.

transformers: PreTrainedTokenizerBase.clean_up_tokenization, where a tokeniser says clean_up_tokenization_spaces.
"""

from __future__ import annotations

SPACES = (  # in transformers' order
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)


def cleaned(text: str) -> str:
    """`text` without them."""
    for spaced, tight in SPACES:
        text = text.replace(spaced, tight)
    return text


class Cleaner:
    """The same of a text that comes in pieces: what may still lose a space is held back, about a word."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> str:
        """What may be shown now."""
        self.held += text
        place = self.held.rfind(" ")
        while place > 0 and not _parts(self.held[:place]):
            place = self.held.rfind(" ", 0, place)
        if place <= 0:
            return ""
        shown, self.held = cleaned(self.held[:place]), self.held[place:]
        return shown

    def flush(self) -> str:
        """What was held back."""
        shown, self.held = cleaned(self.held), ""
        return shown


def _parts(text: str) -> bool:
    """Whether nothing of `text` is changed together with a space that follows it."""
    return not text.endswith((" ", "'", " n"))
