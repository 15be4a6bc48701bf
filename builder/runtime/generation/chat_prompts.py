"""Turn a request's prompt or chat into the tokens that a decoder with a chat template continues."""

from __future__ import annotations

from tokenizers import Tokenizer

from ..contract import Chat, GenerationServing
from ..fields import InputError
from .chat import ChatTemplate
from .checking import refuse_half_characters
from .decoder_prompts import DecoderPrompts
from .options import RequestOptions


def open_prompts(serving: GenerationServing, tokenizer: Tokenizer) -> "ChatPrompts":
    """Return the prompts of the model that serving.json describes."""
    assert serving.chat is not None
    return ChatPrompts(serving.arena.length, serving.chat, tokenizer, serving.fill)


class ChatPrompts(DecoderPrompts):
    """Prompts of a decoder with a chat template: also messages, rendered with it."""

    def __init__(self, length: int, chat: Chat, tokenizer: Tokenizer, fill: "str | None" = None) -> None:
        super().__init__(length, tokenizer, fill)
        self.chat = ChatTemplate(chat.template, chat.special_tokens, chat.tool_template)
        self.thinking = chat.thinking

    def _rendered(self, options: RequestOptions) -> "tuple[str, bool]":
        if options.messages is None:
            return options.prompt, True
        if options.tools and not (self.chat.supports_tools or self.chat.problem):
            raise InputError("this checkpoint's chat template does not know tools; describe them in a message")
        variables = self.chat.variables(options.chat_template_kwargs, options.reasoning_effort)
        if options.guide and self.thinking is not None:
            variables = {**self.chat.without_thinking, **variables}
        text = self.chat(options.messages, options.tools, variables, continues=options.continue_final_message)
        refuse_half_characters("messages", text)
        if options.guide and self.thinking is not None and self._ends_in_reasoning(text, options):
            text = f"{text.rstrip()}\n\n{self.thinking.end}\n\n"  # the guide describes the answer without reasoning
        return text, False

    def _ends_in_reasoning(self, text: str, options: RequestOptions) -> bool:
        """Return True if a rendered chat ends within reasoning, which the template or a continued message began."""
        if self.thinking is None or options.messages is None:
            return False
        if not options.continue_final_message:
            return text.rstrip().endswith(self.thinking.begin)
        said = str(options.messages[-1].get("content"))
        return said.rfind(self.thinking.begin) > said.rfind(self.thinking.end)
