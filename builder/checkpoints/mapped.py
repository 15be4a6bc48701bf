"""Give back the memory of weights that are mapped from a file: their pages are read again at the next use."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from builder.common.progress import Stage

LARGE = 100_000_000  # bytes of weights above which giving memory back is worth the time
MIN_INTERVAL_S = 0.1  # between two releases: a stage reads little in less time
SMAPS = Path("/proc/self/smaps")  # man proc_pid_smaps(5)


@dataclass(frozen=True)
class MappedRegion:
    """Memory of `length` bytes at `start` that is mapped from a file and unchanged."""

    start: int
    length: int


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
            _give_back_all(model)
            released = time.monotonic()
        with stage(name):
            yield

    return releasing_stage


def _give_back_all(model: torch.nn.Module) -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, man malloc_trim(3)
    if trim is not None:
        trim(0)
    give_back(model)


def give_back(model: torch.nn.Module) -> None:
    """Give back the memory of weights that are unchanged since they were read: the system keeps the file.

    Does nothing if the system does not list them, or if weights were changed after they were loaded.
    """
    pointers = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for region in _unwritten():
        if any(region.start <= pointer < region.start + region.length for pointer in pointers):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(region.start), ctypes.c_size_t(region.length), mmap.MADV_DONTNEED)


def _unwritten() -> Iterator[MappedRegion]:
    if not SMAPS.exists():
        return
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        fields = head.split()
        if len(fields) > 5 and fields[4] != "0" and re.search(r"^Anonymous: +0 kB", rest, re.MULTILINE):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            yield MappedRegion(start, end - start)
