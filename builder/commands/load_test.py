"""`build-repo load-test`: perf_analyzer, or AIPerf for generation, on served models."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.commands import DEFAULT_URL, REPOSITORY, URL, count, positive, progress, screen, screen_table
from builder.commands.gateway import KEYS_VARIABLE
from builder.common.errors import ServeError, SpecError
from builder.common.files import write_output
from builder.serving.client.client import Client
from builder.serving.client.samples import samples_for
from builder.serving.load import aiperf
from builder.serving.load.compare import FigureComparison, compare_runs, comparison_table
from builder.serving.load.measure import load_test
from builder.serving.load.page import page
from builder.serving.load.record import LoadTestRun, read, save, table
from builder.serving.load.traffic import Target, concurrencies, rates, shares
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running

LOOPBACK = "127.0.0.1"
LIVE_S = 30.0  # for a server that listens to report that it is live


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo load-test",
        description="Measure served models with perf_analyzer; models that generate with AIPerf, where installed. "
        "Starts the embedded Triton if no server answers.",
    )
    add = arguments.add_argument
    add(
        "name",
        nargs="+",
        metavar="NAME[:SHARE]",
        help="models, and the share of the load that each gets, such as minilm:3",
    )
    add("--url", metavar="HOST:PORT", help=URL["help"])
    add("--repository", **REPOSITORY)
    load = arguments.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        default="1,8,32",
        help="numbers of concurrent requests, separated by commas, or START:END:STEP (default 1,8,32)",
    )
    load.add_argument("--rate", help="requests a second instead, at random times: a list, or the ramp START:END:STEP")
    add("--seconds", type=positive, default=6.0, metavar="S", help="seconds of one measurement (default 6)")
    add("--repeats", type=count, default=3, metavar="N", help="measurements of each level (default 3)")
    add(
        "--p99-ms",
        type=positive,
        metavar="MS",
        help="stop at the first level whose p99 latency exceeds this; of streams, whose time to the first token does",
    )
    add(
        "--samples",
        type=Path,
        help="file of requests, one JSON object a line (default: the samples of the model's task)",
    )
    add("--json", action="store_true", help="print the measurements as JSON on standard output")
    add("--save", type=Path, metavar="FILE", help="keep the measurements as JSON")
    add("--page", type=Path, metavar="FILE", help="write them as one HTML page")
    add("--compare", type=Path, metavar="FILE", help="an earlier load test that was saved")
    return arguments


def run(options: argparse.Namespace) -> int:
    levels = rates(options.rate) if options.rate is not None else concurrencies(options.concurrency)
    mix = shares(options.name)
    if options.samples is not None and len(mix) > 1:
        raise SpecError("--samples is for one model; a mix is driven with the samples of each model's task")
    before = read(options.compare) if options.compare is not None else None
    with contextlib.ExitStack() as stack:
        url = options.url or DEFAULT_URL
        if options.url is None and not _answers(url):
            screen.print(f"no server at {url}: starting one on {options.repository}")
            url = stack.enter_context(running(options.repository)).url
        targets = [Target(name, model_samples(url, name, options.samples), share) for name, share in mix.items()]
        through = _gateway(url, targets, stack)
        with progress("measuring") as show:
            tested = load_test(url, targets, levels, options.repeats, options.seconds, options.p99_ms, through, show)
    compared = [] if before is None else compare_runs(before, tested)
    _show(options, tested, before, compared)
    return 0


def _gateway(url: str, targets: Sequence[Target], stack: contextlib.ExitStack) -> str | None:
    """Start a gateway for AIPerf if a model generates text; return its address, or None if perf_analyzer measures."""
    if not any(aiperf.STREAM in sample for target in targets for sample in target.samples):
        return None
    command = aiperf.missing()
    if command is not None:
        screen.print(f"perf_analyzer measures the streams; to measure them with AIPerf: {command}", markup=False)
        return None
    port = free_ports().http
    environment = {name: value for name, value in os.environ.items() if name != KEYS_VARIABLE}  # AIPerf has no key
    stack.enter_context(gateway(url, LOOPBACK, port, log=subprocess.DEVNULL, environment=environment))
    return f"http://{LOOPBACK}:{port}"


def _show(
    options: argparse.Namespace, tested: LoadTestRun, before: LoadTestRun | None, compared: list[FigureComparison]
) -> None:
    """Show the results on the screen or as JSON, and write the requested files."""
    if options.save is not None:
        save(tested, options.save)
    if options.page is not None:
        write_output(options.page, page(tested, before, compared), "choose another with --page")
    if options.json:
        print(json.dumps(tested.document(), indent=1))
        return
    screen_table(table(tested))
    if tested.stopped is not None:
        screen.print(f"stopped at {tested.stopped}")
    if before is not None:
        screen_table(comparison_table(compared, before))


def _answers(url: str) -> bool:
    with grpc.InferenceServerClient(url) as client:
        try:
            return bool(client.is_server_live(client_timeout=LIVE_S))
        except InferenceServerException:
            return False


def model_samples(url: str, name: str, path: Path | None) -> Sequence[Any]:
    """Return the user's samples, or the default ones of the task that the model names. Raises SpecError."""
    with Client(url, name) as client:
        samples = samples_for(client, path)
        if path is not None:
            return samples
        if client.signature.in_pieces:
            samples = [{**sample, "stream": True} for sample in samples]
        return _answered(client, samples) if client.signature.streams else samples


def _answered(client: Client, samples: Sequence[Any]) -> Sequence[Any]:
    """Return the samples that the model answers.

    A model with a short limit refuses long texts, at which perf_analyzer would give up.
    """
    answered, refused = [], None
    for sample in samples:
        try:
            next(client.stream(sample))  # the rest is not needed
            answered.append(sample)
        except ServeError as error:
            refused = error
    if refused is not None and not answered:
        raise refused
    return answered
