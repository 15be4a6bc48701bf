"""Pages of a model's weights that are mapped from a file: given back, and read again at their next use.

Knows modules and memory; knows nothing of what is built.
"""

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

LARGE = 100_000_000  # bytes of weights from which it is worth the time to give memory back
SOON = 0.1  # seconds since it was given back, in which no stage has taken much again
SMAPS = Path("/proc/self/smaps")  # man proc_pid_smaps(5)


@dataclass(frozen=True)
class Mapping:
    """`length` bytes of a file at `start`, of which nothing was written since."""

    start: int
    length: int


def giving_back(model: torch.nn.Module, stage: Stage) -> Stage:
    """Return `stage`, which begins by giving back the memory that earlier stages left, the pages of `model` too.

    A stage reads the pages that it needs. Unchanged for a small model, for which that would only take time.
    """
    if sum(tensor.nbytes for tensor in model.state_dict().values()) < LARGE:
        return stage

    given = float("-inf")

    @contextmanager
    def begun(name: str) -> Iterator[None]:
        nonlocal given
        if time.monotonic() - given > SOON:
            _give_back_all(model)
            given = time.monotonic()
        with stage(name):
            yield

    return begun


def _give_back_all(model: torch.nn.Module) -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, man malloc_trim(3)
    if trim is not None:
        trim(0)
    give_back(model)


def give_back(model: torch.nn.Module) -> None:
    """Give back the memory of weights that are unchanged since they were read: the system keeps the file.

    Does nothing where the system does not say which those are, or weights were changed after they were loaded.
    """
    places = {tensor.data_ptr() for tensor in model.state_dict().values()}
    for one in _unwritten():
        if any(one.start <= place < one.start + one.length for place in places):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(one.start), ctypes.c_size_t(one.length), mmap.MADV_DONTNEED)


def _unwritten() -> Iterator[Mapping]:
    if not SMAPS.exists():
        return
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text(), flags=re.MULTILINE):
        head, _, rest = block.partition("\n")
        fields = head.split()
        if len(fields) > 5 and fields[4] != "0" and re.search(r"^Anonymous: +0 kB", rest, re.MULTILINE):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            yield Mapping(start, end - start)
