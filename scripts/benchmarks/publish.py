"""Versions under load: `scripts/bench publish`.

An encoder with its engine inside, one with its engine as a Triton model of its own, and a decoder, each published ten
times and rolled back ten times on a running server while clients ask them. The two builds that take turns differ in
labels and weights, so that an answer by the front of one and the engine of the other would be noticed: each answer
must be, as a whole, that of the one or of the other. The checkpoints are tiny, since the change of versions is tested.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2

from builder.building.keys import build_key
from builder.building.pipeline import verified
from builder.checkpoints.libraries import quiet_libraries
from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.repository.publish import publish
from builder.repository.verdict import Verified
from builder.repository.versions import rollback, served_number
from builder.runtime.fields import Field
from builder.serving.client.client import Client
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import add_tensor
from builder.serving.gateway.triton import Triton
from builder.serving.server.control import Control
from builder.serving.server.triton import running
from scripts.benchmarks.circumstances import circumstances, write_figures
from tests.decoders import make_decoder_checkpoint
from tests.tiny_encoders import make_checkpoint

LABELS = ({0: "sport", 1: "food", 2: "travel"}, {0: "red", 1: "green", 2: "blue"})
SIZES = (64, 96)  # of the feed-forward layers
PROMPTS = [" ".join(text.split()[:6]) for text in TEXTS[:12]]
TOKENS = 40  # of a stream
CLOSE = 1e-3  # a batch's other rows change the last digits of a score
ENCODERS: Mapping[str, Mapping[str, Any]] = {"inside": {}, "beside": {"executor": "bls"}}
STREAM = "writes"

Pair = tuple[Verified, Verified]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench publish")
    parser.add_argument("--requests", type=int, default=100_000, help="of encoders, at least (default 100000)")
    parser.add_argument("--changes", type=int, default=10, help="publishes, and rollbacks, of each model (default 10)")
    parser.add_argument("--seconds", type=float, default=1200, help="no request or change after that (default 1200)")
    parser.add_argument("--clients", type=int, default=8, help="of each encoder (default 8)")
    parser.add_argument("--streams", type=int, default=3, help="at once (default 3)")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        figures = measure(Path(folder) / "repository", pairs(Path(folder)), options)
    show(figures)
    write_figures(options.output, {**circumstances(), **figures})
    assert not figures["failed"], figures["failures"]
    assert not figures["wrong"], figures["failures"]


@dataclass
class Seen:
    """Outcome of the requests to one model. `ms`: the time of each, with the second it started."""

    versions: list[int] = field(default_factory=lambda: [0, 0])
    ms: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """Change of one version for another, and its time."""

    model: str
    kind: str
    started: float
    published_s: float
    switched_s: float


def measure(repository: Path, builds: Mapping[str, Pair], options: argparse.Namespace) -> dict[str, Any]:
    """Publish and roll back `builds` in `repository` under load, and count the answers."""
    for pair in builds.values():
        publish(repository, pair[1], keep=3)
        publish(repository, pair[0], keep=3)
    with running(repository) as server:
        with ThreadPoolExecutor() as pool:
            expected = dict(zip(builds, pool.map(partial(answers, server.url, repository), builds), strict=True))
        changes: list[Change] = []
        failures: list[str] = []
        started = time.monotonic()
        until = started + options.seconds
        changer = threading.Thread(
            target=change, args=(server.url, repository, builds, options.changes, until, changes, failures)
        )
        changer.start()
        seen = asyncio.run(ask(server.url, expected, options, changer))
        took = time.monotonic() - started
        changer.join()
        errors = [line for line in server.log if line.startswith("E")]
    assert not failures, failures
    return figures_of(seen, changes, took, errors)


def pairs(folder: Path) -> dict[str, Pair]:
    """Return two builds that can be published under one name, for each model."""
    options: Mapping[str, Mapping[str, Any]] = {**ENCODERS, STREAM: {}}
    return {
        name: (one_build(name, folder, options[name], 0), one_build(name, folder, options[name], 1)) for name in options
    }


def one_build(name: str, scratch: Path, options: Mapping[str, Any], turn: int) -> Verified:
    """Create the first or the second build of a pair."""
    folder = scratch / f"{name}-{turn}"
    if name == STREAM:
        checkpoint = make_decoder_checkpoint(folder / "checkpoint", "llama", intermediate_size=SIZES[turn])
        extra: dict[str, Any] = {"slots": 4, "max_length": 128}
    else:
        shape: dict[str, Any] = {"labels": LABELS[turn], "intermediate_size": SIZES[turn]}
        checkpoint = make_checkpoint(folder / "checkpoint", "bert", "text-classification", **shape)
        extra = {"max_batch_size": 8}
    spec = make_spec(model=str(checkpoint), name=name, output=scratch / "repository", threads=1, **extra, **options)
    (folder / "graphs").mkdir()
    return verified(spec, resolve(spec), build_key(spec), folder / "graphs", lambda stage: nullcontext())


def answers(url: str, repository: Path, name: str) -> list[Sequence[Any]]:
    """Return the answers of each of the two builds alone, from its published version. The first serves afterwards."""
    answers_seen: list[Sequence[Any]] = []
    with Control(url, repository) as control:
        for number in (1, 2):
            rollback(repository, name, number)
            control.switch(name)
            with Client(url, name) as client:
                if name == STREAM:
                    sample = {"max_tokens": TOKENS, "ignore_eos": True}
                    answers_seen.append(
                        ["".join(client.ask({**sample, "text_input": p})["text_output"]) for p in PROMPTS]
                    )
                else:
                    replies = [client.ask({"text_input": text, "top_k": 3}) for text in TEXTS]
                    answers_seen.append([dict(zip(a["label"], a["score"], strict=True)) for a in replies])
    return answers_seen[::-1]


def change(
    url: str,
    repository: Path,
    builds: Mapping[str, Pair],
    rounds: int,
    until: float,
    done: list[Change],
    failures: list[str],
) -> None:
    """Publish and roll back each model in turn, and have the server change each time."""
    try:
        change_all(url, repository, builds, rounds, until, done)
    except Exception as error:  # runs in a thread: the thread that started it reports this
        failures.append(repr(error))


def change_all(
    url: str, repository: Path, builds: Mapping[str, Pair], rounds: int, until: float, done: list[Change]
) -> None:
    with Control(url, repository) as control:
        for _, name in itertools.product(range(rounds), builds):
            if time.monotonic() > until:
                return
            before = served_number(repository / name)  # of the first build, because it is rolled back to
            for kind in ("publish", "rollback"):
                started = time.monotonic()
                if kind == "publish":
                    publish(repository, builds[name][1], keep=2)  # each removes an older one
                else:
                    rollback(repository, name, before)
                published = time.monotonic()
                control.switch(name)
                done.append(Change(name, kind, started, published - started, time.monotonic() - published))


async def ask(
    url: str, expected: Mapping[str, list[Sequence[Any]]], options: argparse.Namespace, changer: threading.Thread
) -> dict[str, Seen]:
    triton, seen = Triton(url), {name: Seen() for name in expected}
    end = time.monotonic() + options.seconds

    def going() -> bool:
        requests = sum(len(seen[name].ms) + len(seen[name].failures) for name in ENCODERS)
        return time.monotonic() < end and (changer.is_alive() or requests < options.requests)

    async def encoder(name: str, client: int) -> None:
        for turn in itertools.count(client):
            if not going():
                return
            await classify(triton, name, turn % len(TEXTS), expected[name], seen[name])

    async def stream(client: int) -> None:
        for turn in itertools.count(client):
            if not going():
                return
            await write(triton, turn % len(PROMPTS), expected[STREAM], seen[STREAM])

    work = [encoder(name, client) for name in ENCODERS for client in range(options.clients)]
    await asyncio.gather(*work, *(stream(client) for client in range(options.streams)))
    await triton.close()
    return seen


async def classify(triton: Triton, name: str, index: int, expected: list[Sequence[Any]], seen: Seen) -> None:
    request = service_pb2.ModelInferRequest(model_name=name)
    add_tensor(request, Field("text_input", "TYPE_STRING"), [TEXTS[index]], (1, 1))
    started = time.monotonic()
    try:
        outputs = await triton.infer(request)
    except ApiError as error:
        seen.failures.append(f"{name}: {error}")
        return
    seen.ms.append((started, 1000 * (time.monotonic() - started)))
    label, score = outputs["label"].strings()[0], float(outputs["score"].array().reshape(-1)[0])
    judge([abs(build[index].get(label, 9.0) - score) < CLOSE for build in expected], f"{name}: {label} {score}", seen)


async def write(triton: Triton, index: int, expected: list[Sequence[Any]], seen: Seen) -> None:
    request = service_pb2.ModelInferRequest(model_name=STREAM)
    for name, kind, value in (
        ("text_input", "TYPE_STRING", PROMPTS[index]),
        ("max_tokens", "TYPE_INT32", TOKENS),
        ("ignore_eos", "TYPE_BOOL", True),
        ("stream", "TYPE_BOOL", True),
    ):
        add_tensor(request, Field(name, kind), [value], (1,))
    started, text = time.monotonic(), ""
    try:
        async for outputs in triton.stream(request):
            text += "".join(outputs["text_output"].strings())
    except ApiError as error:
        seen.failures.append(f"{STREAM}: {error}")
        return
    seen.ms.append((started, 1000 * (time.monotonic() - started)))
    judge([text == build[index] for build in expected], f"{STREAM}: {text!r}", seen)


def judge(fits: Sequence[bool], what: str, seen: Seen) -> None:
    """Count an answer for the build that gave it; an answer of neither, or half of each, is wrong."""
    if sum(fits) != 1:
        seen.wrong.append(what)
    else:
        seen.versions[fits.index(True)] += 1


def figures_of(seen: Mapping[str, Seen], changes: Sequence[Change], took: float, errors: list[str]) -> dict[str, Any]:
    models = {}
    for name, one in seen.items():
        spans = [(c.started, c.started + c.published_s + c.switched_s) for c in changes if c.model == name]
        during = [ms for started, ms in one.ms if any(b < started + ms / 1000 and started < e for b, e in spans)]
        models[name] = {
            "requests": len(one.ms) + len(one.failures),
            "failed": len(one.failures),
            "wrong": len(one.wrong),
            "of_each_build": one.versions,
            "ms": quantiles([ms for _, ms in one.ms]),
            "ms_during_its_changes": quantiles(during),
            "publish_s": round(float(np.median([c.published_s for c in changes if c.model == name])), 2),
            "switch_s": round(float(np.median([c.switched_s for c in changes if c.model == name])), 2),
            "across_a_change": sum(any(b < end < b + ms / 1000 for _, end in spans) for b, ms in one.ms),
        }
    return {
        "seconds": round(took, 1),
        "changes": len(changes),
        "models": models,
        "failed": sum(model["failed"] for model in models.values()),
        "wrong": sum(model["wrong"] for model in models.values()),
        "failures": [text for one in seen.values() for text in [*one.failures[:3], *one.wrong[:3]]],
        "errors_in_the_log": errors[:5],
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    shares = {"p50": 0.5, "p99": 0.99, "most": 1.0}
    return {name: round(float(np.quantile(values, share)), 1) if values else 0.0 for name, share in shares.items()}


def show(figures: Mapping[str, Any]) -> None:
    table = Table(title=f"{figures['changes']} changes of versions in {figures['seconds']} s", title_justify="left")
    columns = ("model", "requests", "failed", "wrong", "p50 ms", "p99 ms", "p99 in a change", "most", "switch s")
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, model in figures["models"].items():
        counts = (model["requests"], model["failed"], model["wrong"])
        times = (model["ms"]["p50"], model["ms"]["p99"], model["ms_during_its_changes"]["p99"], model["ms"]["most"])
        table.add_row(name, *map(str, counts), *map(str, times), str(model["switch_s"]))
    Console(width=120).print(table)
    print(json.dumps({key: figures[key] for key in ("failed", "wrong", "failures", "errors_in_the_log")}))


if __name__ == "__main__":
    main()
