"""The verbs of the command line, one file each: `parser()` declares the options, `run(options)` runs the verb.

Knows the screen; the rest of the package does the work of the verbs.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.progress import Progress
from rich.table import Table

VERBS = (
    "serve",
    "query",
    "load-test",
    "evaluate",
    "plan",
    "tune",
    "check",
    "sign",
    "verify",
    "compile",
    "report",
    "card",
    "versions",
    "promote",
    "rollback",
    "adapter",
    "remove",
    "share",
    "unshare",
    "cache",
    "push",
    "pull",
    "store",
    "gateway",
    "deploy",
    "doctor",
    "completion",
)
DEFAULT_REPOSITORY = Path("model_repository")
DEFAULT_URL = "127.0.0.1:8001"


def one_server(text: str) -> str:
    """Parse an option that is the address of one server, for a verb that does not take several."""
    if "," in text:
        raise ArgumentTypeError(f"{text!r} names several servers; give one HOST:PORT, and run this for each")
    return text


# Arguments of add_argument that several verbs share.
REPOSITORY: dict[str, Any] = {
    "type": Path,
    "default": DEFAULT_REPOSITORY,
    "help": f"the model repository (default {DEFAULT_REPOSITORY})",
}
URL: dict[str, Any] = {
    "type": one_server,
    "default": DEFAULT_URL,
    "metavar": "HOST:PORT",
    "help": f"gRPC address of the server (default {DEFAULT_URL})",
}
STORE_HELP = "the object store: s3://, gs://, az:// or file://, and a path"
PLACE_HELP = f"{STORE_HELP}; or oci://REGISTRY/REPOSITORY, and :N for version N"
VERIFY_KEY_HELP = "public key, or certificates that the signer's must lead to (PEM)"
screen = Console(stderr=True, highlight=False)  # messages
output = Console(highlight=False)  # results
MAX_TABLE_WIDTH = 10_000  # of a table that nothing limits
Number = TypeVar("Number", int, float)


def count(text: str) -> int:
    """Parse an option that is a whole number of at least 1."""
    return _within(text, int, lambda value: value >= 1, "a whole number of at least 1")


def tcp_port(text: str) -> int:
    """Parse an option that is a port to listen on."""
    return _within(text, int, lambda value: 1 <= value <= 65535, "a port, 1 to 65535")


def positive(text: str) -> float:
    """Parse an option that is above 0 and finite."""
    return _within(text, float, lambda value: 0 < value < math.inf, "a number above 0")


def _within(text: str, kind: Callable[[str], Number], fits: Callable[[Number], bool], expected: str) -> Number:
    try:
        value = kind(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not {expected}") from None
    if not fits(value):
        raise ArgumentTypeError(f"{text!r} is not {expected}")
    return value


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, float], None]]:
    """Show a bar on a terminal with the time that is left; yield a function that takes what is done and the total."""
    with Progress(console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def screen_table(table: Table) -> None:
    """Print a table on standard output; as wide as it needs to be where that is a file or a pipe.

    On a terminal that is too narrow for it, print a row as a column where that fits.
    """
    console = output if output.is_terminal else Console(width=200)
    if not _fits(table, console) and _fits(turned := _turned(table), console):
        table = turned
    console.print(table)


def _fits(table: Table, console: Console) -> bool:
    return Measurement.get(console, console.options.update(max_width=MAX_TABLE_WIDTH), table).maximum <= console.width


def _turned(table: Table) -> Table:
    """Return `table` with its rows as columns."""
    turned = Table(title=table.title, title_justify="left", caption=table.caption, caption_justify="left")
    first, *others = table.columns
    turned.add_column(first.header, no_wrap=True)
    for name, row in zip(first.cells, table.rows, strict=True):
        turned.add_column(name, justify="right", style=row.style)
    for column in others:
        turned.add_row(column.header, *column.cells)
    return turned
