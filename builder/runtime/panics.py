"""Turn a panic of the tokenizers library into an ordinary error: it is a BaseException, which would end its thread.

A tokenizer.json can cause one (a regular expression that gives up on some text, a pre-tokeniser of size 0). Standard
library only, because builds try tokenizers in a process of their own (builder/checkpoints/tokenizer_probe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TokenizerError(RuntimeError):
    """The model's own tokeniser failed on this text, or on these tokens."""


def call_tokenizer(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of `call`, a function of the tokenizers library. Raises TokenizerError if it fails."""
    try:
        return call(*arguments, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # not a panic: the program is to exit
        reason = str(error).splitlines() or [type(error).__name__]
        raise TokenizerError(f"the model's tokenizer fails here: {reason[0][:200]}") from None
