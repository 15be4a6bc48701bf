"""`build-repo evaluate NAME --data FILE`: the quality of PyTorch and of the served model on labelled data."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import track

from builder.commands import REPOSITORY, URL, count, screen, screen_table
from builder.commands.downloads import loading


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo evaluate",
        description="Answer labelled data with a served model and with PyTorch on the checkpoint that it was built "
        "from, print the usual measures side by side, and write them beside the model's report. The kind of the data "
        "follows from its keys.",
    )
    add = arguments.add_argument
    add("name", help="name of a model in the repository")
    add(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="labelled rows: JSON lines, parquet or TSV; or a folder: of save_to_disk, BEIR, MTEB or NanoBEIR",
    )
    add("--split", help="split of a folder (default: the only one, or test)")
    add("--limit", type=count, metavar="N", help="evaluate the first N rows; of retrieval, the first N queries")
    add("--checkpoint", type=Path, metavar="FOLDER", help="where the checkpoint is, if it was not the Hub's")
    add("--repository", **REPOSITORY)
    add("--url", **URL)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.common.data_folders import data_digest, read_parts
    from builder.repository.report.evaluations import add_evaluation
    from builder.repository.report.record import read_report
    from builder.serving.client.client import Client
    from builder.serving.evaluate.evaluate import evaluate, refuse_another_task

    report = read_report(options.repository, options.name)
    parts, digest = read_parts(options.data, options.split), data_digest(options.data)
    with Client(options.url, options.name) as client:
        refuse_another_task(client, report)
        with loading(lambda: "loading the checkpoint"):
            from builder.checkpoints.labelled import evaluation_of  # imports torch
            from builder.checkpoints.libraries import quiet_libraries
            from builder.runtime.contract import GenerationServing
            from builder.serving.evaluate.checkpoint import checkpoint_of, serving_of

            serving = serving_of(options.repository, report)
            settings = serving if isinstance(serving, GenerationServing) else None
            with quiet_libraries():
                checkpoint = checkpoint_of(report, serving, options.checkpoint)
                evaluation = evaluation_of(checkpoint, parts, options.limit, settings)
        labelled = evaluation.data
        screen.print(f"{labelled.kind}: {labelled.count}")
        if labelled.note:
            screen.print(escape(labelled.note))
        data = {"name": options.data.resolve().name, "sha256": digest, "split": options.split or ""}
        with quiet_libraries():
            record = evaluate(client, report, evaluation, data, _progress(len(labelled.samples)))
    screen_table(record.table())
    add_evaluation(options.repository, options.name, record)
    return 0


def _progress(total: int) -> Callable[[Iterable[Any], str], Iterable[Any]]:
    """Return a function that shows, on a terminal, how many of `total` answers have come."""
    return lambda answers, side: track(answers, side, total, console=screen, disable=not screen.is_terminal)
