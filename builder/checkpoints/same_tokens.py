"""Compare two tokenizers: the tokens of a text and their ids."""

from __future__ import annotations

import json

from transformers import PreTrainedTokenizerFast

PARTS = ("normalizer", "pre_tokenizer", "model")  # of tokenizer.json: they decide where a text is cut


def vocabulary_difference(own: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> str | None:
    """Return how the tokenizer `own` differs from `other`, in words; None if it does not."""
    ids, others = own.get_vocab(), other.get_vocab()
    strange = min(ids.items() ^ others.items(), key=lambda entry: (entry[1], entry[0]), default=None)
    if strange is not None:
        token = strange[0]
        return f"the id of {token!r} is {ids.get(token)}, not {others.get(token)} (of {len(ids)} and {len(others)})"
    documents = [json.loads(one.backend_tokenizer.to_str()) for one in (own, other)]
    part = next((part for part in PARTS if documents[0][part] != documents[1][part]), None)
    return None if part is None else f"its tokenizer.json has another {part}"
