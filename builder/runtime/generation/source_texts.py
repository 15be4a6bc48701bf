"""Turn a request's text into the tokens that the encoder of an encoder-decoder reads.

Knows the tokeniser and languages; does not know how an answer is generated.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from ..contract import EncoderInput, GenerationServing, Language
from ..fields import InputError
from .options import RequestOptions
from .prompts import Prompt, token_ids


def open_prompts(serving: GenerationServing, tokenizer: Tokenizer) -> "SourceTexts":
    """Return the prompts of the model that serving.json describes."""
    assert serving.source is not None
    return SourceTexts(serving.source, tokenizer)


class SourceTexts:
    """Prompts of an encoder-decoder: a text with the checkpoint's task prefix, or its language's tokens."""

    def __init__(self, source: EncoderInput, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.source = source

    def __call__(self, options: RequestOptions) -> Prompt:
        """Return the prompt. Raises InputError if it exceeds the encoder's limit or names an unknown language."""
        source = self.source
        target: "Language | None" = None
        source_code = options.source_language or source.source_language
        target_code = options.target_language or source.target_language
        text = source.prefix + options.prompt
        if source.pairs:
            text = self._pair(source_code, target_code) + options.prompt
        if source.languages:
            language = self._language("source_language", source_code)
            ids = token_ids(self.tokenizer, [text], special=False)[0]
            tokens = [*language.before, *ids, *language.after]
            target = self._language("target_language", target_code)
        else:
            tokens = token_ids(self.tokenizer, [text], special=True)[0]
        if len(tokens) > source.max_length:
            raise InputError(
                f"the text has {len(tokens)} tokens; this model reads at most {source.max_length}. Send less of it, "
                "or build the model with a larger --max-length, where its positions allow it"
            )
        start, first = beginning(source, target)
        return Prompt(options.prompt, (start,), tuple(tokens), first)

    def _language(self, name: str, code: "str | None") -> Language:
        known = self.source.languages
        if code is None or code not in known:
            reason = f"{name} is {code!r}" if code else f"{name} is missing"
            raise InputError(f"{reason}; this model knows {', '.join(known)}")
        return known[code]

    def _pair(self, source_code: "str | None", target_code: "str | None") -> str:
        """Return the instruction for a pair of languages. Raises InputError for a pair that the model lacks."""
        pairs = self.source.pairs
        pair = f"{source_code} to {target_code}"
        if pair in pairs:
            return pairs[pair]
        missing = [
            name for name, code in (("source_language", source_code), ("target_language", target_code)) if code is None
        ]
        found = (
            f"{missing[0]} is missing"
            if missing
            else f"source_language is {source_code!r} and target_language is {target_code!r}"
        )
        raise InputError(f"{found}; this model knows {', '.join(pairs)}")


def beginning(source: EncoderInput, target: "Language | None") -> "tuple[int, int | None]":
    """Return the token that an answer starts from and the one forced after it: one of the two is the language's token.

    It is the first if the checkpoint's own start is a language's token: such answers have no other token before their
    text.
    """
    if target is None:
        return source.start, source.first
    if source.start in [language.first for language in source.languages.values()]:
        return target.first, source.first
    return source.start, target.first
