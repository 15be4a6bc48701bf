"""The fused attention over a cache supports causal masks and sliding windows; other masks are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from builder.common.errors import ExportError
from builder.graphs.export.masks import Causal, band_of, chunks_within, describe, unchanged


def test_causal_mask_has_no_window() -> None:
    assert describe(mask_function=masks.causal_mask_function, batch_size=2, q_length=7) == Causal()


@pytest.mark.parametrize("window", [1, 2, 16, 4096, 131072])
def test_window_is_read_from_the_mask(window: int) -> None:
    function = masks.sliding_window_causal_mask_function(window)
    assert describe(mask_function=function, local_size=window) == Causal(window)


@pytest.mark.parametrize("size", [2, 16, 8192])
def test_chunks_are_read_from_the_mask(size: int) -> None:
    """Transformers counts chunks from the end of the padding, in a tensor whose values a trace does not have."""
    with chunks_within(size + 1):
        function = masks.chunked_causal_mask_function(size, torch.empty(3, dtype=torch.long, device="meta"))
    assert describe(mask_function=function, local_size=size) == Causal(chunk=size)
    with chunks_within(size):
        function = masks.chunked_causal_mask_function(size, torch.zeros(3, dtype=torch.long))
    assert describe(mask_function=function, local_size=size) == Causal(), "no row leaves its first chunk"


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (masks.chunked_causal_mask_function(17, torch.zeros(1, dtype=torch.long)), 16),
        (masks.chunked_causal_mask_function(16, torch.ones(1, dtype=torch.long)), 16),
        (masks.sliding_window_causal_mask_function(17), 16),
        (masks.sliding_window_bidirectional_mask_function(16), 16),
        (masks.or_masks(masks.causal_mask_function, masks.bidirectional_mask_function), None),
        (masks.and_masks(masks.causal_mask_function, masks.sliding_window_overlay(16)), None),
        (masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(torch.ones(1, 4).bool())), 4),
    ],
)
def test_mask_of_another_kind_is_refused(function: Any, size: int | None) -> None:
    with pytest.raises(ExportError, match="neither causal nor one of windows or chunks"):
        describe(mask_function=function, local_size=size)


@pytest.mark.parametrize("change", [lambda m: m[:, :, :, :4], lambda m: m + 1.0, lambda m: m.to(torch.bool)])
def test_changed_mask_is_refused(change: Any) -> None:
    with pytest.raises(ExportError, match="changes the mask"):
        change(Causal(16))


def test_attention_without_a_mask_is_refused() -> None:
    assert unchanged(Causal(5), 0) == Causal(5)
    with pytest.raises(ExportError, match="layer 3 gets no causal mask"):
        unchanged(None, 3)
    with pytest.raises(ExportError, match="layer 0 gets a mask of its own"):
        unchanged(torch.zeros(1, 1, 4, 4), 0)


@pytest.mark.parametrize("band", [1, 2, 16, 128])
def test_band_is_read_from_the_mask(band: int) -> None:
    assert band_of(masks.sliding_window_bidirectional_mask_function(band), band) == band


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (masks.bidirectional_mask_function, None),
        (masks.sliding_window_causal_mask_function(16), 16),
        (masks.sliding_window_bidirectional_mask_function(17), 16),
        (masks.sliding_window_bidirectional_mask_function(15), 16),
        (masks.and_masks(masks.bidirectional_mask_function, masks.padding_mask_function(torch.ones(1, 4).bool())), 4),
    ],
)
def test_masks_of_another_kind_are_no_band(function: Any, size: int | None) -> None:
    assert band_of(function, size) is None
