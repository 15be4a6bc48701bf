"""Masks of a decoder's queries: transformers' description, as far as the fused operator supports it.

transformers describes a mask by a function of positions and hands the mask made from it to every attention. Here that
is `Causal`, which says the one thing that the operator needs: the window. A mask of another kind is refused, as is an
attention that changes its mask or gets none. Knows positions; knows no architecture and no task.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from builder.common.errors import ExportError

MaskFunction = Callable[..., torch.Tensor]
NO_OPERATOR = "the fused attention over a cache is causal, with a sliding window or without, and can do no other"


@dataclass(frozen=True)
class Causal:
    """Mask in which each token sees those up to itself; with a window, only so many of the last, itself included."""

    window: int | None = None

    def _changed(self, *arguments: Any) -> NoReturn:
        raise ExportError(f"its attention changes the mask that it is given; {NO_OPERATOR}")

    __getattr__ = __getitem__ = __add__ = __radd__ = __mul__ = __invert__ = __and__ = __or__ = _changed


def describe(*, mask_function: MaskFunction, local_size: int | None = None, **options: Any) -> Causal | None:
    """Describe a mask for transformers' mask interface; None for a mask that hides nothing.

    Raises ExportError for any other kind. `local_size` comes with windows and with chunks, and `mask_function` tells
    them apart: it is evaluated at the positions around the edges of a window.
    """
    if mask_function is bidirectional_mask_function:
        return None
    if mask_function is causal_mask_function:
        return Causal()
    if local_size is not None and _is_window(mask_function, local_size):
        return Causal(int(local_size))
    reach = "" if local_size is None else f" (it reaches over {local_size} tokens)"
    raise ExportError(f"its mask is neither causal nor a sliding window{reach}; {NO_OPERATOR}")


def window_of(mask: Any, layer: int | None) -> int | None:
    """Return the window of the mask that arrived at layer `layer`. Raises ExportError if it is no longer `Causal`."""
    if not isinstance(mask, Causal):
        found = "no causal mask" if mask is None else "a mask of its own"
        raise ExportError(f"the attention of layer {layer} gets {found}; {NO_OPERATOR}")
    return mask.window


def _is_window(mask_function: MaskFunction, window: int) -> bool:
    with ThreadPoolExecutor(1) as plain:  # torch.export traces this thread; another one computes
        try:
            return plain.submit(_agrees, mask_function, window).result()
        except Exception:  # it looks at tensors of the call, such as padding: more than a window
            return False


def _agrees(mask_function: MaskFunction, window: int) -> bool:
    near = (-1, 0, 1)
    edges = sorted({max(0, times * window + step) for times in (0, 1, 2, 3) for step in near} | {window // 2})
    query, key = torch.tensor(edges)[:, None], torch.tensor(edges)[None]
    first = torch.tensor(0)
    seen = mask_function(first, first, query, key)
    return bool(torch.equal(seen, (key <= query) & (key > query - window)))
