"""Experts in mxfp4, as gpt-oss is published: numbers of 4 bits (e2m1), and an exponent (e8m0) for 32 of them.

OCP Microscaling Formats, version 1.0. A byte has two numbers, the first in its low half; a number is its e2m1 value
times 2 to its exponent less 127. `<name>_blocks` is (experts, outputs, blocks, 16) and `<name>_scales` (experts,
outputs, blocks), both uint8; transformers has the weight as (experts, inputs, outputs) (integrations/mxfp4.py, 5.23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from builder.checkpoints.mapped import WrittenTensor
from builder.common.errors import CheckpointError

MXFP4 = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
BYTES = 16  # of the numbers of a block
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([E2M1, -E2M1])
LARGEST_EXPONENT = 252  # as stored: 6 * 2 ** (252 - 127) is the most that float32 holds; 255 is no number


def unpacked_experts(tensors: Mapping[str, Any]) -> dict[str, WrittenTensor]:
    """Return the weights of packed experts by name, in fp32; `tensors`: the open file of each tensor by its name.

    Raises CheckpointError if an expert lacks a part or its parts do not fit.
    """
    names = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    return {name: _written(name, tensors) for name in names}


def _written(name: str, tensors: Mapping[str, Any]) -> WrittenTensor:
    if f"{name}{SCALES}" not in tensors:
        raise CheckpointError(f"{name} has {BLOCKS[1:]} but no {SCALES[1:]}: the checkpoint is incomplete")
    blocks, scales = (tensors[f"{name}{part}"].get_tensor(f"{name}{part}") for part in (BLOCKS, SCALES))
    if blocks.ndim != 4 or blocks.shape[3] != BYTES or blocks.shape[:3] != scales.shape:
        raise CheckpointError(
            f"the parts of {name} do not fit: blocks are {tuple(blocks.shape)} and scales {tuple(scales.shape)}; "
            f"expected (experts, outputs, blocks, {BYTES}) and (experts, outputs, blocks)"
        )

    def pieces() -> Iterator[torch.Tensor]:
        for codes, exponents in zip(blocks, scales, strict=True):
            yield torch.from_numpy(_numbers(name, codes.numpy(), exponents.numpy()))

    experts, outputs, count, _ = blocks.shape
    return WrittenTensor((experts, count * BYTES * 2, outputs), pieces)


def _numbers(name: str, codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Return one expert's weights, (inputs, outputs) float32."""
    if exponents.max(initial=0) > LARGEST_EXPONENT:
        raise CheckpointError(f"{name} has an exponent of {exponents.max()}: its weights are no numbers of float32")
    numbers = np.stack([VALUES[codes & 15], VALUES[codes >> 4]], axis=-1).reshape(*exponents.shape, -1)
    numbers *= np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)[..., None]
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1).T)
