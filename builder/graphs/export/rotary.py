"""Rotary position embeddings (arXiv:2104.09864) as one operator per tensor instead of a dozen.

Most architectures of transformers carry a function of their own, `apply_rotary_pos_emb`. It is replaced only if it
computes what the operator computes, on random tensors. Operator: com.microsoft RotaryEmbedding.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from builder.common.errors import ExportError
from builder.common.replaced import replaced
from builder.graphs.export.caches import running_cache

FUNCTION = "apply_rotary_pos_emb"
COMBINED = "recomposition_frequencies"
MAX_POSITION_ROWS = 4  # most rows of positions of a token, of any model


@contextmanager
def fused_rotary(model: PreTrainedModel) -> Iterator[tuple[str, ...]]:
    """Run with the architecture's function replaced, where that is exact; yields the functions that stay unfused."""
    replacements: list[tuple[Any, str, object]] = []
    unfused: list[str] = []
    for owner in {sys.modules[type(part).__module__] for part in model.modules()}:
        original = getattr(owner, FUNCTION, None)
        if original is None or not owner.__name__.startswith("transformers.models."):
            continue
        interleaved = _layout(original)
        if interleaved is None:
            unfused.append(f"{owner.__name__.rsplit('.', 1)[-1]}.{FUNCTION}")
        else:
            replacements.append((owner, FUNCTION, partial(_apply, interleaved)))
    with replaced(*replacements):
        yield tuple(sorted(unfused))


@contextmanager
def equal_positions(model: PreTrainedModel) -> Iterator[None]:
    """Run with one row of positions where a model that reads images counts several (time, height and width).

    They are equal in a text, so that combining their angles takes each from the first row. Source: arXiv:2409.12191,
    multimodal rotary embedding; transformers' classes with `recomposition_frequencies`.
    """
    combining = {type(module): module for module in model.modules() if callable(getattr(module, COMBINED, None))}
    replacements = []
    for kind, module in combining.items():
        original = getattr(kind, COMBINED)
        if list(inspect.signature(original).parameters) != ["self", "freq"]:
            continue  # it has frequencies for each kind of layer
        places = torch.arange(len(module.inv_freq), dtype=torch.float32)
        taken = original(module, places.repeat(MAX_POSITION_ROWS, 1, 1, 1))[0, 0].long()
        replacements.append((kind, COMBINED, lambda self, freq, taken=taken: freq[0][..., taken]))
    with replaced(*replacements):
        yield


@contextmanager
def constant_frequencies(model: PreTrainedModel, max_length: int) -> Iterator[None]:
    """Run with frequencies that do not change with the length of a row.

    Dynamic and long rotary scaling change them once a row exceeds the length of the original training; keys that are
    in a cache already cannot follow. Up to that length they are constant, and right. Raises ExportError beyond it.
    """
    changing = [module for module in model.modules() if any(map(_changes, _kinds(module).values()))]
    for module in changing:
        for layer, kind in _kinds(module).items():
            original = _original_length(module, layer)
            if _changes(kind) and max_length > original:
                raise ExportError(
                    f"its {kind} rotary scaling changes beyond {original} tokens, which a cache cannot follow; "
                    f"build it with --max-length {original} or less"
                )
    kinds: list[Any] = [module.rope_type for module in changing]
    constant = [dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default" for kind in kinds]
    with replaced(*((module, "rope_type", kind) for module, kind in zip(changing, constant, strict=True))):
        yield


def changes_beyond(model: PreTrainedModel) -> int | None:
    """Return after how many tokens frequencies change with the longest row of a call; None if they do not."""
    scaled = [(module, layer) for module in model.modules() for layer, kind in _kinds(module).items() if _changes(kind)]
    return min((_original_length(module, layer) for module, layer in scaled), default=None)


def _kinds(module: Any) -> dict[str | None, str]:
    """Return the scaling of each type of layers, or of all (None)."""
    kind = getattr(module, "rope_type", "default")
    return dict(kind) if isinstance(kind, dict) else {None: str(kind)}


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _original_length(module: Any, layer: str | None) -> int:
    parameters = getattr(module.config, "rope_parameters", None) or {}
    if layer is not None:
        parameters = parameters[layer]
    return int(parameters.get("original_max_position_embeddings") or module.original_max_seq_len)


def _layout(function: Callable[..., Any]) -> bool | None:
    """Return True if `function` rotates neighbours, False if halves; None if it does something else."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn((2, heads, 3, 8), generator=generator) for heads in (4, 2))
    half = torch.randn((2, 3, 4), generator=generator)
    for interleaved in (False, True):
        angles = half.repeat_interleave(2, dim=-1) if interleaved else torch.cat((half, half), dim=-1)
        try:
            results = function(query, key, angles.cos(), angles.sin())
        except Exception:  # another signature: a different function
            return None
        expected = [rotate(tensor, half.cos(), half.sin(), interleaved) for tensor in (query, key)]
        if len(results) == 2 and all(
            a.shape == b.shape and torch.allclose(a, b, atol=1e-6) for a, b in zip(results, expected, strict=True)
        ):
            return interleaved
    return None


def rotate(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Compute the operator on (batch, heads, sequence, size), with cos and sin of (batch, sequence, size / 2)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        a, b = tensor[..., 0::2], tensor[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    a, b = tensor.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _apply(
    interleaved: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return emit_rotation(q, cos, sin, interleaved), emit_rotation(k, cos, sin, interleaved)


def emit_rotation(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Emit one RotaryEmbedding node over (batch, heads, sequence, size); beyond cos's size nothing changes.

    cos, sin: (batch or 1, sequence, size), as transformers gathers them for all layers.
    """
    batch, heads, sequence, size = tensor.shape
    rotated = int(cos.shape[-1])
    positions, cos_table, sin_table = _tables(cos, sin, interleaved)
    attributes: dict[str, Any] = {"num_heads": int(heads), "interleaved": int(interleaved)}
    if rotated < size:
        attributes["rotary_embedding_dim"] = rotated
    output = torch.onnx.ops.symbolic(
        "com.microsoft::RotaryEmbedding",
        [tensor.transpose(1, 2).reshape(batch, sequence, heads * size), positions, cos_table, sin_table],
        attrs=attributes,
        dtype=tensor.dtype,
        shape=(batch, sequence, heads * size),
        version=1,
    )
    return output.reshape(batch, sequence, heads, size).transpose(1, 2)


def _tables(cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the operator's tables from gathered angles (batch or 1, sequence, size): one row per token."""
    rotations = running_cache().rotations
    if id(cos) not in rotations:
        half = slice(None, None, 2) if interleaved else slice(int(cos.shape[-1]) // 2)
        rows, sequence = cos.shape[0], cos.shape[1]
        positions = torch.arange(rows * sequence).reshape(rows, sequence)
        rotations[id(cos)] = (positions, *(t[..., half].reshape(rows * sequence, -1) for t in (cos, sin)), cos)
    positions, cos_table, sin_table, _ = rotations[id(cos)]
    return positions, cos_table, sin_table
