"""Token ids to text as they come: no half characters, no half stop strings, and the same text in the end.

Knows the tokeniser and strings; knows nothing about sampling or Triton.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from ..panics import survived
from ..spaces import Cleaner

BROKEN = "\ufffd"  # what a decoder makes of bytes that are not a whole character yet
CONTEXT = 8  # tokens of the prompt that decide how the first new token is spelled (its leading space, say)


class Detokenizer:
    """Text of one sequence, piece by piece; all pieces together are the decoding of all tokens.

    `skip_special`: whether special tokens are no part of the text; `clean_up`: whether spaces before marks are none.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: "Sequence[int]", skip_special: bool = True, clean_up: bool = False
    ) -> None:
        self.cleaner = Cleaner() if clean_up else None
        self.tokenizer = tokenizer
        self.skip_special = skip_special
        self.tokens = list(prompt[-CONTEXT:])
        self.start = 0
        self.read = len(self.tokens)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while it ends within a character."""
        self.tokens.append(token)
        before = self._decode(self.start, self.read)
        after = self._decode(self.start, len(self.tokens))
        if after.endswith(BROKEN) or len(after) <= len(before):
            return ""
        text = self._new(before, after)
        self.start, self.read = self.read, len(self.tokens)
        return text if self.cleaner is None else self.cleaner.push(text)

    def flush(self) -> str:
        """What is left when no token follows: bytes that never became a character show as U+FFFD."""
        text = self._new(self._decode(self.start, self.read), self._decode(self.start, len(self.tokens)))
        self.start = self.read = len(self.tokens)
        return text if self.cleaner is None else self.cleaner.push(text) + self.cleaner.flush()

    def _new(self, before: str, after: str) -> str:
        """What `after`, with the unread tokens, has more than `before`, without them.

        A decoder of byte tokens makes a run of them U+FFFD, all of it, where its end is no character: then what was
        whole stays, as it was shown, and the unread tokens are decoded alone.
        """
        if after.startswith(before) or before.endswith(BROKEN):
            return after[len(before) :]
        return self._decode(self.read, len(self.tokens))

    def _decode(self, start: int, end: int) -> str:
        text: str = survived(self.tokenizer.decode, self.tokens[start:end], skip_special_tokens=self.skip_special)
        return text


class StopStrings:
    """Lets text through up to the first stop string, and holds back what might become one."""

    def __init__(self, words: "Sequence[str]") -> None:
        self.words: "dict[str, list[str]]" = {}  # by their first character
        for word in words:
            self.words.setdefault(word[0], []).append(word)
        self.held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """What may be shown now. Sets `matched` when a stop string is complete; nothing follows it."""
        if not self.words:
            return text
        self.held += text
        keep = len(self.held)
        for start, character in enumerate(self.held):
            for word in self.words.get(character, ()):
                if self.held.startswith(word, start):
                    self.matched = True
                    shown, self.held = self.held[:start], ""
                    return shown
                if keep == len(self.held) and word.startswith(self.held[start:]):
                    keep = start
        shown, self.held = self.held[:keep], self.held[keep:]
        return shown

    def flush(self) -> str:
        """What was held back and turned out not to be a stop string."""
        shown, self.held = self.held, ""
        return shown


class Spelling:
    """Tokens of one sequence as log-probabilities name them: each as it is written after the one before it.

    Together they are the sequence's text, with the spaces that are cleaned up, and U+FFFD for parts of characters.
    `hidden`: tokens that the text leaves out; `before`: those that the sequence goes on from.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: "Collection[int]", before: "Sequence[int]" = ()) -> None:
        self.tokenizer, self.hidden = tokenizer, hidden
        self.before = next((token for token in reversed(before[-CONTEXT:]) if token not in hidden), None)

    def __call__(self, tokens: "Sequence[int]") -> "dict[int, str]":
        """The texts of the next token, which is the first of `tokens`, and of those that might have come instead."""
        written = None if self.before is None else self._decode([self.before])
        texts = {token: self._spelled(token, written) for token in tokens}
        if tokens[0] not in self.hidden:
            self.before = tokens[0]
        return texts

    def _spelled(self, token: int, written: "str | None") -> str:
        """`written`: the token before, by itself."""
        if self.before is None or written is None:  # a text begins without the space of its first word
            return self._decode([token])
        if written.endswith(BROKEN):  # half a character, of which this token may be the other half
            return self._decode([token, token])[len(self._decode([token])) :]
        return self._decode([self.before, token])[len(written) :]

    def _decode(self, tokens: "list[int]") -> str:
        text: str = survived(self.tokenizer.decode, tokens, skip_special_tokens=False)
        return text
