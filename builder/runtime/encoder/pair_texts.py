"""Write a query and a document into the pieces of a reranker's chat template.

Knows texts and token ids; knows nothing about tasks or engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def render_pair(pieces: Sequence[Mapping[str, Any]], fields: Mapping[str, str]) -> str:
    """Return the text of a pair: each piece is a text, or the name of a field, whose spaces around it may go."""
    parts = []
    for piece in pieces:
        text = piece["text"] if "text" in piece else fields[piece["field"]]
        parts.append(text.strip() if piece.get("strip") else text)
    return "".join(parts)


def common_end(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the longest end that two rows of tokens share; nothing if one is the end of the other."""
    shared = 0
    for left, right in zip(reversed(first), reversed(second)):
        if left != right:
            break
        shared += 1
    return [] if shared == min(len(first), len(second)) else list(first[len(first) - shared :])
