"""Attention to the keys that an index chooses (DeepSeek Sparse Attention, as in DeepSeek-V3.2), where it chooses all.

An index scores all keys for each token and lets it see the best `index_topk`. A text that is no longer has no other
keys, so that attention is the plain one, and its index need not run. Knows modules by the name of that number; knows
no architecture.
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
def every_key_chosen(model: PreTrainedModel, max_length: int) -> Iterator[None]:
    """Run with indexes that choose nothing, for texts of up to `max_length` tokens.

    Raises ExportError if an index leaves keys of such a text out.
    """
    indexes = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    chosen = min((int(module.index_topk) for module in indexes if hasattr(module, "index_topk")), default=max_length)
    if chosen < max_length:
        raise ExportError(
            f"each of its tokens sees the {chosen} keys that an index chooses, and the fused attention over a cache "
            f"sees all: build it for texts that have no more, with --max-length {chosen} or less"
        )
    kinds = {type(module) for module in indexes if hasattr(module, "index_topk")}
    masks = [(Causal, "__getitem__", _itself)] if kinds else []  # what an index gets of the mask
    with replaced(*masks, *((kind, "forward", _nothing) for kind in kinds)):
        yield


def _nothing(self: Any, *arguments: Any, **options: Any) -> None:
    """Choose no key among others."""


def _itself(self: Causal, part: Any) -> Causal:
    return self
