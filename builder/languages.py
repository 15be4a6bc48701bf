"""The languages of a multilingual tokeniser: which tokens a text in one of them is put between.

Knows tokenisers; knows no architecture and no task.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerFast

CODE = re.compile(r"[a-z]{2,3}_[A-Za-z]{2,4}")  # en_XX, eng_Latn


def languages(tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, Any]]:
    """By code: the tokens `before` and `after` a text in it, and the token that an answer in it has `first`.

    Empty for a tokeniser whose texts need no language.
    """
    if not hasattr(tokenizer, "src_lang"):
        return {}
    own = tokenizer.src_lang
    found = {}
    try:
        for code in filter(CODE.fullmatch, sorted(tokenizer.get_vocab())):
            token = tokenizer.convert_tokens_to_ids(code)
            if token not in tokenizer.all_special_ids:
                continue
            tokenizer.src_lang = code
            before, after = list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens)
            found[code] = {"before": before, "after": after, "first": token}
    finally:
        tokenizer.src_lang = own
    return found


def nearest(code: str | None, known: dict[str, dict[str, Any]]) -> str | None:
    """The one known code that `code` means: "en" is en_XX where there is no other English; None where none is."""
    if code is None or code in known:
        return code
    found = [name for name in known if name.split("_")[0] == code]
    return found[0] if len(found) == 1 else None
