"""Stages of a build, reused from the user's cache where an earlier build ran them with the same key.

The key of a stage covers the checkpoint, the options that matter to it and the code that ran it. A stage is looked up
when a later one needs it: if the selection is cached, neither the export nor PyTorch's answers are read. A cached
result was verified with the same key, and its numbers are compared with their bounds again; the report names the stages
that were reused.
"""

from __future__ import annotations

import functools
import io
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel

from builder.building.keys import stage_keys
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import TaskGraph
from builder.common.cache.entries import CacheEntries
from builder.common.cache.folder import cache_home, is_cache_disabled
from builder.graphs.export.encoder import task_graph
from builder.options import BuildSpec

Value = TypeVar("Value")

READABLE = ("builder.", "numpy", "collections", "pathlib")  # modules whose classes a document may name
NEEDED_BY = {  # stages that make a stage unnecessary if they are cached
    "export": ("fuse", "verify", "select"),
    "reference": ("verify", "select"),
    "fuse": ("verify", "select"),
    "verify": ("select",),
    "select": (),
}


@dataclass(frozen=True)
class Context:
    """Objects that a build has in memory and no document contains; `folder` is where its files are."""

    spec: BuildSpec
    checkpoint: Checkpoint
    folder: Path

    def find(self, name: str) -> Any:
        """Return the object that a document calls `name`."""
        if name.startswith("file:"):
            return self.folder / name.removeprefix("file:")
        if name == "module":
            return task_graph(self.checkpoint)
        return {"spec": self.spec, "checkpoint": self.checkpoint, "model": self.checkpoint.model}[name]


@dataclass(frozen=True)
class StageCache:
    """Stages of one build in the user's cache; `entries` is None if that is off.

    `reused`: the key of each stage that an earlier build ran, and when.
    """

    entries: CacheEntries | None
    keys: Mapping[str, str]
    context: Context
    reused: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, context: Context) -> StageCache:
        if is_cache_disabled():
            return cls(None, {}, context)
        return cls(CacheEntries(cache_home()), stage_keys(context.spec), context)

    def run(
        self, stage: str, compute: Callable[[], Value], is_cacheable: Callable[[Value], bool] = lambda value: True
    ) -> Callable[[], Value]:
        """Return a function that returns the result of `stage`, which is computed once.

        It is computed now, unless a later stage is cached that makes it unnecessary. `is_cacheable`: returns True for a
        result that a later build may reuse.
        """
        result = functools.cache(lambda: self._cached(stage, compute, is_cacheable))
        if self.entries is None or all(self.entries.find(self.keys[later]) is None for later in NEEDED_BY[stage]):
            result()
        return result

    def _cached(self, stage: str, compute: Callable[[], Value], is_cacheable: Callable[[Value], bool]) -> Value:
        """Return the cached result of `stage`, or compute it and cache it if it `is_cacheable`."""
        if self.entries is None:
            return compute()
        key = self.keys[stage]
        entry = self.entries.find(key)
        document = None if entry is None else self.entries.read(entry, self.context.folder)
        if entry is not None and document is not None:
            built_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.made))
            self.reused[stage] = {"key": key, "made": built_at}
            cached: Value = Reader(io.BytesIO(document), self.context).load()
            return cached
        start = time.perf_counter()
        value = compute()
        duration = time.perf_counter() - start
        if is_cacheable(value):
            stream, folder, model = io.BytesIO(), self.context.folder, self.context.spec.entry_name
            with suppress(OSError):  # a full or read-only disk
                writer = Writer(stream, folder)
                writer.dump(value)
                self.entries.write(stage, key, model, duration, stream.getvalue(), folder, sorted(writer.files))
        return value


class Writer(pickle.Pickler):
    """Pickler of a document: it names the objects of a Context, and notes the `files` that belong to it."""

    def __init__(self, stream: io.BytesIO, folder: Path) -> None:
        super().__init__(stream, protocol=5)
        self.folder = folder
        self.files: set[str] = set()

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Path) and value.is_relative_to(self.folder):
            # The files of a folder, or those of a graph: its own and those of its weights.
            files = value.rglob("*") if value.is_dir() else value.parent.glob(f"{value.stem}.*")
            self.files.update(str(file.relative_to(self.folder)) for file in files if file.is_file())
            return f"file:{value.relative_to(self.folder)}"
        kinds = {BuildSpec: "spec", Checkpoint: "checkpoint", TaskGraph: "module", PreTrainedModel: "model"}
        return next((name for kind, name in kinds.items() if isinstance(value, kind)), None)


class Reader(pickle.Unpickler):
    """Unpickler that allows only classes of READABLE and Python's own values, and nothing that runs."""

    def __init__(self, stream: io.BytesIO, context: Context) -> None:
        super().__init__(stream)
        self.context = context

    def persistent_load(self, name: Any) -> Any:
        return self.context.find(str(name))

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(READABLE) or (module, name) in (("builtins", "set"), ("builtins", "frozenset")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a stage is not stored as {module}.{name}")
