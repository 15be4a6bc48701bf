"""Join texts into one document, and find which of its tokens are whose: late chunking.

The model reads the document at once, so that a token knows the texts before and after its own; each text is then the
mean of its tokens. Source: https://arxiv.org/abs/2409.04701, and its authors' code (jina-ai/late-chunking,
chunked_pooling/wrappers.py), where the tokens before the first text and after the last one are theirs, too. A document
of one text therefore has the embedding that the text has without late chunking.

Knows encodings; knows nothing about tasks or engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding

from .windows import frame


def joined(prompt: str, texts: Sequence[str]) -> "tuple[str, list[int]]":
    """Return the document, and where each text ends in it: between texts is a space, unless one is there."""
    document, ends = prompt, []
    for number, text in enumerate(texts):
        is_apart = number == 0 or document[-1:].isspace() or text[:1].isspace()
        document += text if is_apart else f" {text}"
        ends.append(len(document))
    return document, ends


def chunks_of(encoding: Encoding, ends: Sequence[int]) -> np.ndarray:
    """Return the number of the text that each token is of, (tokens,): the one in which its last character lies.

    `encoding`: of the whole document, with special tokens and offsets.
    """
    first, last = frame(encoding, 0)
    places = np.array([end for _, end in encoding.offsets], np.int64)
    chunks = np.searchsorted(np.asarray(ends), places)
    chunks[:first], chunks[last:] = 0, len(ends) - 1
    return np.minimum(chunks, len(ends) - 1)
