"""Tables of docs/retrieval*.json, one for each machine, which `scripts/bench retrieval` records run by run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.retrieval_models import RETRIEVAL_MODELS
from scripts.documentation.markdown import table
from scripts.documentation.recorded import FOLDER, read, recorded

CLIENTS = ("1", "8", "32")
PRECISIONS = ("fp32", "bf16", "int8", "int8-weights")
KINDS = {"embed": "embedders", "rerank": "rerankers", "late": "ColBERT"}
TITLES = {
    "minilm": "all-MiniLM-L6-v2, real weights",
    "bert-base": "Embedder of BERT-base's sizes",
    "bge-m3": "Embedder of BGE-M3's sizes",
    "qwen3-embedding": "Embedder of Qwen3-Embedding-0.6B's sizes",
    "qwen3-reranker": "Reranker of Qwen3-0.6B's sizes, 20 documents a request",
    "colbert": "ColBERT of BERT-base's sizes, 100 documents a request",
}


def summary() -> str:
    """Return each machine and, by model and precision, this project beside the fastest peer of the same run."""
    return "\n\n".join(map(_summary, _machines()))


def _summary(machine: Machine) -> str:
    figures, runs = machine.figures, machine.runs
    limits = figures["limits"]
    rows = [
        (TITLES[name], precision, *(_ratio(run, count) for count in CLIENTS), _fastest(run))
        for name, precision, run in runs
        if run["ratios"]
    ]
    days = sorted({run["date"] for _, _, run in runs})
    rounds = sorted({run["rounds"] for _, _, run in runs})
    heads = ("model", "precision", *(_clients(count) for count in CLIENTS), "fastest peer, most clients")
    named = {**figures, "date": " and ".join(days), "cpu": machine.cpu}
    return (
        f"{recorded('scripts/bench retrieval', machine.name, named, ', a run a model and precision,')}, in "
        f"{' or '.join(map(str, rounds))} round{'s' * (rounds != [1])} a run. "
        f"The machine multiplies at {limits['fp32']:.0f} GFLOP/s in fp32, {limits['bf16']:.0f} in bf16 and "
        f"{limits['int8']:.0f} GOP/s in int8, and reads {limits['bandwidth']:.0f} GB/s. Times the fastest peer of as "
        f"many bits:\n\n{table(heads, rows)}"
    )


def sentence() -> str:
    """Return the range over runs of the ratios, by clients, and how many of all runs there are, of which kinds."""
    machines = _machines()
    runs = [(name, at, run["ratios"]) for machine in machines for name, at, run in machine.runs if run["ratios"]]
    ranges = []
    for count in CLIENTS:
        measured = [ratios[count] for _, _, ratios in runs if count in ratios]
        ranges.append(f"{min(measured):.2f}x to {max(measured):.2f}x with {_clients(count)}")
    ran = {RETRIEVAL_MODELS[name].kind for name, _, _ in runs}
    kinds = ", ".join(noun for kind, noun in KINDS.items() if kind in ran)
    made = len({(name, precision) for name, precision, _ in runs})
    return (
        f"Retrieval models ({kinds}), in multiples of the texts a second of the fastest peer with as many bits: "
        f"{', '.join(ranges)}. These are the lowest and the highest of {made} of {len(TITLES) * len(PRECISIONS)} runs, "
        f"on {machines[0].figures['cores']} cores of {len(machines)} machines."
    )


def models() -> str:
    """Return a table for each model on each machine: texts a second by side and clients, and the machine's limit."""
    parts = []
    for name, title in TITLES.items():
        for machine in _machines():
            rows = [row for own, precision, run in machine.runs if own == name for row in _rows(precision, run)]
            heads = ("precision", "side", "agreement", *(_clients(count) for count in CLIENTS))
            if rows:
                parts.append(f"### {title}, {machine.cpu}\n\n{table(heads, rows)}")
    return "\n\n".join(parts)


def left_out() -> str:
    """Return the runs that were made on no machine, and the sides that failed in a run, each with its reason."""
    machines = _machines()
    made = {(name, precision) for machine in machines for name, precision, _ in machine.runs}
    lines = []
    for name, title in TITLES.items():
        missing = [precision for precision in PRECISIONS if (name, precision) not in made]
        if missing:
            lines.append(f"- {title}: no run in {', '.join(missing)}")
    for machine in machines:
        for name, precision, run in machine.runs:
            lines += [f"- {TITLES[name]}, {precision}: {side}: {reason(why)}" for side, why in run["failed"].items()]
    return "\n".join(lines)


def versions() -> str:
    """Return the packages of this project and of each peer that ran."""
    rows: dict[tuple[str, str], None] = {}
    for machine in _machines():
        ran = {side for _, _, run in machine.runs for side in run["sides"]}
        rows[
            "this project", ", ".join(f"`{name}=={version}`" for name, version in machine.figures["versions"].items())
        ] = None
        for name, packages in machine.figures["peers"].items():
            if name in ran:
                rows[name, ", ".join(f"`{package}`" for package in packages)] = None
    return table(("side", "packages"), sorted(rows, key=lambda row: row[0] != "this project"))


@dataclass(frozen=True)
class Machine:
    """Figures of one machine, in docs/NAME.json. `runs`: (model, precision, run), in the order of the page."""

    name: str
    figures: Mapping[str, Any]

    @property
    def cpu(self) -> str:
        """Name of its processor, which may be that of several, with its instruction sets where they were recorded."""
        sets = self.figures.get("instructions")
        return f"{self.figures['cpu']} ({', '.join(sets)})" if sets else str(self.figures["cpu"])

    @property
    def runs(self) -> list[tuple[str, str, dict[str, Any]]]:
        known = self.figures["models"]
        return [(name, at, known[name][at]) for name in TITLES for at in PRECISIONS if at in known.get(name, {})]


def _machines() -> list[Machine]:
    """Return the recorded machines, in the order of their files' names."""
    return [Machine(name, read(name)) for name in sorted(file.stem for file in FOLDER.glob("retrieval*.json"))]


def _clients(count: str) -> str:
    return f"{count} client{'s' * (count != '1')}"


def _ratio(run: dict[str, Any], count: str) -> str:
    return f"{run['ratios'][count]:.2f}x" if count in run["ratios"] else "-"


def _fastest(run: dict[str, Any]) -> str:
    """Return the fastest peer with the most clients of the run."""
    count = list(run["ratios"])[-1]
    there = {side: cells[count]["texts_per_s"] for side, cells in run["sides"].items() if not side.startswith("ours")}
    return max(there, key=lambda side: there[side])


def _rows(precision: str, run: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = [
        (
            precision,
            side.replace("ours", "this project"),
            f"{cells['agreement']:.4f}",
            *(_cell(cells, c) for c in CLIENTS),
        )
        for side, cells in run["sides"].items()
    ]
    alone, peak = (f"{run['limit_texts_per_s'][name]:.0f}" for name in (f"{precision} alone", precision))
    return [*rows, (precision, "limit of the machine", "", min(alone, peak, key=int), peak, peak)]


def _cell(cells: dict[str, Any], count: str) -> str:
    if count not in cells:
        return "-"
    rate = cells[count]["texts_per_s"]
    return f"{rate:.{0 if rate >= 20 else 1}f} ({cells[count]['p50_ms']:.0f}, {cells[count]['p99_ms']:.0f})"


def reason(text: str) -> str:
    """Return the last line of an error, without folders."""
    last = text.strip().splitlines()[-1]
    return " ".join(word.rsplit("/", 1)[-1] for word in last.split())[:160]
