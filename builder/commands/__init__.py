"""The verbs of the command line, one file each: `parser()` says the options, `run(options)` does it.

Knows the screen; what the verbs do is in the rest of the package.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from pathlib import Path

from rich.console import Console
from rich.table import Table

DEFAULT_REPOSITORY = Path("model_repository")
DEFAULT_URL = "127.0.0.1:8001"
REPOSITORY_HELP = f"the model repository (default {DEFAULT_REPOSITORY})"
URL_HELP = f"gRPC address of the server (default {DEFAULT_URL})"
STORE_HELP = "the object store: s3://, gs://, az:// or file://, and a path"
VERIFY_KEY_HELP = "public key, or certificates that the signer's must lead to (PEM)"
screen = Console(stderr=True)


def count(text: str) -> int:
    """The number of an option that is at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{value} is not at least 1")
    return value


def tcp_port(text: str) -> int:
    """The number of an option that is a port to listen on."""
    value = int(text)
    if not 1 <= value <= 65535:
        raise ArgumentTypeError(f"{value} is not a port; expected 1 to 65535")
    return value


def screen_table(table: Table) -> None:
    """A table on standard output; as wide as it needs to be where that is a file or a pipe."""
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)
