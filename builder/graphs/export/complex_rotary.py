"""Rotary position embeddings that an architecture writes as products of complex numbers, which ONNX does not have.

A pair of neighbours in a head is the real and the imaginary part of a number that is turned: the same rotation as by
cosines and sines, interleaved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from builder.graphs.export.rotary import emit_rotation


class Angles(NamedTuple):
    """Cosines and sines, (batch, sequence, head size) each, in place of complex numbers."""

    cos: torch.Tensor
    sin: torch.Tensor

    def to(self, device: torch.device) -> Angles:
        return self


def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Angles:
    """Take the place of `forward` of a rotary embedding. position_ids: (batch, sequence)."""
    turned = (position_ids[..., None].float() * self.inv_freq).repeat_interleave(2, dim=-1)
    return Angles(turned.cos() * self.attention_scaling, turned.sin() * self.attention_scaling)


def rotate_pairs(query: torch.Tensor, key: torch.Tensor, by: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `query` and `key`, (batch, heads, sequence, head size), rotated."""
    return emit_rotation(query, *by, interleaved=True), emit_rotation(key, *by, interleaved=True)
