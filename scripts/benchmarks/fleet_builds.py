"""Many builds: `scripts/bench fleet builds`.

Code creates tiny checkpoints, all different: encoders of five tasks and four architectures, and GPT-2s. They are built
by `build-repo models.yaml` three times: cold, into an empty repository with an empty cache; warm, with nothing changed;
and with one option changed that the exported graphs do not depend on. Each executor has a repository and a cache of its
own. `process` is one worker, `workers` one for each core, `ray` a cluster on this machine. Seconds are those of the
whole command. Processor seconds are those of all its processes, which other programs change little. Memory is the peak
of all its processes together, with shared pages counted once.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from scripts.benchmarks.circumstances import circumstances, refuse_other, write_figures
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint

THREE = {0: "sport", 1: "food", 2: "travel"}
ENCODERS: dict[str, tuple[str, str, dict[int, str] | None]] = {  # architecture, task, labels
    "topics": ("bert", "text-classification", THREE),
    "tones": ("roberta", "text-classification", THREE),
    "flags": ("electra", "text-classification", THREE),
    "names": ("distilbert", "token-classification", {0: "O", 1: "B-PER", 2: "I-PER"}),
    "answers": ("bert", "question-answering", None),
    "masks": ("bert", "fill-mask", None),
    "features": ("bert", "feature-extraction", None),
}
DECODERS = ("writes", "talks", "tells")  # of GPT-2
FEED_FORWARD = {"distilbert": "hidden_dim"}  # the name of its width if it is not intermediate_size
EXECUTORS = {"process": "1", "workers": str(available_cores()), "ray": "ray"}  # the value of --workers for each
OPTIONS = {"max_length": 64}
CHANGED = {"max_batch_size": 32}
SAMPLE_S = 0.3
TICKS = os.sysconf("SC_CLK_TCK")  # a second, of the times in /proc/PID/stat
BUILD_REPO = str(Path(sys.executable).with_name("build-repo"))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench fleet builds")
    parser.add_argument("--models", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--executors", default="process,workers", help=f"of {','.join(EXECUTORS)}, ray if installed")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args(arguments)
    refuse_other(options.output, models=options.models)
    executors = [name for name in options.executors.split(",") if name != "ray" or importlib.util.find_spec("ray")]
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        checkpoints = make_checkpoints(Path(folder) / "checkpoints", options.models)
        figures = {}
        for name in executors:
            figures[name] = measure(Path(folder) / name, name, checkpoints)
            show(figures, options.models)
            write_figures(options.output, {**circumstances(), "models": options.models, "builds": figures})


def make_checkpoints(folder: Path, count: int) -> list[Path]:
    """Create `count` checkpoints, all with different weights: the widths of their feed-forward layers differ."""
    kinds = itertools.islice(itertools.cycle([*ENCODERS, *DECODERS]), count)
    return [_make(folder / f"{kind}-{number}", kind, 64 + number) for number, kind in enumerate(kinds)]


def _make(folder: Path, kind: str, width: int) -> Path:
    if kind in DECODERS:
        return make_decoder_checkpoint(folder, "gpt2", n_inner=width)
    architecture, task, labels = ENCODERS[kind]
    return make_checkpoint(
        folder, architecture, task, labels, **{FEED_FORWARD.get(architecture, "intermediate_size"): width}
    )


def measure(folder: Path, executor: str, checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Measure cold, warm, and with one option changed."""
    cold = run(folder, executor, checkpoints, OPTIONS, version=1)
    warm = run(folder, executor, checkpoints, OPTIONS, version=1)
    changed = run(folder, executor, checkpoints, {**OPTIONS, **CHANGED}, version=2)
    return {"cold": cold, "warm": warm, "one option changed": changed}


def run(
    folder: Path, executor: str, checkpoints: Sequence[Path], options: dict[str, Any], version: int
) -> dict[str, float]:
    """Run one `build-repo models.yaml`, after which each model must be at `version`."""
    folder.mkdir(exist_ok=True)
    models = folder / "models.yaml"
    slots = {name: {"slots": 2} for name in DECODERS}
    entries = [{"model": str(path), **slots.get(path.name.split("-")[0], {})} for path in checkpoints]
    defaults = {"output": str(folder / "repository"), **options}
    models.write_text(yaml.safe_dump({"defaults": defaults, "models": entries}), "utf-8")
    command = [BUILD_REPO, str(models), "--workers", EXECUTORS[executor], "--json"]
    environment = {**os.environ, "BUILD_REPO_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        used = Used()
        threading.Thread(target=used.watch, args=(process,), daemon=True).start()
        printed = process.communicate()[0]
    seconds = time.monotonic() - started
    assert process.returncode == 0, f"build-repo ended with {process.returncode}"
    versions = [document["version"] for document in json.loads(printed)]
    assert versions == [version] * len(checkpoints), versions
    processor = sum(used.processor_s.values())
    return {"seconds": round(seconds, 1), "processor_s": round(processor, 1), "memory_mb": round(used.memory / 1e6)}


@dataclass
class Used:
    """Resources that a process and its descendants took. `memory`: peak bytes at once; `processor_s`: of each."""

    memory: int = 0
    processor_s: dict[int, float] = field(default_factory=dict)

    def watch(self, process: subprocess.Popen[str]) -> None:
        """Sample every `SAMPLE_S` until the process ends."""
        while process.poll() is None:
            own = family(process.pid)
            self.memory = max(self.memory, sum(map(_resident, own)))
            self.processor_s |= {pid: seconds for pid in own if (seconds := processor_s(pid))}
            time.sleep(SAMPLE_S)


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*"):
        if fields := _status(int(status.name)):
            parents[int(status.name)] = int(fields[1])
    members = [pid]
    for one in members:
        members.extend(child for child, parent in parents.items() if parent == one)
    return members


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (man proc_pid_stat(5)); none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def processor_s(pid: int) -> float:
    """Return the processor seconds of the process itself, in user mode and in the kernel; 0 if it has ended."""
    return sum(map(int, _status(pid)[11:13])) / TICKS


def _resident(pid: int) -> int:
    """Return the process's own bytes and its share of the pages that others have too."""
    try:
        return int(psutil.Process(pid).memory_full_info().pss)
    except psutil.Error:
        return 0


def show(figures: dict[str, Any], models: int) -> None:
    table = Table(title=f"{models} tiny models: seconds, those of the processor, and MB at most", title_justify="left")
    table.add_column("executor")
    for phase in next(iter(figures.values())):
        table.add_column(phase, justify="right")
    for name, of in figures.items():
        table.add_row(name, *map(cell, of.values()))
    Console().print(table)


def cell(run: dict[str, float]) -> str:
    """Return one run as the text of a table cell."""
    return f"{run['seconds']:.1f} s, {run['processor_s']:.0f} s, {run['memory_mb']:,} MB"
