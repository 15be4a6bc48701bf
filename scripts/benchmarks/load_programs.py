"""Agreement of load generators: `scripts/bench load_programs`.

AIPerf as `load-test` runs it, and a closed loop of our own that knows nothing of it, send the same streamed completions
to one gateway, by turns in one run. perf_analyzer, as `load-test` runs it without AIPerf, asks Triton itself.

GPT-2 124M shape with random weights, int8, 32 slots, on one thread: the processes of AIPerf need a core too. The loop
is asyncio, in this process. Needs AIPerf on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from builder.common.machine import available_cores, cpu
from builder.serving.load.measure import load_test
from builder.serving.load.traffic import Level, Target
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from scripts.benchmarks.gateway import PROMPT, Through, make_writer

HOST = "127.0.0.1"
LEVELS = (1, 4)
TOKENS = 64
SAMPLE = {"text_input": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
FIGURES = ("requests_per_s", "tokens_per_s", "first_token_ms", "inter_token_ms")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench load_programs")
    parser.add_argument("--repository", type=Path, help="keep the model here; built there where it is not")
    parser.add_argument("--seconds", type=float, default=15, help="of one measurement (default 15)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each program and level (default 3)")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch) / "repository"
        make_writer(folder, threads=1)
        port = free_ports().http
        with running(folder) as server, gateway(server.url, HOST, port, log=subprocess.DEVNULL):
            address = f"http://{HOST}:{port}"
            asyncio.run(own(port, 1, 1))  # warm
            rows = []
            for concurrency in LEVELS:
                for _ in range(options.rounds):
                    for name, figures in (
                        ("AIPerf", by_program(server.url, concurrency, options.seconds, address)),
                        ("own", asyncio.run(own(port, concurrency, options.seconds))),
                        ("perf_analyzer", by_program(server.url, concurrency, options.seconds, None)),
                    ):
                        rows.append({"program": name, "concurrency": concurrency, **figures})
    machine = {"cores": available_cores(), "cpu": cpu()["model"], "seconds": options.seconds}
    show(Console(width=120), rows)
    if options.output:
        options.output.write_text(json.dumps({**machine, "rows": rows}, indent=1) + "\n")


def by_program(url: str, concurrency: int, seconds: float, address: str | None) -> dict[str, float]:
    """Return the figures of `load-test`: of AIPerf on the gateway at `address` or, without one, of perf_analyzer."""
    target = Target("writes", [SAMPLE])
    (load,) = load_test(url, [target], [Level("concurrency", concurrency)], 1, seconds, gateway=address).loads
    stream = load.client.stream
    assert stream is not None
    return dict(
        zip(
            FIGURES,
            (load.client.requests_per_s, stream.tokens_per_s, stream.first_p50_ms, stream.between_p50_ms),
            strict=True,
        )
    )


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


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the median over the rounds of each program, and the share of our own loop's."""
    table = Table(title="medians over the rounds, and against our own loop", title_justify="left")
    for column in ("at once", "program", "requests/s", "tokens/s", "first token ms", "between tokens ms"):
        table.add_column(column, justify="right")
    for concurrency in LEVELS:
        base = _medians(rows, "own", concurrency)
        for program in ("own", "AIPerf", "perf_analyzer"):
            figures = _medians(rows, program, concurrency)
            cells = [f"{figures[name]:.4g} ({figures[name] / base[name] - 1:+.1%})" for name in FIGURES]
            table.add_row(str(concurrency), program, *cells)
    console.print(table)


def _medians(rows: list[dict[str, Any]], program: str, concurrency: int) -> Mapping[str, float]:
    own_rows = [row for row in rows if (row["program"], row["concurrency"]) == (program, concurrency)]
    return {name: float(np.median([row[name] for row in own_rows])) for name in FIGURES}


if __name__ == "__main__":
    main()
