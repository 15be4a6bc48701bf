"""`build-repo plan`: the numbers of a deployment from its machine and its load, with the arithmetic."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from builder.commands import count, output, screen
from builder.common.files import write_output
from builder.engines.gpu import HEADROOM
from builder.options import load_specs
from builder.serving.plan.lines import ModelPlan, PlanLine, megabytes
from builder.serving.plan.pods import Pod, PodSize, divide_models, pods_needed


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo plan",
        description="Plan the models of a models.yaml for the loads and the machine that it declares: instances, "
        "threads, slots, queues, caches, memory and shared memory, with the arithmetic. The exit status is 1 if a load "
        "cannot be met.",
    )
    add = arguments.add_argument
    add("models", type=Path, metavar="models.yaml", help="the file whose `load:` is planned for, on its `machine:`")
    add("--compose", type=Path, metavar="FILE", help="write a file for docker compose with the numbers")
    add(
        "--service",
        default="triton",
        help="with --compose: the service of docker-compose.yml that it is for (default triton)",
    )
    add(
        "--pods",
        type=count,
        default=1,
        metavar="N",
        help="how many pods, each with a `machine:` to itself, share the requests (default 1)",
    )
    add("--json", action="store_true", help="print the plan as JSON on standard output")
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.serving.plan.machine import plan  # loads torch

    specs = load_specs(options.models)
    plans, machine = plan(specs, options.pods)
    if options.compose is not None:
        write_output(options.compose, machine.compose(options.service), "choose another with --compose")
    if options.json:
        print(json.dumps({"models": [asdict(one) for one in plans], "machine": asdict(machine)}, indent=1))
    else:
        for one in plans:
            output.print(lines_table(one.name, one.lines))
            for note in one.notes:
                output.print(f"  {note}")
            settings = ", ".join(f"{key}: {value}" for key, value in one.settings.items())
            output.print(f"  models.yaml: {settings}")
        output.print(lines_table("all models", machine.lines))
        if options.pods > 1:
            first = next(spec for spec in specs if spec.load is not None)
            shm = first.machine.shm_mb
            gpus = tuple(HEADROOM * card.memory for card in first.machine.gpus)
            size = PodSize(first.serving_cores, first.usable_memory, None if shm is None else shm << 20, gpus)
            _show_pods(options.pods, size, plans, whole=lambda: plan(specs)[0])
    lacking = [f"{one.name}: {text}" for one in plans for text in one.lacking] + list(machine.lacking)
    for text in lacking:
        screen.print(f"[yellow]does not hold:[/] {text}", soft_wrap=True)
    return 1 if lacking else 0


def _show_pods(pods: int, size: PodSize, plans: Sequence[ModelPlan], whole: Callable[[], Sequence[ModelPlan]]) -> None:
    """Show what each of the pods serves and, if one pod's memory is too small for all models, how to divide them.

    `plans`: of models that share the requests with the other pods; `whole`: of models that have all requests.
    """
    if Pod(tuple(plans)).fits(size):
        output.print(
            _pods_table(f"{pods} pods, with all models and 1/{pods} of the requests each", [Pod(tuple(plans))])
        )
        return
    undivided = whole()
    filled, rest = divide_models(undivided, pods, size)
    output.print(_pods_table(f"{pods} pods that divide the models, with all requests for them", filled))
    needed = pods_needed(undivided, size)
    if rest:
        names = ", ".join(one.name for one in rest)
        more = f"{needed} pods would hold all" if needed else "a larger pod is needed"
        output.print(f"  no room for {names}: {more}")


def _pods_table(title: str, pods: Sequence[Pod]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("pod", "memory", "/dev/shm", "busy cores"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("models")
    for number, pod in enumerate(pods, 1):
        names = ", ".join(plan.name for plan in pod.plans) or "none"
        each = "each" if len(pods) == 1 else str(number)
        table.add_row(each, megabytes(pod.memory), f"{pod.shm >> 20} MiB", f"{pod.cores:.3g}", names)
    return table


def lines_table(title: str, lines: Sequence[PlanLine]) -> Table:
    """Return the arithmetic of a plan as a table."""
    table = Table("quantity", "from", title=title, title_justify="left")
    table.add_column("result", justify="right")
    for line in lines:
        table.add_row(line.quantity, line.formula, line.result)
    return table
