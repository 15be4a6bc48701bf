"""Decode token ids to text as they come, without partial characters or partial stop strings.

The pieces together are the text of all tokens. Knows the tokeniser and strings; knows no sampling and no Triton.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from ..panics import call_tokenizer
from ..spaces import Cleaner

BROKEN = "\ufffd"  # decoded from bytes that are not yet a whole character
CONTEXT = 8  # tokens of the prompt that decide how the first new token is spelled (its leading space, for example)


class Detokenizer:
    """Text of one sequence, piece by piece; all pieces together are the decoding of all tokens.

    `skip_special`: leave special tokens out of the text; `clean_up`: remove spaces before punctuation marks.
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
        """Return the text that `token` completes; empty while it ends within a character."""
        self.tokens.append(token)
        before = self._decode(self.start, self.read)
        after = self._decode(self.start, len(self.tokens))
        if after.endswith(BROKEN) or len(after) <= len(before):
            return ""
        text = self._new(before, after)
        self.start, self.read = self.read, len(self.tokens)
        return text if self.cleaner is None else self.cleaner.push(text)

    def flush(self) -> str:
        """Return the text of the last tokens; bytes that never became a character become U+FFFD."""
        text = self._new(self._decode(self.start, self.read), self._decode(self.start, len(self.tokens)))
        self.start = self.read = len(self.tokens)
        return text if self.cleaner is None else self.cleaner.push(text) + self.cleaner.flush()

    def _new(self, before: str, after: str) -> str:
        """Return the text that the unread tokens add: `after` was decoded with them, `before` without them.

        A decoder of byte tokens turns a whole run of them into U+FFFD if its end is not a character. In that case the
        text returned earlier stands, and the unread tokens are decoded alone.
        """
        if after.startswith(before) or before.endswith(BROKEN):
            return after[len(before) :]
        return self._decode(self.read, len(self.tokens))

    def _decode(self, start: int, end: int) -> str:
        text: str = call_tokenizer(self.tokenizer.decode, self.tokens[start:end], skip_special_tokens=self.skip_special)
        return text


class StopStrings:
    """Passes text on up to the first stop string, and holds back text that may begin one."""

    def __init__(self, words: "Sequence[str]") -> None:
        self.words: "dict[str, list[str]]" = {}  # by their first character
        for word in words:
            self.words.setdefault(word[0], []).append(word)
        self.held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Return the text that can be emitted now; set `matched` at a complete stop string, which ends it."""
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
        """Return the text that was held back and did not become a stop string."""
        shown, self.held = self.held, ""
        return shown


class Spelling:
    """Spells the tokens of one sequence for log-probabilities: each as it is written after the one before it.

    Together the spellings are the sequence's text, including spaces that clean-up removes, with U+FFFD for parts of
    characters. `hidden`: tokens that the text leaves out; `before`: the tokens that the sequence continues.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: "Collection[int]", before: "Sequence[int]" = ()) -> None:
        self.tokenizer, self.hidden = tokenizer, hidden
        self.before = next((token for token in reversed(before[-CONTEXT:]) if token not in hidden), None)

    def __call__(self, tokens: "Sequence[int]") -> "dict[int, str]":
        """Return the texts of `tokens`: the next token, which is the first of them, and its alternatives."""
        written = None if self.before is None else self._decode([self.before])
        texts = {token: self._spelled(token, written) for token in tokens}
        if tokens[0] not in self.hidden:
            self.before = tokens[0]
        return texts

    def _spelled(self, token: int, written: "str | None") -> str:
        """Return the text of `token` after the token before it, which alone is `written`."""
        if self.before is None or written is None:  # a text begins without the space of its first word
            return self._decode([token])
        if written.endswith(BROKEN):  # half a character, which this token may complete
            return self._decode([token, token])[len(self._decode([token])) :]
        return self._decode([self.before, token])[len(written) :]

    def _decode(self, tokens: "list[int]") -> str:
        text: str = call_tokenizer(self.tokenizer.decode, tokens, skip_special_tokens=False)
        return text
