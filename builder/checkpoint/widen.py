"""Weights in 16 bits as fp32, in files that are mapped: half of a checkpoint's numbers need no memory of their own.

Files are written tensor by tensor, in the format of safetensors (its README, "Format"), and are gone as soon as what
maps them is. Knows files of weights; knows no model.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def widened(folder: Path, files: Sequence[Path]) -> Iterator[Path]:
    """A folder like `folder`, with no 16-bit weights in `files`: `folder` itself where there are none.

    A model that was loaded from it within the `with` keeps its weights mapped after it.
    """
    narrow = {file.name for file in files if _is_narrow(file)}
    if not narrow:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="build-repo-") as place:
        for file in folder.iterdir():
            if file.name not in narrow:
                os.symlink(file.resolve(), Path(place, file.name))
        for name in sorted(narrow):
            _widen(folder / name, Path(place, name))
        yield Path(place)


def _is_narrow(file: Path) -> bool:
    with safe_open(file, framework="pt") as opened:
        return any(opened.get_tensor(name).dtype in NARROW for name in opened.keys())  # noqa: SIM118  # it is no mapping


def _widen(narrow: Path, wide: Path) -> None:
    with safe_open(narrow, framework="pt") as opened, wide.open("wb") as file:
        names = sorted(
            opened.keys(), key=lambda name: (-_wide(opened, name).itemsize, name)
        )  # each aligned to its type
        described: dict[str, Any] = {"__metadata__": opened.metadata() or {}}
        end = 0
        for name in names:
            dtype, tensor = _wide(opened, name), opened.get_tensor(name)
            begin, end = end, end + tensor.numel() * dtype.itemsize
            kind = opened.get_slice(name).get_dtype() if dtype == tensor.dtype else "F32"
            described[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header = json.dumps(described, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            content = opened.get_tensor(name).to(_wide(opened, name)).contiguous()
            file.write(content.reshape(-1).view(torch.uint8).numpy().data)


def _wide(opened: Any, name: str) -> torch.dtype:
    dtype: torch.dtype = opened.get_tensor(name).dtype
    return torch.float32 if dtype in NARROW else dtype
