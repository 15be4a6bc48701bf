"""`build-repo promote`: try a version on a running server beside the one that answers, then promote or reject it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from builder.commands import DEFAULT_URL, REPOSITORY, positive, progress, screen, screen_table
from builder.commands.gateway import ADMIN_KEY_VARIABLE, admin_key
from builder.common.errors import ServeError
from builder.common.progress import duration
from builder.serving.gateway.settings import DEFAULT_PORT

if TYPE_CHECKING:
    from builder.repository.report.record import BuildReport
    from builder.repository.versions import PublishedVersion
    from builder.serving.promotion.promote import Agreement
    from builder.serving.promotion.servers import Servers

SLOWER, TOLERANCE = 1.5, 0.5  # measured: docs/benchmarks/quality.md
WATCH_S = 60.0
GATEWAY = f"http://127.0.0.1:{DEFAULT_PORT}"


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo promote",
        description="Load the newest version of a model on a running server beside the one that answers, ask both the "
        "same, and let the new one answer if it does so as well and as fast; no request fails meanwhile. With --canary "
        "it also has to do well with a share of the real requests, and is taken back by itself where not. The server "
        "has to run with --model-control-mode=explicit, as build-repo serve does, on this repository.",
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add("version", nargs="?", type=int, metavar="VERSION", help="default: the newest")
    add(
        "--url",
        action="append",
        metavar="HOST:PORT",
        help=f"gRPC address of the server (default {DEFAULT_URL}). Several, separated by commas or given one by one, "
        "change together or not at all, after a trial on the first; dns:///NAME:PORT stands for all addresses of a "
        "name",
    )
    add("--repository", **REPOSITORY)
    add(
        "--samples",
        type=Path,
        help="file of requests, one JSON object a line (default: the samples of the model's task)",
    )
    add(
        "--agreement",
        type=float,
        metavar="SHARE",
        help="lowest mean agreement with the version that answers, 0 to 1 (default: what the version was built for; "
        "of models that generate it is the share of next tokens that are the same)",
    )
    add(
        "--tolerance",
        type=positive,
        default=TOLERANCE,
        metavar="APART",
        help="how far its scores or embeddings may be from those of the version that answers: 0 is equal, 1 is "
        f"unrelated (default {TOLERANCE}; raise it for a model that was retrained)",
    )
    add(
        "--slower",
        type=positive,
        default=SLOWER,
        metavar="TIMES",
        help=f"longest median latency, as a multiple of that of the version that answers (default {SLOWER})",
    )
    add(
        "--canary",
        type=_share,
        metavar="PERCENT",
        help="then have it answer this share of a running gateway's requests for a while, such as 10%%",
    )
    add(
        "--gateway",
        default=GATEWAY,
        metavar="URL",
        help=f"with --canary: the address of that gateway (default {GATEWAY})",
    )
    add(
        "--admin-key",
        type=Path,
        metavar="FILE",
        help=f"with --canary: the secret that the gateway was given; or the variable {ADMIN_KEY_VARIABLE}",
    )
    add(
        "--watch",
        type=positive,
        default=WATCH_S,
        metavar="S",
        help=f"with --canary: for how many seconds (default {WATCH_S:g})",
    )
    return arguments


def _share(text: str) -> float:
    percent = positive(text.removesuffix("%"))
    if percent > 100:
        raise argparse.ArgumentTypeError(f"{text} is not above 0% and at most 100%")
    return percent / 100


def run(options: argparse.Namespace) -> int:
    from builder.repository.transaction import recover
    from builder.repository.versions import newest_first, rollback
    from builder.serving.promotion.servers import Servers

    name, repository = options.name, options.repository
    recover(repository)
    versions = {version.number: version for version in newest_first(repository, name)}
    number = max(versions) if options.version is None else options.version
    with Servers(options.url or [DEFAULT_URL], repository) as servers:
        running = servers.running(name)
        if running is None:
            raise ServeError(f"the server at {servers} serves no {name}; build-repo serve loads all that is there")
        others = ", ".join(str(other) for other in versions if other != running)
        advice = f"name another of its versions ({others})" if others else "build a newer version"
        if number == running:
            raise ServeError(f"version {running} of {name} is what answers at {servers} already: {advice}")
        if number not in versions:
            raise ServeError(f"{repository} has no version {number} of {name}: {advice}")
        try:
            _refuse_another_task(versions, running, number)
            refusals = _refusals(options, servers, (running, number), versions[number].report)
        except BaseException:
            _restore_running_version(repository, name, number, running)
            raise
        if refusals:
            for refusal in refusals:
                screen.print(f"[red]✗[/] {escape(refusal)}", soft_wrap=True)
            _restore_running_version(repository, name, number, running)
            screen.print(f"version {running} goes on answering")
            return 1
        with servers.agreeing(name, running):
            rollback(repository, name, number)
            servers.switch(name)
    screen.print(f"[green]✓[/] version {number} of {name} answers at {servers}")
    return 0


def _refusals(
    options: argparse.Namespace, servers: Servers, numbers: tuple[int, int], report: BuildReport
) -> list[str]:
    """Try the second of `numbers` beside the first, on samples and, if requested, on real requests.

    Samples are sent to the first server. A canary has to be loaded on all.
    """
    from builder.serving.client.samples import samples_for
    from builder.serving.promotion.promote import PromotionLimits, beside, compare

    name, (running, number) = options.name, numbers
    agreement, minimum = _agreement(report)
    limits = PromotionLimits(
        minimum if options.agreement is None else options.agreement, options.tolerance, options.slower
    )
    screen.print(f"{name}: version {number} is tried beside version {running}")
    refusals: list[str] = []
    controls = servers.controls[:1] if options.canary is None else servers.controls
    try:
        with beside(controls, name, number, running) as candidate:
            with progress("asking both versions") as show:
                trial = compare(
                    controls[0].url,
                    (name, candidate),
                    numbers,
                    lambda client: samples_for(client, options.samples),
                    agreement,
                    show,
                )
            screen_table(trial.table(name, limits))
            refusals = trial.refusals(limits)
            if not refusals and options.canary is not None:
                refusals = _watch_canary(options, candidate, numbers)
    except ServeError as error:  # a candidate that failed may not unload either
        if not refusals:
            raise
        refusals.append(str(error))
    return refusals


def _refuse_another_task(versions: Mapping[int, PublishedVersion], running: int, number: int) -> None:
    """Raise ServeError if the answers of two versions have nothing in common."""
    tasks = [versions[one].report.task for one in (running, number) if one in versions]
    if len(set(tasks)) > 1:
        raise ServeError(
            f"version {number} is for {tasks[1]} and version {running} for {tasks[0]}, so that their answers cannot be "
            f"compared; build-repo rollback NAME {number} --url URL changes versions without a trial"
        )


def _watch_canary(options: argparse.Namespace, candidate: str, numbers: tuple[int, int]) -> list[str]:
    from builder.serving.promotion.canary import MIN_REQUESTS, CanaryFigures, CanaryShare, watch

    key = admin_key(options.admin_key)
    share = CanaryShare(options.gateway.rstrip("/"), key, options.name, candidate, numbers, options.canary)
    screen.print(f"{options.canary:.0%} of the requests at {options.gateway} go to it")
    with screen.status("waiting for its first requests") as status:

        def show(figures: CanaryFigures, left: float) -> None:
            missing = max(0, MIN_REQUESTS - figures.requests)
            status.update(f"{figures.requests} requests, {missing} more to judge by, {duration(left)} left")

        figures, refusals = watch(share.order, options.canary, options.watch, options.slower, on_figures=show)
    screen_table(figures.table(options.name))
    return refusals


def _restore_running_version(repository: Path, name: str, number: int, running: int) -> None:
    """Roll the repository back to the version that the server runs, if it serves the one that was tried."""
    from builder.repository.versions import restore, served_number

    if served_number(repository / name) == number:
        restore(repository, name, running)


def _agreement(report: BuildReport) -> tuple[Agreement, float]:
    """Return the measure of how much two answers agree, and the least that is enough."""
    from builder.checkpoints.tasks import find_task
    from builder.checkpoints.tasks.base import EncoderTask
    from builder.serving.promotion.promote import OutputMatch, same_tokens

    task = find_task(report.task)
    if isinstance(task, EncoderTask):
        return (
            lambda expected, actual: OutputMatch(
                task.agreement(expected, actual), numbers=task.numbers(expected, actual)
            ),
            report.threshold,
        )
    return same_tokens, report.threshold
