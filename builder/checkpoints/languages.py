"""Languages of a multilingual tokenizer: the tokens around a text in each of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedTokenizerFast

from builder.runtime.contract import Language

CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # en_XX, eng_Latn


def languages(tokenizer: PreTrainedTokenizerFast) -> dict[str, Language]:
    """Return, by code, the tokens that tell a model a language.

    Empty for a tokenizer whose texts need no language.
    """
    if not hasattr(tokenizer, "src_lang"):
        return {}
    own = tokenizer.src_lang
    by_code = {}
    try:
        for code in filter(CODE.fullmatch, sorted(tokenizer.get_vocab())):
            token = tokenizer.convert_tokens_to_ids(code)
            if token not in tokenizer.all_special_ids:
                continue
            tokenizer.src_lang = code
            before, after = list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens)
            by_code[code] = Language(before, after, token)
    finally:
        tokenizer.src_lang = own
    return by_code


def nearest(code: str | None, known: Mapping[str, Language]) -> str | None:
    """Return the one known code that `code` means, or None: "en" is en_XX if there is no other English."""
    if code is None or code in known:
        return code
    candidates = [name for name in known if name.split("_")[0] == code]
    return candidates[0] if len(candidates) == 1 else None
