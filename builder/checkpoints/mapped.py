"""Weights that are mapped from a file: 16-bit ones widened to fp32, and their memory given back between stages.

Widened files are written tensor by tensor, in the format of safetensors (its README, "Format"), and disappear with the
last mapping of them. Pages that are given back are read again at the next use.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

from builder.common.progress import Stage
from builder.common.workplace import require_disk_space, temporary_folder

NARROW = (torch.bfloat16, torch.float16)
PIECE = 1 << 22  # numbers that are widened at once: a whole table of words may be a fifth of a checkpoint
LARGE = 100_000_000  # bytes of weights above which giving memory back is worth the time
MIN_INTERVAL_S = 0.1  # between two releases: a stage reads little in less time


@contextmanager
def widened(folder: Path, files: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder like `folder`, with no 16-bit weights in `files`: `folder` itself if there are none.

    A model that was loaded from it within the `with` keeps its weights mapped after it. Raises RepositoryError if
    the disk is too full for them.
    """
    narrow: dict[str, int] = {}  # the bytes of each file in fp32
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors = _tensors(opened).values()
            if any(tensor.dtype in NARROW for tensor in tensors):
                narrow[file.name] = sum(tensor.numel() * _wide(tensor).itemsize for tensor in tensors)
    if not narrow:
        yield folder
        return
    needed = sum(narrow.values())
    require_disk_space(needed, "the weights in fp32 (of which the graphs are made, which need as much again)")
    with temporary_folder() as wide:
        for file in folder.iterdir():
            if file.name not in narrow:
                os.symlink(file.resolve(), wide / file.name)
        for name in sorted(narrow):
            _widen(folder / name, wide / name)
        yield wide


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


def giving_back(model: torch.nn.Module, stage: Stage) -> Stage:
    """Return `stage`, extended to first give back unused memory of earlier stages, the pages of `model` included.

    A stage reads again the pages that it needs. For a small model, `stage` is returned unchanged.
    """
    if sum(tensor.nbytes for tensor in model.state_dict().values()) < LARGE:
        return stage

    released = float("-inf")

    @contextmanager
    def releasing_stage(name: str) -> Iterator[None]:
        nonlocal released
        if time.monotonic() - released > MIN_INTERVAL_S:
            gc.collect()
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, man malloc_trim(3)
            if trim is not None:
                trim(0)
            give_back(model)
            released = time.monotonic()
        with stage(name):
            yield

    return releasing_stage


def give_back(model: torch.nn.Module) -> None:
    """Give back the memory of weights that are unchanged since they were read: the system keeps the file.

    Does nothing if the system does not list them, or if weights were changed after they were loaded.
    """
    if not hasattr(psutil.Process, "memory_maps"):
        return
    pointers = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for region in psutil.Process().memory_maps(grouped=False):
        if region.anonymous or region.swap or not region.path.startswith("/"):  # changed, or not a file's
            continue
        start, end = (int(address, 16) for address in region.addr.split("-"))
        if any(start <= pointer < end for pointer in pointers):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
