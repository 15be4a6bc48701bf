"""List the tokens of a text for a client that requests them instead of an answer.

Knows the tokenizers library; knows no task. Positions are characters of the text, as in Text Embeddings Inference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from .fields import Field
from .panics import call_tokenizer

TOKENIZE = Field("tokenize", "TYPE_BOOL", optional=True)
TOKENS = Field("tokens", "TYPE_STRING")


def tokens_of(tokenizer: Tokenizer, texts: "Sequence[Any]", special: bool = True) -> "list[str]":
    """Return, for each text or pair of texts, a JSON list of {id, text, special, start, stop}.

    `special`: include the tokens that the tokeniser adds around a text; they have no positions.
    """
    encodings = call_tokenizer(tokenizer.encode_batch, list(texts), add_special_tokens=special)
    return [json.dumps(_listed(text, encoding), ensure_ascii=False) for text, encoding in zip(texts, encodings)]


def _listed(text: Any, encoding: Encoding) -> "list[dict[str, Any]]":
    parts = (text,) if isinstance(text, str) else text
    columns = encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, encoding.sequence_ids
    listed = []
    for token, written, special, (start, stop), sequence in zip(*columns):  # an encoding copies a column that is read
        entry = {"id": token, "text": written, "special": True, "start": None, "stop": None}
        if not special:
            part = parts[sequence or 0]
            entry.update(text=part[start:stop], special=False, start=start, stop=stop)
        listed.append(entry)
    return listed


def tokens_of_ids(tokenizer: Tokenizer, ids: "Sequence[int]") -> str:
    """Return the same list for token ids, which have no positions in a text."""
    texts = [call_tokenizer(tokenizer.decode, [token], skip_special_tokens=False) for token in ids]
    nowhere = {"start": None, "stop": None}
    special = {token for token, added in call_tokenizer(tokenizer.get_added_tokens_decoder).items() if added.special}
    tokens = [{"id": token, "text": text, "special": token in special, **nowhere} for token, text in zip(ids, texts)]
    return json.dumps(tokens, ensure_ascii=False)
