"""Turn a request's prompt or chat into the tokens that a decoder continues.

Knows the tokeniser and chat templates; does not know how an answer is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from ..contract import Chat, GenerationServing
from ..fields import InputError
from ..panics import call_tokenizer
from ..tokens import tokens_of, tokens_of_ids
from .chat import ChatTemplate
from .checking import refuse_half_characters
from .options import RequestOptions
from .prompts import Prompt, token_ids


def open_prompts(serving: GenerationServing, tokenizer: Tokenizer) -> "DecoderPrompts":
    """Return the prompts of the model that serving.json describes."""
    return DecoderPrompts(serving.arena.length, serving.chat, tokenizer, serving.fill)


class DecoderPrompts:
    """Prompts of a decoder: a text, or messages rendered with the checkpoint's chat template."""

    def __init__(self, length: int, chat: "Chat | None", tokenizer: Tokenizer, fill: "str | None" = None) -> None:
        """Prepare prompts for a cache of `length` tokens, prompt and answer together; `fill` marks a gap to fill in."""
        self.tokenizer = tokenizer
        self.fill = fill
        self.longest = length - 1
        self.chat = None
        self.thinking = None if chat is None else chat.thinking
        if chat is not None:
            self.chat = ChatTemplate(chat.template, chat.special_tokens, chat.tool_template)

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
        if options.messages is None:
            return options.prompt, True
        if self.chat is None:
            raise InputError("this checkpoint has no chat template; send the prompt as text_input")
        if options.tools and not (self.chat.takes_tools or self.chat.problem):
            raise InputError("this checkpoint's chat template does not know tools; describe them in a message")
        variables = self.chat.variables(options.chat_template_kwargs, options.reasoning_effort)
        if options.guide and self.thinking is not None:
            variables = {**self.chat.without_thinking, **variables}
        text = self.chat(options.messages, options.tools, variables, continues=options.continue_final_message)
        refuse_half_characters("messages", text)
        if options.guide and self.thinking is not None and self._ends_in_reasoning(text, options):
            text = (
                f"{text.rstrip()}\n\n{self.thinking.end}\n\n"  # a guide says what comes first, which is not reasoning
            )
        return text, False

    def _ends_in_reasoning(self, text: str, options: RequestOptions) -> bool:
        """Return True if a rendered chat ends within reasoning, which the template or a continued message began."""
        if self.thinking is None or options.messages is None:
            return False
        if not options.continue_final_message:
            return text.rstrip().endswith(self.thinking.begin)
        said = str(options.messages[-1].get("content"))
        return said.rfind(self.thinking.begin) > said.rfind(self.thinking.end)

    def _decoded(self, options: RequestOptions, skip_special: bool) -> str:
        text: str = call_tokenizer(self.tokenizer.decode, list(options.input_ids), skip_special_tokens=skip_special)
        return text

    def _fitting(self, text: str, tokens: "Sequence[int]") -> Prompt:
        if not 1 <= len(tokens) <= self.longest:
            raise InputError(
                f"the prompt has {len(tokens)} tokens; this model takes 1 to {self.longest}, so that one can follow"
            )
        return Prompt(text, tuple(tokens))
