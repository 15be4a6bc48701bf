"""Widen 16-bit weights to fp32 in mapped files, so that they need no memory of their own.

Files are written tensor by tensor, in the format of safetensors (its README, "Format"), and disappear with the last
mapping of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from builder.common.workplace import require_disk_space, temporary_folder

NARROW = (torch.bfloat16, torch.float16)
PIECE = 1 << 22  # numbers that are widened at once: a whole table of words may be a fifth of a checkpoint


@contextmanager
def widened(folder: Path, files: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder like `folder`, with no 16-bit weights in `files`: `folder` itself if there are none.

    A model that was loaded from it within the `with` keeps its weights mapped after it. Raises RepositoryError if
    the disk is too full for them.
    """
    narrow = {file.name for file in files if _is_narrow(file)}
    if not narrow:
        yield folder
        return
    needed = sum(_wide_bytes(folder / name) for name in narrow)
    require_disk_space(needed, "the weights in fp32 (of which the graphs are made, which need as much again)")
    with temporary_folder() as wide:
        for file in folder.iterdir():
            if file.name not in narrow:
                os.symlink(file.resolve(), wide / file.name)
        for name in sorted(narrow):
            _widen(folder / name, wide / name)
        yield wide


def _is_narrow(file: Path) -> bool:
    with safe_open(file, framework="pt") as opened:
        return any(tensor.dtype in NARROW for tensor in _tensors(opened).values())


def _wide_bytes(file: Path) -> int:
    with safe_open(file, framework="pt") as opened:
        return sum(tensor.numel() * _wide(tensor).itemsize for tensor in _tensors(opened).values())


def _widen(narrow: Path, wide: Path) -> None:
    """Write the file in fp32; tensors with the largest numbers come first, so that each is aligned to its type."""
    with safe_open(narrow, framework="pt") as opened, wide.open("wb") as file:
        tensors = _tensors(opened)
        names = sorted(tensors, key=lambda name: (-_wide(tensors[name]).itemsize, name))
        described: dict[str, Any] = {"__metadata__": opened.metadata() or {}}
        end = 0
        for name in names:
            dtype, tensor = _wide(tensors[name]), tensors[name]
            begin, end = end, end + tensor.numel() * dtype.itemsize
            kind = opened.get_slice(name).get_dtype() if dtype == tensor.dtype else "F32"
            described[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header = json.dumps(described, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            numbers = tensors[name].reshape(-1)
            for start in range(0, len(numbers), PIECE):
                piece = numbers[start : start + PIECE].to(_wide(numbers))
                file.write(piece.view(torch.uint8).numpy().data)


def _tensors(opened: Any) -> Mapping[str, torch.Tensor]:
    """Return all tensors of a file, mapped: reading their types and shapes reads no values."""
    return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in NARROW else tensor.dtype
