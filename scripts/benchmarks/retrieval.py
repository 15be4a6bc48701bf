"""Retrieval models through servers, side by side, each beside what people would run instead and the machine's limit.

Every side answers the same closed loop of keep-alive HTTP connections with 1, 8 and 32 clients, on the same cores, one
server at a time. Each side runs in every round; figures are medians over rounds. A ratio is the median over rounds of
this project's rate beside the fastest peer's of the same round and as many bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.errors import BuilderError
from builder.options import make_spec
from scripts.benchmarks import peers
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.embedding_servers import Door, closed_loop
from scripts.benchmarks.machine_limits import machine_limits
from scripts.benchmarks.retrieval_models import RETRIEVAL_MODELS, RetrievalModel
from scripts.benchmarks.retrieval_sides import PEERS, TEXT_EMBEDDINGS_INFERENCE, ours, peer
from scripts.benchmarks.traffic import mixed_texts

CLIENTS = (1, 8, 32)
OURS: dict[str, tuple[str, dict[str, str]]] = {  # side: precision, options of the build
    "ours fp32": ("fp32", {}),
    "ours fp32 OpenVINO": ("fp32", {"engine": "openvino"}),
    "ours int8": ("int8", {"precision": "int8"}),
    "ours int8-static OpenVINO": ("int8", {"precision": "int8-static", "engine": "openvino"}),
    "ours int8-weights": ("int8-weights", {"precision": "int8-weights"}),
}
Round = dict[str, dict[str, float]]  # by clients: texts_per_s, p50_ms, p99_ms


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench retrieval")
    parser.add_argument("--models", default="minilm,bert-base", help=f"of {', '.join(RETRIEVAL_MODELS)}")
    parser.add_argument("--sides", default=",".join((*OURS, *PEERS)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of a measurement; default: by model")
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other models stay")
    options = parser.parse_args()
    console = Console(width=140)
    figures: dict[str, Any] = {**circumstances(), "limits": machine_limits(), "models": {}}
    figures["peers"] = {name: peers.PACKAGES[side.environment] for name, side in PEERS.items()}
    console.print(f"{figures['cores']} cores, {figures['cpu']}, limits {figures['limits']}", highlight=False)
    console.print(TEXT_EMBEDDINGS_INFERENCE, highlight=False)
    failures: list[str] = []
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch:
            figures["models"][name] = _bench(console, name, Path(scratch), options, figures["limits"], failures)
        if options.output:
            write_figures(options.output, figures)
    peers.fail_with(failures)


def _bench(
    console: Console,
    name: str,
    scratch: Path,
    options: argparse.Namespace,
    limits: Mapping[str, float],
    failures: list[str],
) -> dict[str, Any]:
    model = RETRIEVAL_MODELS[name]
    checkpoint = scratch / "checkpoint"
    model.make(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = mixed_texts(lambda text: len(tokenizer(text)["input_ids"]))
    tokens = [len(tokenizer(text)["input_ids"]) for text in texts]
    doors, precisions = _doors(model, checkpoint, texts, scratch, options)
    seconds = options.seconds or model.seconds
    rounds: dict[str, list[Round]] = {side: [] for side in doors}
    failed: set[str] = set()
    for _ in range(options.rounds):
        for side in [side for side in doors if side not in failed]:
            try:
                with doors[side]() as door:
                    rounds[side].append(_round(door, model, texts, seconds))
            except (peers.PeerError, RuntimeError, BuilderError) as error:
                failed.add(side)
                failures.append(f"{name}, {side}: {error}")
                console.print(f"{name}, {side}: failed, the reason follows at the end", highlight=False)
    measured = {side: each for side, each in rounds.items() if each and side not in failed}
    figures = {
        "sides": {side: {"precision": precisions[side], **_medians(each)} for side, each in measured.items()},
        "limit_texts_per_s": _limits(checkpoint, tokens, limits),
        "ratios": _ratios(measured, precisions),
    }
    _show(console, name, figures)
    return figures


def _doors(
    model: RetrievalModel, checkpoint: Path, texts: Sequence[str], scratch: Path, options: argparse.Namespace
) -> tuple[dict[str, Callable[[], AbstractContextManager[Door]]], dict[str, str]]:
    """Return a function that serves each side, and each side's precision."""
    wanted = options.sides.split(",")
    doors: dict[str, Callable[[], AbstractContextManager[Door]]] = {}
    precisions: dict[str, str] = {}
    for side, (precision, build_options) in OURS.items():
        if side in wanted:
            doors[side] = _built(model, checkpoint, scratch / side, build_options)
            precisions[side] = precision
    for name in [name for name in PEERS if name in wanted and model.kind in PEERS[name].kinds]:
        folder = scratch / (PEERS[name].converter or PEERS[name].environment)
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
        (folder / "work.json").write_text(json.dumps({"texts": texts, "pooling": model.pooling}))
        for precision in PEERS[name].precisions:
            doors[f"{name} {precision}"] = partial(peer, name, model, folder, precision, options.environments)
            precisions[f"{name} {precision}"] = precision
    return doors, precisions


def _built(
    model: RetrievalModel, checkpoint: Path, output: Path, build_options: Mapping[str, str]
) -> Callable[[], AbstractContextManager[Door]]:
    """Return a function that serves the checkpoint; it builds at its first call."""
    repository = output / "model_repository"

    def serve() -> AbstractContextManager[Door]:
        if not repository.exists():
            settings = {"task": "feature-extraction", **model.spec, **build_options}
            build(make_spec(model=str(checkpoint), name="encoder", output=repository, **settings))
        opened: AbstractContextManager[Door] = ours(repository, model.kind)
        return opened

    return serve


def _round(door: Door, model: RetrievalModel, texts: Sequence[str], seconds: float) -> Round:
    requests, cells = model.requests(texts), {}
    for clients in CLIENTS:
        rate, p50, p99 = closed_loop(door, requests, clients, seconds)
        cells[str(clients)] = {"texts_per_s": rate * model.texts, "p50_ms": p50, "p99_ms": p99}
    return cells


def _medians(rounds: Sequence[Round]) -> Round:
    return {
        clients: {name: median(each[clients][name] for each in rounds) for name in cell}
        for clients, cell in rounds[0].items()
    }


def _ratios(rounds: Mapping[str, Sequence[Round]], precisions: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return, by precision and clients, the median over rounds of our fastest side beside the fastest peer."""
    ratios: dict[str, dict[str, float]] = {}
    for precision in dict.fromkeys(precisions[side] for side in rounds):
        here = [each for side, each in rounds.items() if side in OURS and precisions[side] == precision]
        there = [each for side, each in rounds.items() if side not in OURS and precisions[side] == precision]
        if here and there:
            ratios[precision] = {str(c): _ratio(here, there, str(c)) for c in CLIENTS}
    return ratios


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
    bits = {"fp32": 4, "int8": 1, "int8-weights": 1}
    peak = {"fp32": limits["fp32"], "int8": limits["int8"], "int8-weights": limits["fp32"]}
    return {
        **{precision: 1e9 * peak[precision] / operations for precision in bits},
        **{f"{precision} alone": 1e9 * limits["bandwidth"] / (weights * width) for precision, width in bits.items()},
    }


def _show(console: Console, name: str, figures: Mapping[str, Any]) -> None:
    table = Table(title=name, title_justify="left")
    table.add_column("side")
    for heading in (*(f"texts/s from {c}" for c in CLIENTS), *(f"p50, p99 ms from {c}" for c in CLIENTS), "limit"):
        table.add_column(heading, justify="right")
    for side, cells in figures["sides"].items():
        rates = [f"{cells[str(c)]['texts_per_s']:.1f}" for c in CLIENTS]
        waits = [f"{cells[str(c)]['p50_ms']:.0f}, {cells[str(c)]['p99_ms']:.0f}" for c in CLIENTS]
        table.add_row(side, *rates, *waits, f"{figures['limit_texts_per_s'][cells['precision']]:.0f}")
    console.print(table)
    for precision, ratios in figures["ratios"].items():
        shown = ", ".join(f"{ratio:.2f} from {clients}" for clients, ratio in ratios.items())
        console.print(f"{name} {precision}: times the fastest peer {shown}", highlight=False)


if __name__ == "__main__":
    main()
