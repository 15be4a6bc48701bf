"""Tell where the time of a load on demand goes: `scripts/bench fleet loads`.

Tiny models are loaded one after the other while nothing else runs, and then for several clients at once, in memory for
few of them. A load is divided by the times in Triton's log and by the gateway's metrics:

1. waiting: for memory, that is for the end of evicted models, and until fewer than four models load;
2. Triton, until it starts the process of the model;
3. the process: Python, imports, tokenizer, session and first calls;
4. the gateway: reading the files of the model before, and asking if it is ready and measuring it after.

The third is divided further by `opening`, alone in a new process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from builder.checkpoints.libraries import quiet_libraries
from builder.serving.gateway.residency.memory import TritonProcesses
from builder.serving.gateway.server import allow_connections
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.fleet_changing import Fleet
from scripts.benchmarks.fleet_copies import VERSIONS
from scripts.benchmarks.fleet_serving import SHORT, ask, ask_all, counted, difference, make_fleet, on_demand
from scripts.benchmarks.gateway import Through

ALONE = 12  # loads while nothing else runs
FITTING = 10  # models that have memory
EVENTS = {
    "begun": re.compile(r'"loading: (\w+):\d+"'),
    "process": re.compile(r'"TRITONBACKEND_ModelInstanceInitialize: (\w+)_0_0 '),
    "loaded": re.compile(r"\"successfully loaded '(\w+)'"),
    "unload": re.compile(r'"unloading: (\w+):\d+"'),
    "unloaded": re.compile(r"\"successfully unloaded '(\w+)'"),
}
TIME = re.compile(r"^I\d{4} (\d\d:\d\d:\d\d\.\d{6})")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench fleet loads")
    parser.add_argument("--models", type=int, default=60, help="tiny models (default 60)")
    parser.add_argument("--clients", type=int, default=32, help="at once (default 32)")
    parser.add_argument("--seconds", type=float, default=40, help="of traffic (default 40)")
    parser.add_argument("--repository", type=Path, help="keep the models here; made there where they are not")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args(arguments)
    allow_connections()
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        repository = options.repository or Path(folder) / "repository"
        names = make_fleet(repository, options.models, 0, shared=False)
        figures = measure(repository, names, options)
    Console().print_json(json.dumps(figures))
    write_figures(options.output, {**circumstances(), "loads": figures})


def measure(repository: Path, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds of each stage of a load, alone and under load, and of an unload."""
    folders = [str(repository / name / str(VERSIONS[-1])) for name in names[:2]]
    opening = [sys.executable, "-m", "scripts.benchmarks.opening", *folders]
    figures = {"opening": json.loads(subprocess.run(opening, check=True, capture_output=True, text=True).stdout)}
    port = free_ports().http
    with running(repository, on_demand=True) as server, on_demand(server, repository, port, 4e9):
        through, processes = Through(port), TritonProcesses(server.url)
        processes.find()

        async def one_after_the_other() -> dict[str, float]:
            before = await counted(through)
            for name in names[:ALONE]:
                assert (await ask(through, name, SHORT[0]))[0] == 200
            return difference(before, await counted(through))

        figures["alone"] = stages(server.log, asyncio.run(one_after_the_other()))
        usage = processes.usage()
    budget = usage.server + FITTING * sum(usage.models.values()) // ALONE
    with running(repository, on_demand=True) as server, on_demand(server, repository, port, budget):
        through = Through(port)
        fleet = Fleet(names, {}, dict.fromkeys(names, (VERSIONS[-1], 0.0)), processes)

        async def traffic() -> tuple[int, list[str], dict[str, float]]:
            before = await counted(through)
            asked = argparse.Namespace(seconds=options.seconds, zipf=1.1, clients=options.clients)
            seen, after = await ask_all(through, fleet, asked)
            return len(seen.ms), [*seen.failures, *seen.wrong], difference(before, after)

        requests, problems, counts = asyncio.run(traffic())
        figures["under load"] = {"requests": requests, "problems": problems, **stages(server.log, counts)}
    return figures


@dataclass(frozen=True)
class Event:
    """Line of Triton's log about a model. `at_s`: seconds of the day."""

    kind: str
    model: str
    at_s: float


def stages(log: Sequence[str], counts: dict[str, float]) -> dict[str, Any]:
    """Return the mean milliseconds of the stages of all loads in a log. `counts`: the gateway's metrics meanwhile."""
    spent: dict[str, list[float]] = {"triton": [], "process": [], "unload": []}
    last: dict[tuple[str, str], float] = {}
    ends = {"process": ("begun", "triton"), "loaded": ("process", "process"), "unloaded": ("unload", "unload")}
    for event in filter(None, map(read_event, log)):
        last[event.kind, event.model] = event.at_s
        begin, stage = ends.get(event.kind, ("", ""))
        if (began := last.get((begin, event.model))) is not None:
            spent[stage].append(1000 * (event.at_s - began))
    loads = max(1.0, counts["model_load_seconds_count"])
    means = {stage: mean(values) for stage, values in spent.items() if values}
    whole, waiting = (1000 * counts[name] / loads for name in ("model_load_seconds_sum", "model_load_wait_seconds"))
    means |= {"whole": whole, "waiting": waiting, "gateway": whole - waiting - means["triton"] - means["process"]}
    return {"loads": int(loads), **{f"{stage}_ms": round(value, 1) for stage, value in means.items()}}


def read_event(line: str) -> Event | None:
    """Return what a line of Triton's log says about a model, if it does."""
    time = TIME.match(line)
    if time is None:
        return None
    for kind, pattern in EVENTS.items():
        if found := pattern.search(line):
            at = datetime.strptime(time[1], "%H:%M:%S.%f")
            return Event(kind, found[1], at.hour * 3600 + at.minute * 60 + at.second + at.microsecond / 1e6)
    return None
