"""Masks of queries: transformers' description, as far as fused operators support it.

transformers describes a mask by a function of positions and hands the mask made from it to every attention. For a
causal mask that is `Causal` here, which says what the operator needs: the window, or the size of chunks. Over a cache,
a mask of another kind is refused, as is an attention that changes its mask or gets none. Knows positions; knows no
architecture and no task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from builder.common.errors import ExportError
from builder.common.replaced import replaced

MaskFunction = Callable[..., torch.Tensor]
USUAL_WINDOW = 4096  # tokens: no overlay without a window of its own reaches farther
NO_OPERATOR = "the fused attention over a cache is causal, whole, in windows or in chunks, and can do no other"


@dataclass(frozen=True)
class Causal:
    """Mask in which each token sees those up to itself.

    `window`: how many of the last tokens it sees, itself included; `chunk`: the size of the chunks beyond whose
    beginning it does not see.
    """

    window: int | None = None
    chunk: int | None = None

    def _changed(self, *arguments: Any) -> NoReturn:
        raise ExportError(f"its attention changes the mask that it is given; {NO_OPERATOR}")

    __getattr__ = __getitem__ = __add__ = __radd__ = __mul__ = __invert__ = __and__ = __or__ = _changed


def describe(*, mask_function: MaskFunction, local_size: int | None = None, **options: Any) -> Causal | None:
    """Describe a mask for transformers' mask interface; None for a mask that hides nothing.

    Raises ExportError for any other kind.
    """
    if mask_function is bidirectional_mask_function:
        return None
    causal = causal_of(mask_function, local_size)
    if causal is not None:
        return causal
    reach = "" if local_size is None else f" (it reaches over {local_size} tokens)"
    raise ExportError(f"its mask is neither causal nor one of windows or chunks{reach}; {NO_OPERATOR}")


@contextmanager
def chunks_within(max_length: int) -> Iterator[None]:
    """Run with chunks counted from the first token, and none where rows of `max_length` tokens do not leave the first.

    transformers counts them from the end of a row's padding, a tensor of the call; rows over a cache have none before
    their tokens.
    """
    chunked, no_padding = masking_utils.chunked_causal_mask_function, torch.zeros(1, dtype=torch.int64)

    def within(chunk_size: int, left_padding: torch.Tensor) -> MaskFunction:
        return causal_mask_function if chunk_size >= max_length else chunked(chunk_size, no_padding)

    with replaced((masking_utils, chunked.__name__, within)):
        yield


def unchanged(mask: Any, layer: int | None) -> Causal:
    """Return the mask that arrived at layer `layer`. Raises ExportError if it is no longer `Causal`."""
    if not isinstance(mask, Causal):
        found = "no causal mask" if mask is None else "a mask of its own"
        raise ExportError(f"the attention of layer {layer} gets {found}; {NO_OPERATOR}")
    return mask


def causal_of(mask_function: MaskFunction, local_size: int | None = None) -> Causal | None:
    """Return the causal mask that `mask_function` describes; None for any other kind.

    `local_size` comes with windows and with chunks, and `mask_function` tells them apart: it is evaluated at the
    positions around the edges of a window.
    """
    if mask_function is causal_mask_function:
        return Causal()
    if local_size is not None and _is_window(mask_function, local_size):
        return Causal(window=int(local_size))
    if local_size is not None and _is_chunk(mask_function, local_size):
        return Causal(chunk=int(local_size))
    return None


def band_of(mask_function: MaskFunction, local_size: int | None) -> int | None:
    """Return how many tokens on each side a token sees; None if `mask_function` describes another mask."""
    if local_size is None:
        return None
    band = int(local_size)
    edges = sorted({*_edges(band), *_edges(band + 1)})
    return band if _agrees(mask_function, edges, lambda query, key: (query - key).abs() <= band) else None


def hides_nothing(mask_function: MaskFunction, local_size: int | None = None) -> bool:
    """Return True if every query sees every key, as far as positions around the edges of a window show."""
    if mask_function is bidirectional_mask_function:
        return True
    edges = _edges(USUAL_WINDOW if local_size is None else local_size)
    return _agrees(mask_function, edges, lambda query, key: torch.ones_like(query - key, dtype=torch.bool))


def _is_window(mask_function: MaskFunction, window: int) -> bool:
    return _agrees(mask_function, _edges(window), lambda query, key: (key <= query) & (key > query - window))


def _is_chunk(mask_function: MaskFunction, size: int) -> bool:
    return _agrees(mask_function, _edges(size), lambda query, key: (key <= query) & (key >= query - query % size))


def _edges(window: int) -> list[int]:
    return sorted({max(0, times * window + step) for times in (0, 1, 2, 3) for step in (-1, 0, 1)} | {window // 2})


def _agrees(
    mask_function: MaskFunction, positions: list[int], expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> bool:
    """Return True if `mask_function` lets the same keys be seen as `expected`, at these positions of both."""

    def agrees() -> bool:
        query, key, first = torch.tensor(positions)[:, None], torch.tensor(positions)[None], torch.tensor(0)
        seen = mask_function(first, first, query, key)
        return bool(torch.equal(seen, expected(query, key)))

    with ThreadPoolExecutor(1) as plain:  # torch.export traces this thread; another one computes
        try:
            return plain.submit(agrees).result()
        except Exception:  # it looks at tensors of the call, such as padding: more than positions
            return False
