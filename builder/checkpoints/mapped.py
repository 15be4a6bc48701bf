"""Weights that are mapped from a file: 16-bit ones widened to fp32, and their memory given back between stages.

Written files are in the format of safetensors (its README, "Format"), one piece of a tensor after the other, and
disappear with the last mapping of them. Pages that are given back are read again at the next use.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import safe_open

from builder.common.progress import Stage
from builder.common.workplace import require_disk_space, temporary_folder

NARROW = ("BF16", "F16")  # types, as safetensors names them
PIECE = 1 << 22  # numbers that are widened at once: a whole table of words may be a fifth of a checkpoint
LARGE = 100_000_000  # bytes of weights above which giving memory back is worth the time
MIN_INTERVAL_S = 0.1  # between two releases: a stage reads little in less time


@dataclass(frozen=True)
class WrittenTensor:
    """Tensor that is written to a file; `kind`: its type as safetensors names it.

    `pieces` returns its values in order, each piece contiguous and of `dtype`.
    """

    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[torch.Tensor]]
    dtype: torch.dtype = torch.float32
    kind: str = "F32"

    @property
    def size(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def widened(folder: Path, files: Sequence[Path]) -> Iterator[Path]:
    """Yield a folder like `folder`, with no 16-bit weights in `files`: `folder` itself if there are none.

    A model that was loaded from it within the `with` keeps its weights mapped after it. Raises RepositoryError if
    the disk is too full for them.
    """
    narrow: dict[str, int] = {}  # the bytes of each file in fp32
    for file in files:
        with safe_open(file, framework="pt") as opened:
            if any(opened.get_slice(name).get_dtype() in NARROW for name in opened.keys()):  # noqa: SIM118
                narrow[file.name] = sum(as_fp32(opened, name).size for name in opened.keys())  # noqa: SIM118
    if not narrow:
        yield folder
        return
    with rewritten(folder, narrow, sum(narrow.values())) as wide:
        for name in sorted(narrow):
            with safe_open(folder / name, framework="pt") as opened:
                tensors = {key: as_fp32(opened, key) for key in opened.keys()}  # noqa: SIM118  # not a mapping
                write_tensors(wide / name, tensors, opened.metadata())
        yield wide


@contextmanager
def rewritten(folder: Path, without: Collection[str], size: int) -> Iterator[Path]:
    """Yield a temporary folder with the files of `folder`, except those named in `without`.

    Raises RepositoryError if the disk is too full for the `size` bytes that are to take their place.
    """
    require_disk_space(size, "the weights in fp32 (of which the graphs are made, which need as much again)")
    with temporary_folder() as result:
        for file in folder.iterdir():
            if file.name not in without:
                os.symlink(file.resolve(), result / file.name)
        yield result


def write_tensors(path: Path, tensors: Mapping[str, WrittenTensor], metadata: Mapping[str, str] | None) -> None:
    """Write `tensors`; those with the largest numbers come first, so that each is aligned to its type."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    described: dict[str, Any] = {"__metadata__": metadata or {}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.size
        described[name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            for piece in tensors[name].pieces():
                file.write(piece.reshape(-1).view(torch.uint8).numpy().data)


def as_fp32(opened: Any, name: str) -> WrittenTensor:
    """Return a tensor of an open file, as it is mapped there, with 16-bit numbers in fp32."""
    tensor, kind = opened.get_tensor(name), opened.get_slice(name).get_dtype()
    if kind in NARROW:
        kind, dtype = "F32", torch.float32
    else:
        dtype = tensor.dtype
    numbers = tensor.reshape(-1)
    starts = range(0, len(numbers), PIECE)
    return WrittenTensor(
        tuple(tensor.shape), lambda: (numbers[start : start + PIECE].to(dtype) for start in starts), dtype, kind
    )


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
