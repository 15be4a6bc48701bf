"""p50 and p99 of MiniLM at some rates: those that `plan` predicts, beside those that a load test measures.

The model is built first, which gives `plan` its speeds, and served with the settings of the plan for the highest rate.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from tokenizers import Tokenizer

from builder.building.pipeline import build
from builder.commands.load_test import model_samples
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.repository.settings import ENCODER
from builder.serving.load.measure import load_test
from builder.serving.load.traffic import Target, rates
from builder.serving.plan.encoder import plan_encoder
from builder.serving.plan.lines import ModelPlan
from builder.serving.plan.needs import published, served_version
from builder.serving.tune.trials import serve_copy
from scripts.benchmarks.circumstances import circumstances, report_figures
from tests.models import minilm

NAME = "minilm"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench plan")
    parser.add_argument("--repository", type=Path, metavar="DIR", help=f"take {NAME} from there, or build it there")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rates", default="20,60,100", help="requests a second (default 20,60,100)")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        repository = options.repository or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (repository / NAME).exists():
            build(make_spec(model=str(minilm()), name=NAME, output=repository, precision=options.precision))
        report = {**circumstances(), "precision": options.precision, **compared(repository, options)}
    report_figures(options.output, report)


def compared(repository: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return by rate the p50 and p99 in milliseconds, planned, and measured in each repeat."""
    version, levels = served_version(repository / NAME), rates(options.rates)
    plans = {level.value: planned(repository, version, level.value) for level in levels}
    settings = {name: plans[max(plans)].settings[name] for name in ENCODER if name in plans[max(plans)].settings}
    with serve_copy(version, {name: int(str(value)) for name, value in settings.items()}) as url:
        target = Target(NAME, model_samples(url, NAME, None))
        run = load_test(url, [target], levels, options.repeats, options.seconds)
    figures = {}
    for (_, level), loads in run.repeats().items():
        lines = {line.quantity: line.result for line in plans[level.value].lines}
        figures[f"{level.value:g}"] = {
            "planned": {name: lines[name] for name in ("p50", "p99")},
            "measured": {
                "p50": [round(load.client.p50_ms, 1) for load in loads],
                "p99": [round(load.client.p99_ms, 1) for load in loads],
                "requests_per_s": [round(load.client.requests_per_s, 1) for load in loads],
                "mean_batch": [round(load.server.mean_batch, 2) for load in loads],
                "queue": [round(load.server.queue_ms, 1) for load in loads],
                "compute": [round(load.server.compute_ms, 1) for load in loads],
            },
        }
    cost = next(line.result for line in plans[max(plans)].lines if line.quantity == "cost of a call")
    return {"settings": settings, "cost_of_a_call": cost, "seconds": options.seconds, "rates": figures}


def planned(repository: Path, version: Path, rate: float) -> ModelPlan:
    """Return the plan for that many texts of a load test a second on this machine."""
    tokenizer = Tokenizer.from_file(str(version / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokens = [len(encoding.ids) for encoding in tokenizer.encode_batch(list(TEXTS))]
    load = {"requests_per_s": rate, "tokens": round(mean(tokens)), "longest": max(tokens)}
    spec = make_spec(model=str(minilm()), name=NAME, output=repository, load=load)
    assert spec.load is not None
    return plan_encoder(spec.capacity, spec.load, published(repository, NAME))


if __name__ == "__main__":
    main()
