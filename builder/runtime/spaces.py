"""Spaces that a decoded text has before marks and short forms, left out as transformers leaves them out.

transformers: PreTrainedTokenizerBase.clean_up_tokenization, where a tokeniser says clean_up_tokenization_spaces.
"""

from __future__ import annotations

import re

SPACES = (  # in transformers' order
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)

# The end of a text that what follows may change. Not only what begins one of SPACES: " ' " may leave a short form
# behind (" n ' t", "  ' s") or begin after another one (" ' ' "). Of many spaces, only the last two can go.
OPEN = re.compile(r"(?= )(?: {1,2}(?:n'?|'))*(?: {0,2}|(?<=') ?[vr])$")


def cleaned(text: str) -> str:
    """`text` without them."""
    for spaced, tight in SPACES:
        text = text.replace(spaced, tight)
    return text


class Cleaner:
    """The same of a text that comes in pieces: what may still lose a space is held back, a few characters."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> str:
        """What may be shown now."""
        self.held += text
        match = OPEN.search(self.held)
        end = match.start() if match else len(self.held)
        shown, self.held = cleaned(self.held[:end]), self.held[end:]
        return shown

    def flush(self) -> str:
        """What was held back."""
        shown, self.held = cleaned(self.held), ""
        return shown
