"""Agreement of load generators: `scripts/bench load_programs`.

AIPerf as `load-test` runs it, and a closed loop of our own that knows nothing of it, send the same streamed completions
to one address, by turns in one run:

1. to a server without a model, whose tokens come at fixed times: there each program should measure these times;
2. to the gateway over a model (GPT-2 124M shape with random weights, int8, 32 slots, on one thread), where programs and
   server share the processor. perf_analyzer, as `load-test` runs it without AIPerf, asks Triton itself.

The processor time of a program is that of all its processes from start to end. The loop is asyncio, in this process.
Needs AIPerf on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from builder.common.machine import available_cores, cpu
from builder.serving.load import aiperf
from builder.serving.load.figures import ClientFigures
from builder.serving.load.measure import load_test
from builder.serving.load.traffic import Level, Target
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks.circumstances import replace_figures
from scripts.benchmarks.gateway import PROMPT, Through, make_writer
from scripts.benchmarks.paced_streams import BETWEEN_S, FIRST_S

HOST = "127.0.0.1"
LEVELS = (1, 4)
TOKENS = 64
LIMIT_S = 300.0  # of one run of AIPerf
SAMPLE = {"text_input": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
FIGURES = ("requests_per_s", "tokens_per_s", "first_token_ms", "inter_token_ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench load_programs")
    parser.add_argument("--paced", action="store_true", help="ask only the server without a model")
    parser.add_argument("--repository", type=Path, help="keep the model here; built there where it is not")
    parser.add_argument("--seconds", type=float, default=15, help="of one measurement (default 15)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each program and level (default 3)")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    console, rows = Console(width=120), []
    with paced_streams() as port:
        rows += measure("fixed times", port, options, {"AIPerf": partial(by_aiperf, port)})
    rows += [{"server": "fixed times", "program": "server", "concurrency": level, **planned(level)} for level in LEVELS]
    show(console, rows, "fixed times", ("server", "own", "AIPerf"))
    if not options.paced:
        with tempfile.TemporaryDirectory() as scratch:
            folder, port = options.repository or Path(scratch) / "repository", free_ports().http
            make_writer(folder, threads=1)
            with running(folder) as server, gateway(server.url, HOST, port, log=subprocess.DEVNULL):
                programs = {
                    "AIPerf": partial(by_load_test, server.url, f"http://{HOST}:{port}"),
                    "perf_analyzer": partial(by_load_test, server.url, None),
                }
                rows += measure("model", port, options, programs)
        show(console, rows, "model", ("own", *programs))
    machine = {"cores": available_cores(), "cpu": cpu()["model"], "seconds": options.seconds}
    replace_figures(options.output, {**machine, "rows": rows})


@contextmanager
def paced_streams() -> Iterator[int]:
    """Run the server without a model in a process of its own; yield its port."""
    port = free_ports().http
    with subprocess.Popen([sys.executable, "-m", "scripts.benchmarks.paced_streams", str(port)]) as process:
        try:
            while True:
                try:
                    asyncio.run(own(port, 1, 0.1))
                    break
                except OSError:  # it does not listen yet
                    if process.poll() is not None:
                        raise SystemExit(f"the server on port {port} ended with status {process.poll()}") from None
                    time.sleep(0.1)
            yield port
        finally:
            process.terminate()


Program = Callable[[int, float], ClientFigures]


def measure(
    server: str, port: int, options: argparse.Namespace, programs: Mapping[str, Program]
) -> list[dict[str, Any]]:
    """Return the figures of our own loop at a port and of the other programs, by turns."""
    rows = []
    asyncio.run(own(port, 1, 1))  # warm
    for concurrency in LEVELS:
        for _ in range(options.rounds):
            for name in (*programs, "own"):
                before = _processor_s()
                if name == "own":
                    figures = asyncio.run(own(port, concurrency, options.seconds))
                else:
                    figures = _figures(programs[name](concurrency, options.seconds))
                spent = {"processor_s": _processor_s() - before}
                rows.append({"server": server, "program": name, "concurrency": concurrency, **figures, **spent})
    return rows


def _processor_s() -> float:
    """Return the processor seconds of this process, and of those that it started and that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def planned(concurrency: int) -> dict[str, float]:
    """Return the figures of a client that waits for nothing but the server without a model."""
    requests_per_s = concurrency / (FIRST_S + (TOKENS - 1) * BETWEEN_S)
    figures = (requests_per_s, TOKENS * requests_per_s, 1000 * FIRST_S, 1000 * BETWEEN_S)
    return {**dict(zip(FIGURES, figures, strict=True)), "processor_s": 0.0}


def by_aiperf(port: int, concurrency: int, seconds: float) -> ClientFigures:
    """Return the figures of AIPerf, with the command line of `load-test`, at a port."""
    with tempfile.TemporaryDirectory() as scratch:
        level = Level("concurrency", concurrency)
        return aiperf.drive(f"http://{HOST}:{port}", "writes", [SAMPLE], level, seconds, 0, Path(scratch), LIMIT_S)


def by_load_test(url: str, address: str | None, concurrency: int, seconds: float) -> ClientFigures:
    """Return the figures of `load-test`: of AIPerf on the gateway at `address` or, without one, of perf_analyzer."""
    levels = [Level("concurrency", concurrency)]
    (load,) = load_test(url, [Target("writes", [SAMPLE])], levels, 1, seconds, gateway=address).loads
    return load.client


def _figures(client: ClientFigures) -> dict[str, float]:
    stream = client.stream
    assert stream is not None
    figures = (client.requests_per_s, stream.tokens_per_s, stream.first_p50_ms, stream.between_p50_ms)
    return dict(zip(FIGURES, figures, strict=True))


async def own(port: int, concurrency: int, seconds: float) -> dict[str, float]:
    """Ask one request after the other with `concurrency` clients; requests that began in time are waited for."""
    through, answers = Through(port), []
    start = time.perf_counter()

    async def client() -> None:
        while (sent := time.perf_counter()) - start < seconds:
            times: list[float] = []
            tokens = await through.generate(TOKENS, partial(_note, times))
            answers.append((sent, times, tokens))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    elapsed = time.perf_counter() - start
    # The last two chunks have the usage and the end of the stream.
    between = [(times[-3] - times[0]) / (tokens - 1) for _, times, tokens in answers]
    return dict(
        zip(
            FIGURES,
            (
                len(answers) / elapsed,
                sum(tokens for *_, tokens in answers) / elapsed,
                1000 * float(np.median([times[0] - sent for sent, times, _ in answers])),
                1000 * float(np.median(between)),
            ),
            strict=True,
        )
    )


def _note(times: list[float]) -> None:
    times.append(time.perf_counter())


def show(console: Console, rows: list[dict[str, Any]], server: str, programs: tuple[str, ...]) -> None:
    """Print the median over the rounds of each program, and how far it is from the first one."""
    first, *_ = programs
    table = Table(title=f"{server}: medians over the rounds, and the difference to: {first}", title_justify="left")
    for column in ("at once", "program", *(name.replace("_", " ") for name in FIGURES), "processor s"):
        table.add_column(column, justify="right")
    for concurrency in LEVELS:
        base = _medians(rows, server, first, concurrency)
        for program in programs:
            figures = _medians(rows, server, program, concurrency)
            cells = [f"{figures[name]:.4g} ({figures[name] / base[name] - 1:+.1%})" for name in FIGURES]
            table.add_row(str(concurrency), program, *cells, f"{figures['processor_s']:.1f}")
    console.print(table)


def _medians(rows: list[dict[str, Any]], server: str, program: str, concurrency: int) -> Mapping[str, float]:
    key = (server, program, concurrency)
    own_rows = [row for row in rows if (row["server"], row["program"], row["concurrency"]) == key]
    return {name: float(np.median([row[name] for row in own_rows])) for name in (*FIGURES, "processor_s")}


if __name__ == "__main__":
    main()
