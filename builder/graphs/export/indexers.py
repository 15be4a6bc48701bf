"""Disable the indexers of DeepSeek Sparse Attention (DeepSeek-V3.2) for texts in which they choose every key.

An indexer scores all keys for each token and lets it see the best `index_topk`. A text of no more tokens has no other
keys: its attention is full, and the indexer need not run. Knows modules by the name of that number; knows no
architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from builder.common.errors import ExportError
from builder.common.replaced import replaced
from builder.graphs.export.masks import Causal


@contextmanager
def disabled_indexers(model: PreTrainedModel, max_length: int) -> Iterator[None]:
    """Run without indexers, for texts of up to `max_length` tokens.

    Raises ExportError if an indexer leaves keys of such a text out.
    """
    indexers = [one for one in model.modules() if type(one).__name__.endswith("Indexer") and hasattr(one, "index_topk")]
    chosen = min((int(module.index_topk) for module in indexers), default=max_length)
    if chosen < max_length:
        raise ExportError(
            f"each of its tokens sees the {chosen} keys that an index chooses, and the fused attention over a cache "
            f"sees all: build it for texts that have no more, with --max-length {chosen} or less"
        )
    masks = [(Causal, "__getitem__", lambda mask, part: mask)] if indexers else []  # models cut the mask for them
    with replaced(*masks, *((kind, "forward", _choose_none) for kind in {type(module) for module in indexers})):
        yield


def _choose_none(self: Any, *arguments: Any, **options: Any) -> None:
    """Return no choice of keys."""
