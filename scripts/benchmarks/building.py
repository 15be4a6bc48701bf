"""Time, memory and disk that each stage of a build takes: `scripts/bench building`.

Each build runs in a process of its own, as a command does: once without the stage cache in each requested precision,
or, with --again, over one cache: cold, the same again, and with one option changed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from builder.clusters.fleet.work import (
    collecting_garbage_rarely,
    limit_spinning,
    load_libraries,
    peak_memory,
    reset_peak_memory,
)
from builder.common.cache.folder import DISABLED, FOLDER_VARIABLE
from scripts.benchmarks.circumstances import circumstances, write_figures

GENERATING = {"max_length": 512, "slots": 8, "quality": 0.0, "perplexity": 1e9}  # random weights have none to lose
OPTIONS: dict[str, dict[str, Any]] = {
    "minilm": {},
    "gpt2": GENERATING,
    "llama-wide": GENERATING,
    "llama-1b": GENERATING,
}
SAMPLED_S = 0.02  # between two looks at the memory that is the process's own
AGAIN: dict[str, dict[str, Any]] = {
    "cold": {},
    "the same": {},
    "max_batch_size": {"max_batch_size": 8},
    "precision": {"precision": "int8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench building")
    parser.add_argument("--models", default="minilm,gpt2", help=f"of {', '.join(OPTIONS)}")
    parser.add_argument("--precision", default="fp32,auto", help="one build each, without --again")
    parser.add_argument("--again", action="store_true", help="over one cache, with one option changed")
    parser.add_argument("--checkpoints", type=Path, help="keep the checkpoints made here")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other models stay")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the build of this process: a specification as JSON
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(json.loads(options.one))))
        return
    console, figures = Console(width=110), circumstances()
    figures["models"] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models.split(","):
            folder = checkpoint_of(name, options.checkpoints or Path(scratch))
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            cache = f"{scratch}/cache-{name}" if options.again else DISABLED
            builds = AGAIN if options.again else {p: {"precision": p} for p in options.precision.split(",")}
            results = {title: child(name, folder, Path(scratch), cache, **more) for title, more in builds.items()}
            figures["models"][name] = {"checkpoint_bytes": size, "builds": results}
            console.print(table(name, size, results))
            write_figures(options.output, figures)


def checkpoint_of(name: str, folder: Path) -> Path:
    """Return the folder of a checkpoint; create it in `folder` unless a package contains it."""
    if name == "minilm":
        from tests.models import minilm

        return minilm()
    from scripts.benchmarks.generators import make_checkpoint

    return make_checkpoint(name, folder / name)


def child(name: str, checkpoint: Path, folder: Path, cache: str, **options: Any) -> dict[str, Any]:
    """Return the seconds of each stage and the peak memory of one build in a process of its own."""
    spec = {"model": str(checkpoint), "name": name, "output": str(folder / "repository"), **OPTIONS[name], **options}
    command = [sys.executable, "-m", "scripts.benchmarks.building", "--one", json.dumps(spec)]
    (folder / "temporary").mkdir(exist_ok=True)
    environment = {**os.environ, FOLDER_VARIABLE: cache, "TMPDIR": str(folder / "temporary")}
    limit_spinning()  # as a command does, before the child loads torch
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def one(options: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a build in this process, which collects garbage as a command does."""
    with collecting_garbage_rarely():
        return _one(options)


def _one(options: dict[str, Any]) -> dict[str, Any]:
    started, stages, memory = time.perf_counter(), dict[str, float](), dict[str, Memory]()
    own = Looking()
    load_libraries()
    from builder.building.pipeline import build
    from builder.checkpoints.libraries import quiet_libraries
    from builder.options import make_spec

    stages["imports"], memory["imports"] = time.perf_counter() - started, Memory(peak_memory(), own.most())

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        start = time.perf_counter()
        reset_peak_memory()
        own.most()
        yield
        title = name.split(", about")[0]
        stages[title], memory[title] = time.perf_counter() - start, Memory(peak_memory(), own.most())
        print(f"{title}: {stages[title]:.1f} s, {memory[title].peak / 1e6:.0f} MB", file=sys.stderr, flush=True)

    with quiet_libraries():
        build(make_spec(**options), stage)
    own.stop()
    total = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor = used.ru_utime + used.ru_stime
    return {
        "stages_s": stages,
        "memory": {name: asdict(one) for name, one in memory.items()},
        "total_s": total,
        "processor_s": processor,
        "peak_bytes": max(one.peak for one in memory.values()),
        "peak_own_bytes": max(one.own for one in memory.values()),
        "peak_files_bytes": own.files,
    }


@dataclass(frozen=True)
class Memory:
    """Peaks in bytes. `peak`: resident, mapped files included; `own`: without them, sampled every `SAMPLED_S`."""

    peak: int
    own: int


class Looking:
    """Sampler of peaks that the system does not keep: this process's memory without mapped files, its files in TMPDIR.

    Files without a name are not seen.
    """

    def __init__(self) -> None:
        self.highest = self.files = 0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def most(self) -> int:
        """Return the highest value since the last call."""
        highest, self.highest = max(self.highest, _own_memory()), 0
        return highest

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.ended.wait(SAMPLED_S):
            self.highest = max(self.highest, _own_memory())
            self.files = max(self.files, on_disk(Path(tempfile.gettempdir())))


def _own_memory() -> int:
    """Return the bytes of this process that are resident and belong to no file."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def on_disk(folder: Path) -> int:
    """Return the bytes of the files in `folder`; count a file with several names once."""
    sizes: dict[int, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                stat = os.stat(Path(parent, name))
                sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def table(name: str, size: int, figures: dict[str, dict[str, Any]]) -> Table:
    """Return a table with one row per stage and one column per build."""
    words = f"{name}: checkpoint of {size / 1e6:.0f} MB; seconds, then the peak in MB and what of it is no mapped file"
    shown = Table(title=words, title_justify="left")
    shown.add_column("stage")
    for precision in figures:
        shown.add_column(precision, justify="right")
    for stage in dict.fromkeys(stage for build in figures.values() for stage in build["stages_s"]):
        shown.add_row(stage, *(_cell(stage, build) for build in figures.values()))
    shown.add_row("all", *(f"{build['total_s']:.2f}" for build in figures.values()), style="bold")
    shown.add_row("processor time", *(f"{build['processor_s']:.2f}" for build in figures.values()))
    peaks = {"peak memory, MB": "peak_bytes", "of it no mapped file": "peak_own_bytes", "files": "peak_files_bytes"}
    for words, field in peaks.items():
        shown.add_row(words, *(f"{build[field] / 1e6:.0f} ({build[field] / size:.1f}x)" for build in figures.values()))
    return shown


def _cell(stage: str, build: dict[str, Any]) -> str:
    if stage not in build["stages_s"]:
        return ""
    memory = build["memory"][stage]
    return f"{build['stages_s'][stage]:.2f}  {memory['peak'] / 1e6:6.0f} {memory['own'] / 1e6:6.0f}"


if __name__ == "__main__":
    main()
