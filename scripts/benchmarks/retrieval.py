"""Retrieval models through servers, side by side, each beside what people would run instead and the machine's limit.

Every side answers the same closed loop of keep-alive HTTP connections, on the same cores, one server at a time. A run
is one model in one precision: all sides of as many bits, each in every round; figures are medians over rounds. A ratio
is the median over rounds of this project's rate beside the fastest peer's of the same round. Before it is timed, each
side answers a few requests, which are compared with those of sentence-transformers on PyTorch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.errors import BuilderError
from builder.options import make_spec
from scripts.benchmarks import peers
from scripts.benchmarks.circumstances import circumstances, refuse_other_machine
from scripts.benchmarks.embedding_servers import Door, closed_loop
from scripts.benchmarks.machine_limits import machine_limits
from scripts.benchmarks.retrieval_models import RETRIEVAL_MODELS, RetrievalModel
from scripts.benchmarks.retrieval_sides import PEERS, REFERENCE, TEXT_EMBEDDINGS_INFERENCE, ours, peer
from scripts.benchmarks.traffic import mixed_texts

BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int8-weights": 1}  # of a weight, by precision
MULTIPLIED = {"int8-weights": "int8"}  # every side rounds what 8-bit weights are multiplied by to 8 bits
OURS: dict[str, tuple[str, dict[str, str]]] = {  # side: precision, options of the build
    "ours fp32": ("fp32", {}),
    "ours fp32 OpenVINO": ("fp32", {"engine": "openvino"}),
    "ours bf16 OpenVINO": ("bf16", {"precision": "bf16"}),
    "ours int8": ("int8", {"precision": "int8"}),
    "ours int8-static OpenVINO": ("int8", {"precision": "int8-static", "engine": "openvino"}),
    "ours int8-weights": ("int8-weights", {"precision": "int8-weights"}),
    "ours int8-weights OpenVINO": ("int8-weights", {"precision": "int8-weights", "engine": "openvino"}),
}
COMPARED = 6  # texts whose answers are compared, at least; of a ranker one request, as it brings more
Round = dict[str, dict[str, float]]  # by clients: texts_per_s, p50_ms, p99_ms


@dataclass(frozen=True)
class Side:
    """Server of one run; `prepare` builds or converts what it serves, and does nothing a second time."""

    is_ours: bool
    prepare: Callable[[], None]
    serve: Callable[[], AbstractContextManager[Door]]


@dataclass(frozen=True)
class Work:
    """Requests of a model, and the folder of its checkpoint and of all that is made of it."""

    model: RetrievalModel
    folder: Path
    requests: Sequence[Any]

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench retrieval")
    parser.add_argument("--models", default="minilm,bert-base", help=f"of {', '.join(RETRIEVAL_MODELS)}")
    parser.add_argument("--precisions", default=",".join(BYTES), help="a run each")
    parser.add_argument("--sides", default=",".join((*OURS, *PEERS)))
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3, help="0 builds, converts and compares answers only")
    parser.add_argument("--seconds", type=float, help="of a measurement; default: by model")
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument("--folder", type=Path, help="keep checkpoints, builds and conversions here for later runs")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other runs stay")
    options = parser.parse_args()
    console = Console(width=140)
    machine = circumstances()
    refuse_other_machine(options.output, machine)
    figures: dict[str, Any] = {**machine, "limits": machine_limits()}
    figures["peers"] = {name: peers.PACKAGES[side.environment] for name, side in PEERS.items()}
    console.print(f"{figures['cores']} cores, {figures['cpu']}, limits {figures['limits']}", highlight=False)
    console.print(TEXT_EMBEDDINGS_INFERENCE, highlight=False)
    failures: list[str] = []
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            work, limits = _work(name, Path(folder) / name, figures["limits"])
            for precision in options.precisions.split(","):
                run = _run(console, work, precision, options)
                failures += [f"{name}, {side}: {reason}" for side, reason in run["failed"].items()]
                run["limit_texts_per_s"] = {at: limits[at] for at in (precision, f"{precision} alone")}
                _show(console, f"{name} {precision}", run)
                if options.output and run["sides"]:
                    write_run(options.output, figures, name, precision, run)
    peers.fail_with(failures)


def write_run(path: Path, figures: Mapping[str, Any], name: str, precision: str, run: Mapping[str, Any]) -> None:
    """Write a run as JSON in place of an earlier one of the model and precision; other runs stay."""
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    models = known.get("models", {})
    models[name] = {**models.get(name, {}), precision: run}
    path.write_text(json.dumps({**known, **figures, "models": models}, indent=1) + "\n", "utf-8")


def _work(name: str, folder: Path, limits: Mapping[str, float]) -> tuple[Work, dict[str, float]]:
    """Return a model's requests and its texts a second at the limits; its checkpoint is made at its first use."""
    model, checkpoint = RETRIEVAL_MODELS[name], folder / "checkpoint"
    if not checkpoint.exists():
        model.make(folder / "making")
        (folder / "making").rename(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = mixed_texts(lambda text: len(tokenizer(text)["input_ids"]))
    (checkpoint / "work.json").write_text(json.dumps({"texts": texts, "pooling": model.pooling}))
    tokens = [len(tokenizer(text)["input_ids"]) for text in texts]
    return Work(model, folder, model.requests(texts)), _limits(checkpoint, tokens, limits)


def _run(console: Console, work: Work, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all sides of a precision, their ratios, and the reasons of those that failed."""
    sides = _sides(work, precision, options)
    clients = [int(count) for count in options.clients.split(",")]
    seconds = options.seconds or work.model.seconds
    rounds: dict[str, list[Round]] = {side: [] for side in sides}
    agreement: dict[str, float] = {}
    failed: dict[str, str] = {}
    for turn in range(max(1, options.rounds)):
        for name in [name for name in sides if name not in failed]:
            try:
                sides[name].prepare()
                with sides[name].serve() as door:
                    if turn == 0:
                        agreement[name] = _agreement(door, work, options.environments)
                    if options.rounds:
                        rounds[name].append(_round(door, work, clients, seconds))
            except (peers.PeerError, RuntimeError, OSError, BuilderError) as error:
                failed[name] = str(error)
                console.print(f"{name}: failed, the reason follows at the end", highlight=False)
        console.print(f"agreement with sentence-transformers: {agreement}", highlight=False)
    measured = {name: each for name, each in rounds.items() if each and name not in failed}
    return {
        "date": date.today().isoformat(),
        "rounds": options.rounds,
        "seconds": seconds,
        "sides": {name: {"agreement": agreement[name], **_medians(each)} for name, each in measured.items()},
        "ratios": _ratios(measured, [name for name, side in sides.items() if side.is_ours]),
        "failed": failed,
    }


def _sides(work: Work, precision: str, options: argparse.Namespace) -> dict[str, Side]:
    """Return the sides of a precision, by name."""
    requested, model = options.sides.split(","), work.model
    sides: dict[str, Side] = {}
    for name, (own, build_options) in OURS.items():
        if name in requested and own == precision:
            repository = work.folder / name.replace(" ", "-") / "model_repository"
            prepare = partial(_build, work, repository, build_options)
            sides[name] = Side(True, prepare, partial(ours, repository, model.kind))
    for name, side in PEERS.items():
        if name in requested and precision in side.precisions and model.kind in side.kinds:
            folder = work.folder / (side.converter or side.environment)
            prepare = partial(_copy, work.checkpoint, folder)
            serve = partial(peer, name, model, folder, precision, options.environments)
            sides[name] = Side(False, prepare, serve)
    return sides


def _build(work: Work, repository: Path, build_options: Mapping[str, str]) -> None:
    """Build the model once."""
    if not (repository / "encoder").exists():
        settings = {"task": "feature-extraction", **work.model.spec, **build_options}
        build(make_spec(model=str(work.checkpoint), name="encoder", output=repository, **settings))


def _copy(checkpoint: Path, folder: Path) -> None:
    """Give a peer a folder of its own, because it writes its conversions beside the checkpoint."""
    if not folder.exists():
        shutil.copytree(checkpoint, folder)


def _agreement(door: Door, work: Work, environments: Path) -> float:
    """Return the lowest cosine of a side's answers with those of sentence-transformers on PyTorch in fp32.

    Scores of documents are compared around their mean, so that it is their correlation.
    """
    requests, path = work.requests[: max(1, COMPARED // work.model.texts)], work.folder / "reference.json"
    if not path.exists():
        folder = work.folder / PEERS[REFERENCE].environment
        _copy(work.checkpoint, folder)
        with peer(REFERENCE, work.model, folder, "fp32", environments) as reference:
            path.write_text(json.dumps(_answers(reference, requests)))
    answers = _answers(door, requests)
    return min(map(partial(_cosine, work.model.kind), answers, json.loads(path.read_text())))


def _answers(door: Door, requests: Sequence[Any]) -> list[list[float]]:
    connection = door.connect()
    return [door.numbers(door.ask(connection, request)) for request in requests]


def _cosine(kind: str, one: Sequence[float], other: Sequence[float]) -> float:
    a, b = np.array(one), np.array(other)
    if kind != "embed":
        a, b = a - a.mean(), b - b.mean()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _round(door: Door, work: Work, clients: Sequence[int], seconds: float) -> Round:
    cells = {}
    for count in clients:
        rate, p50, p99 = closed_loop(door, work.requests, count, seconds)
        cells[str(count)] = {"texts_per_s": rate * work.model.texts, "p50_ms": p50, "p99_ms": p99}
    return cells


def _medians(rounds: Sequence[Round]) -> Round:
    return {
        clients: {name: median(each[clients][name] for each in rounds) for name in cell}
        for clients, cell in rounds[0].items()
    }


def _ratios(rounds: Mapping[str, Sequence[Round]], own: Sequence[str]) -> dict[str, float]:
    """Return, by clients, the median over rounds of our fastest side beside the fastest peer."""
    here = [each for side, each in rounds.items() if side in own]
    there = [each for side, each in rounds.items() if side not in own]
    return {clients: _ratio(here, there, clients) for clients in here[0][0]} if here and there else {}


def _ratio(here: Sequence[Sequence[Round]], there: Sequence[Sequence[Round]], clients: str) -> float:
    def fastest(sides: Sequence[Sequence[Round]], turn: int) -> float:
        return max(side[turn][clients]["texts_per_s"] for side in sides)

    return median(fastest(here, turn) / fastest(there, turn) for turn in range(len(here[0])))


def _limits(checkpoint: Path, tokens: Sequence[int], limits: Mapping[str, float]) -> dict[str, float]:
    """Return texts a second at the machine's limits: all products at its peak, or all weights read for a text."""
    config = AutoConfig.from_pretrained(checkpoint)
    hidden, layers, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    size = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    wide = size * config.num_attention_heads
    narrow = size * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    matrices = 3 if getattr(config, "hidden_act", "") == "silu" else 2
    weights = layers * (hidden * (2 * wide + 2 * narrow) + matrices * hidden * inner)
    operations = sum(2 * weights * n + 4 * layers * wide * n * n for n in tokens) / len(tokens)
    peaks = {precision: limits[MULTIPLIED.get(precision, precision)] for precision in BYTES}
    return {
        **{precision: 1e9 * peak / operations for precision, peak in peaks.items()},
        **{f"{precision} alone": 1e9 * limits["bandwidth"] / (weights * width) for precision, width in BYTES.items()},
    }


def _show(console: Console, title: str, run: Mapping[str, Any]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("side")
    clients = list(next(iter(run["sides"].values()), {}))[1:]
    for heading in ("agreement", *(f"texts/s from {c}" for c in clients), *(f"p50, p99 ms from {c}" for c in clients)):
        table.add_column(heading, justify="right")
    for side, cells in run["sides"].items():
        rates = [f"{cells[c]['texts_per_s']:.1f}" for c in clients]
        waits = [f"{cells[c]['p50_ms']:.0f}, {cells[c]['p99_ms']:.0f}" for c in clients]
        table.add_row(side, f"{cells['agreement']:.6f}", *rates, *waits)
    console.print(table)
    console.print(f"limits in texts/s: {run['limit_texts_per_s']}", highlight=False)
    shown = ", ".join(f"{ratio:.2f} from {clients}" for clients, ratio in run["ratios"].items())
    console.print(f"{title}: times the fastest peer {shown}", highlight=False)


if __name__ == "__main__":
    main()
