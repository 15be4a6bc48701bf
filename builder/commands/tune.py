"""`build-repo tune`: the serving settings of a model, by load tests on the embedded server."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.markup import escape

from builder.commands import REPOSITORY, count, output, positive, screen
from builder.commands.load_test import model_samples
from builder.common.errors import RepositoryError, SpecError
from builder.common.machine import available_cores, available_memory, cpu
from builder.options import load_specs
from builder.options.build_spec import HEADROOM
from builder.repository.settings import publish_settings, read_settings
from builder.serving.load.traffic import concurrencies, rates
from builder.serving.plan.needs import served_version
from builder.serving.tune.search import Finding, optuna, search
from builder.serving.tune.space import choices, space_of
from builder.serving.tune.trials import Conditions, measure_again, measure_settings, serve_copy
from builder.serving.tune.winner import write_settings


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo tune",
        description="Search the settings of a model that need no build (batching, delay, instances x threads, token "
        "budget; slots, prefill) for the most throughput within a limit of p99, by load tests on the embedded server. "
        "What wins more than noise, repeated by turns, is published as the next version of the model, and written into "
        "a models.yaml for the next build.",
    )
    add = arguments.add_argument
    add("name", help="name of a model in the repository")
    add(
        "--p99-ms",
        type=positive,
        required=True,
        metavar="MS",
        help="limit of the p99 latency; of streams, of the time to the first token",
    )
    add("--repository", **REPOSITORY)
    add("--models", type=Path, metavar="FILE", help="models.yaml to write the winner into")
    add("--trials", type=count, default=20, metavar="N", help="settings that are tried (default 20)")
    add("--seconds", type=positive, default=3.0, metavar="S", help="seconds of one measurement (default 3)")
    add(
        "--repeats",
        type=count,
        default=5,
        metavar="N",
        help="times that the winner and the model as it was are measured, by turns (default 5)",
    )
    load = arguments.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        default="1,2,4,8,16,32,64",
        help="numbers of concurrent requests that are tried (default 1,2,4,8,16,32,64)",
    )
    load.add_argument("--rate", help="requests a second instead: a list, or the ramp START:END:STEP")
    add("--samples", type=Path, help="file of requests (default: the samples of the model's task)")
    return arguments


def run(options: argparse.Namespace) -> int:
    if options.repeats < 2:
        raise SpecError("--repeats 1 says nothing of noise; expected at least 2")
    optuna()  # before anything is measured
    model = options.repository / options.name
    if not model.is_dir():
        raise RepositoryError(f"{options.repository} has no model {options.name} (--repository)")
    if options.models is not None and options.name not in [spec.entry_name for spec in load_specs(options.models)]:
        raise SpecError(f"{options.models} has no model {options.name}")
    version, cores = served_version(model), available_cores()
    space = space_of(version, cores, HEADROOM * available_memory())
    levels = rates(options.rate) if options.rate is not None else concurrencies(options.concurrency)
    with serve_copy(version, None) as url:
        samples = model_samples(url, options.name, options.samples)
    conditions = Conditions(samples, levels, options.seconds, options.p99_ms)
    result = search(
        space,
        choices(read_settings(version), cores, space),
        options.trials,
        options.p99_ms,
        partial(measure_settings, version, conditions=conditions),
        lambda settings, level: measure_again(version, settings, conditions, level),
        options.repeats,
        lambda text: screen.print(f"  {escape(text)}", soft_wrap=True),
    )
    _publish_winner(options, result, cores)
    return 0


def _publish_winner(options: argparse.Namespace, result: Finding, cores: int) -> None:
    """Publish and write the winner, or report that there is none."""
    if result.settings is None:
        output.print(f"{options.name} stays as it is: {result.reason}", soft_wrap=True)
        return
    today = datetime.now(UTC).date().isoformat()
    reason = f"build-repo tune, {today}, {cores} cores of {cpu()['model']}: {result.reason}"
    output.print(f"{options.name}: {result.reason}", soft_wrap=True)
    settings = ", ".join(f"{key}: {value}" for key, value in result.settings.items())
    number = publish_settings(options.repository, options.name, result.settings, reason)
    output.print(f"version {number} of {options.name} has {settings}", soft_wrap=True)
    if options.models is not None:
        write_settings(options.models, options.name, result.settings, reason)
        output.print(f"written into {options.models}")
