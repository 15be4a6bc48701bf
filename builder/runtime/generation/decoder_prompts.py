"""Turn a request's prompt into the tokens that a decoder continues.

Knows the tokeniser; does not know how an answer is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from ..contract import GenerationServing
from ..fields import InputError
from ..panics import call_tokenizer
from ..tokens import tokens_of, tokens_of_ids
from .options import RequestOptions
from .prompts import Prompt, token_ids


def open_prompts(serving: GenerationServing, tokenizer: Tokenizer) -> "DecoderPrompts":
    """Return the prompts of the model that serving.json describes."""
    return DecoderPrompts(serving.arena.length, tokenizer, serving.fill)


class DecoderPrompts:
    """Prompts of a decoder without a chat template: texts or token ids."""

    def __init__(self, length: int, tokenizer: Tokenizer, fill: "str | None" = None) -> None:
        """Prepare prompts for a cache of `length` tokens, prompt and answer together; `fill` marks a gap to fill in."""
        self.tokenizer = tokenizer
        self.fill = fill
        self.longest = length - 1

    def __call__(self, options: RequestOptions) -> Prompt:
        """Return the prompt. Raises InputError for a gap, too many tokens, or a chat without a template."""
        if options.input_ids:  # their text is needed only where it is repeated
            return self._fitting(self._decoded(options, False) if options.echo else "", options.input_ids)
        text, special = self._text(options)
        prompt = self._fitting(text, token_ids(self.tokenizer, [text], special)[0])
        return replace(prompt, thinking=self._ends_in_reasoning(text, options))

    def tokens(self, options: RequestOptions) -> "tuple[str, str]":
        """Return the text of a prompt of any length, and its tokens as JSON. Raises InputError without a template."""
        if options.input_ids:
            text = self._decoded(options, options.skip_special_tokens)
            return text, tokens_of_ids(self.tokenizer, options.input_ids)
        text, special = self._text(options)
        return text, tokens_of(self.tokenizer, [text], special)[0]

    def _text(self, options: RequestOptions) -> "tuple[str, bool]":
        """Return a prompt's text, and True if the tokeniser adds its special tokens; a rendered chat has them."""
        text, special = self._rendered(options)
        if self.fill is not None and self.fill in text:
            raise InputError(
                f"the prompt has {self.fill}, at which this checkpoint's tokeniser parts a text to be filled in, which "
                "is not supported; send the tokens that it makes of it as input_ids"
            )
        return text, special

    def _rendered(self, options: RequestOptions) -> "tuple[str, bool]":
        if options.messages is not None:
            raise InputError("this checkpoint has no chat template; send the prompt as text_input")
        return options.prompt, True

    def _ends_in_reasoning(self, text: str, options: RequestOptions) -> bool:
        """Return True if the prompt ends within reasoning, which the answer continues."""
        return False

    def _decoded(self, options: RequestOptions, skip_special: bool) -> str:
        text: str = call_tokenizer(self.tokenizer.decode, list(options.input_ids), skip_special_tokens=skip_special)
        return text

    def _fitting(self, text: str, tokens: "Sequence[int]") -> Prompt:
        if not 1 <= len(tokens) <= self.longest:
            raise InputError(
                f"the prompt has {len(tokens)} tokens; this model takes 1 to {self.longest}, so that one can follow"
            )
        return Prompt(text, tuple(tokens))
