"""Family of models whose stages run once: the result of an earlier build of the same key is reused.

The key of a stage covers the checkpoint, the options that matter to it and the code that made it. A stage is looked up
when a later one needs it: if the choice is kept, neither the export nor PyTorch's answers are read. A kept result was
verified with the same key, and its numbers are compared with their bounds again; the report names the kept stages.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from transformers import PreTrainedModel

from builder.building.families import Family
from builder.building.stage_keys import stage_keys
from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import TaskGraph
from builder.common.cache.entries import Entries
from builder.common.cache.folder import cache_home, is_off
from builder.common.progress import Stage
from builder.graphs.export.encoder import task_graph
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport, EngineCheck
from builder.repository.verdict import Comparison

Value = TypeVar("Value")
Exported = TypeVar("Exported")
Reference = TypeVar("Reference")
Fused = TypeVar("Fused")
Exact = TypeVar("Exact")
Chosen = TypeVar("Chosen")

READABLE = ("builder.", "numpy", "collections", "pathlib")  # modules whose classes a document may name


def keeping(
    family: Family[Exported, Reference, Fused, Exact, Chosen], context: Context
) -> Family[Any, Any, Any, Any, Any]:
    """Return `family` over the user's cache; unchanged if BUILD_REPO_CACHE is off."""
    if is_off():
        return family
    return Keeping(family, Shelf(Entries(cache_home()), stage_keys(context.spec), context))


class Once(Generic[Value]):
    """Value of a stage, computed when it is first read."""

    def __init__(self, make: Callable[[], Value]) -> None:
        self.make = make
        self.values: list[Value] = []

    def get(self) -> Value:
        if not self.values:
            self.values.append(self.make())
        return self.values[0]


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
class Shelf:
    """Stages of one build in the cache."""

    entries: Entries
    keys: Mapping[str, str]
    context: Context
    taken: dict[str, dict[str, str]] = field(default_factory=dict)

    def has(self, *stages: str) -> bool:
        """Return True if one of `stages` appears to be there; it is not read."""
        return any(self.entries.find(self.keys[stage]) is not None for stage in stages)

    def get(self, stage: str, make: Callable[[], Value], lasts: Callable[[Value], bool] = lambda value: True) -> Value:
        """Return the value of `stage`: the kept one, or what `make` returns, which is then kept if it `lasts`."""
        key = self.keys[stage]
        entry = self.entries.find(key)
        document = None if entry is None else self.entries.read(entry, self.context.folder)
        if entry is not None and document is not None:
            built_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.made))
            self.taken[stage] = {"key": key, "made": built_at}
            value: Value = Reader(io.BytesIO(document), self.context).load()
            return value
        begun = time.perf_counter()
        value = make()
        took = time.perf_counter() - begun
        if not lasts(value):
            return value
        with suppress(OSError):  # a full or read-only disk
            stream = io.BytesIO()
            writer = Writer(stream, self.context.folder)
            writer.dump(value)
            model = self.context.spec.entry_name
            self.entries.write(stage, key, model, took, stream.getvalue(), self.context.folder, sorted(writer.files))
        return value


class Writer(pickle.Pickler):
    """Pickler of a document: it names the objects of a Context, and notes the `files` that belong to it."""

    def __init__(self, stream: io.BytesIO, folder: Path) -> None:
        super().__init__(stream, protocol=5)
        self.folder = folder
        self.files: set[str] = set()

    def persistent_id(self, value: Any) -> str | None:
        if isinstance(value, Path) and value.is_relative_to(self.folder):
            self.files.update(str(file.relative_to(self.folder)) for file in _files(value))
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
        raise pickle.UnpicklingError(f"a stage is not kept as {module}.{name}")


def _files(path: Path) -> list[Path]:
    """Return the files of a graph: its own and those of its weights; of a folder, all files."""
    return (
        [file for file in path.rglob("*") if file.is_file()]
        if path.is_dir()
        else list(path.parent.glob(f"{path.stem}.*"))
    )


@dataclass(frozen=True)
class Keeping:
    """Stages of `family`: each runs if a later stage needs it and it is not kept."""

    family: Family[Any, Any, Any, Any, Any]
    shelf: Shelf

    def export(self) -> Once[Any]:
        return self._stage("export", self.family.export, "fuse", "verify", "select")

    def reference(self, exported: Once[Any]) -> Once[Any]:
        return self._stage("reference", lambda: self.family.reference(exported.get()), "verify", "select")

    def fuse(self, exported: Once[Any]) -> Once[Any]:
        return self._stage("fuse", lambda: self.family.fuse(exported.get()), "verify", "select")

    def verify(self, fused: Once[Any], reference: Once[Any]) -> Once[Any]:
        return self._stage("verify", lambda: self.family.verify(fused.get(), reference.get()), "select")

    def select(self, exact: Once[Any], stage: Stage) -> Any:
        return self.shelf.get("select", lambda: self.family.select(exact.get(), stage), self.family.lasts)

    def lasts(self, chosen: Any) -> bool:
        return self.family.lasts(chosen)

    def _stage(self, name: str, make: Callable[[], Any], *beyond: str) -> Once[Any]:
        """Return the stage: run now, unless one of the stages `beyond`, which then do not need it, is kept."""
        once = Once(lambda: self.shelf.get(name, make))
        if not self.shelf.has(*beyond):
            once.get()
        return once

    def replay(self, chosen: Any) -> Replay:
        return self.family.replay(chosen)

    def lay_out(self, chosen: Any, stage: Stage) -> Sequence[RepositoryEntry]:
        return self.family.lay_out(chosen, stage)

    def comparison(self, chosen: Any) -> Comparison:
        return self.family.comparison(chosen)

    def report(self, chosen: Any, entries: Sequence[RepositoryEntry], checks: tuple[EngineCheck, ...]) -> BuildReport:
        return replace(self.family.report(chosen, entries, checks), kept=dict(self.shelf.taken))
