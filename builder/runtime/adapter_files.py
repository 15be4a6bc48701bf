"""Read the LoRA adapters that requests name: files in a folder beside the model's versions.

`build-repo adapter` writes and removes them while the model is served. Each is one file, replaced and removed as a
whole, so that a request finds all of an adapter or none. Knows files and arrays; knows nothing about Triton.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .fields import Field, InputError
from .lora import STACKS, Adapter, LoraStacks

ADAPTER = Field("lora_name", "TYPE_STRING", optional=True)  # input of a model built with --adapters
FOLDER = "adapters"  # beside the version folders
SUFFIX = ".npz"
ABOUT = "about"  # array of a file beside its matrices: where the adapter is from, as JSON
PARAMETERS = "parameters"  # array of a file: those of the task, such as the labels of the adapter's own head, as JSON
ALL_ADAPTERS = "*"  # asks a model for the names of its adapters
ADD_AGAIN = "The operator of the model can add it again with build-repo adapter"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")  # short enough for the name of a file


def adapter_names(folder: Path) -> "list[str]":
    """Return the names of the adapters in `folder`, which may be absent."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}") if NAME.fullmatch(path.stem))


def read_adapter(path: Path) -> Adapter:
    """Read one adapter. Raises OSError, and ValueError for a damaged file."""
    content = path.read_bytes()
    with adapter_arrays(content) as arrays:
        matrices = {name: arrays[name] for name in arrays.files if name.startswith(STACKS)}
        parameters = json.loads(str(arrays[PARAMETERS])) if PARAMETERS in arrays.files else {}
    return Adapter(path.stem, hashlib.sha256(content).hexdigest(), matrices, parameters)


@contextmanager
def adapter_arrays(content: bytes) -> "Iterator[Any]":
    """Open the arrays of an adapter's file by their names. Raises ValueError if it is damaged."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            yield arrays
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class Adapters:
    """Adapters in `folder` that fit into `stacks`; as many as these take at once stay in memory."""

    def __init__(self, folder: Path, stacks: LoraStacks) -> None:
        self.folder, self.stacks = folder, stacks
        self.read: "dict[str, tuple[tuple[int, ...], Adapter]]" = {}  # by name, the most recent at the end

    def find(self, name: str) -> Adapter:
        """Return the adapter `name`, read anew if its file has changed.

        Raises InputError for one that is not there, is damaged or was added to another version of the model.
        """
        path = self.folder / f"{name}{SUFFIX}"
        try:
            if not NAME.fullmatch(name):
                raise FileNotFoundError(name)
            status = path.stat()
            state = status.st_ino, status.st_size, status.st_mtime_ns
            known = self.read.pop(name, None)
            adapter = known[1] if known is not None and known[0] == state else read_adapter(path)
        except FileNotFoundError as error:
            names = ", ".join(adapter_names(self.folder)) or "none yet"
            raise InputError(f"lora_name is {name!r}, which is not an adapter of this model; it has {names}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"the adapter {name} cannot be read ({error}). {ADD_AGAIN}") from error
        reason = self.stacks.misfit(adapter)
        if reason is not None:
            raise InputError(f"the adapter {name} does not fit: {reason}. {ADD_AGAIN}")
        self.read[name] = state, adapter
        while len(self.read) > self.stacks.capacity:
            del self.read[next(iter(self.read))]
        return adapter
