"""`build-repo load-test`: perf_analyzer on a served model."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tritonclient.grpc as grpc
from rich.console import Console
from tritonclient.utils import InferenceServerException

from builder.commands import DEFAULT_REPOSITORY, DEFAULT_URL, REPOSITORY_HELP, URL_HELP, screen
from builder.errors import SpecError
from builder.samples import load_samples, with_mask
from builder.serve.client import Client
from builder.serve.load_test import load_table, load_test
from builder.serve.triton import running


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo load-test",
        description="Measure a served model with perf_analyzer. Starts the embedded Triton if no server answers.",
    )
    arguments.add_argument("name", help="name of the model")
    arguments.add_argument("--url", default=None, metavar="HOST:PORT", help=URL_HELP)
    arguments.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    arguments.add_argument(
        "--concurrency", default="1,8,32", help="numbers of concurrent requests, separated by commas (default 1,8,32)"
    )
    arguments.add_argument(
        "--samples",
        type=Path,
        help="file of requests, one JSON object a line (default: the samples of the model's task)",
    )
    arguments.add_argument("--json", action="store_true", help="print the measurements as JSON on standard output")
    return arguments


def run(options: argparse.Namespace) -> int:
    try:
        concurrencies = [int(part) for part in options.concurrency.split(",")]
    except ValueError:
        raise SpecError(f"--concurrency {options.concurrency!r} is not a list of numbers such as 1,8,32") from None
    with contextlib.ExitStack() as stack:
        url = options.url or DEFAULT_URL
        if options.url is None and not _answers(url):
            screen.print(f"no server at {url}: starting one on {options.repository}", highlight=False)
            url = stack.enter_context(running(options.repository)).url
        loads = load_test(url, options.name, _load_samples(options, url), concurrencies)
    if options.json:
        print(json.dumps([asdict(load) for load in loads], indent=1))
    else:
        Console().print(load_table(options.name, loads))
    return 0


def _answers(url: str) -> bool:
    with grpc.InferenceServerClient(url) as client:
        try:
            return bool(client.is_server_live(client_timeout=2))
        except InferenceServerException:
            return False


def _load_samples(options: argparse.Namespace, url: str) -> Sequence[Any]:
    """The user's samples, or the default ones of the task that the model names."""
    from builder.tasks import find_task  # loads torch

    with Client(url, options.name) as client:
        if options.samples is not None:
            return load_samples(options.samples, client.signature.inputs)
        task = client.signature.parameters.get("task")
        if task is None:
            raise SpecError(f"{options.name} does not say its task; give inputs for it with --samples FILE")
        mask = client.signature.parameters.get("mask_token", "")
        fixed = {"truncate": True, "max_tokens": 32, "ignore_eos": True}  # of these, what the model has
        fixed = {name: value for name, value in fixed.items() if name in {f.name for f in client.signature.inputs}}
        return [{**with_mask(sample, mask), **fixed} for sample in find_task(task).samples]
