"""Remove the spaces that a decoded text has before punctuation and short forms, as transformers does.

transformers: PreTrainedTokenizerBase.clean_up_tokenization, if a tokeniser sets clean_up_tokenization_spaces.
"""

from __future__ import annotations

import re

SPACES = (  # in transformers' order
    *((f" {mark}", mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)

# The end of a text that the next piece may change. Not only what begins one of SPACES: " ' " may leave a short form
# behind (" n ' t", "  ' s") or begin after another one (" ' ' "). Of many spaces, only the last two can be removed.
OPEN = re.compile(r"(?= )(?: {1,2}(?:n'?|'))*(?: {0,2}|(?<=') ?[vr])$")


def cleaned(text: str) -> str:
    """Return `text` without these spaces."""
    for spaced, tight in SPACES:
        text = text.replace(spaced, tight)
    return text


class Cleaner:
    """Cleans a text that comes in pieces; holds back the few characters that may still lose a space."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> str:
        """Return the text that may be shown now."""
        self.held += text
        match = OPEN.search(self.held)
        end = match.start() if match else len(self.held)
        shown, self.held = cleaned(self.held[:end]), self.held[end:]
        return shown

    def flush(self) -> str:
        """Return the text that was held back."""
        shown, self.held = cleaned(self.held), ""
        return shown
