"""`build-repo serve`: a real Triton on a repository, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from pathlib import Path

from rich.console import Console
from rich.table import Table

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP
from builder.errors import ServeError
from builder.serve.gateway import gateway
from builder.serve.triton import Ports, running


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo serve",
        description="Run Triton Inference Server on a repository, without Docker, until Ctrl-C.",
    )
    arguments.add_argument("repository", nargs="?", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    arguments.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    for kind, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        arguments.add_argument(f"--{kind}-port", type=int, default=port, metavar="PORT", help=f"default {port}")
    arguments.add_argument(
        "--openai-port",
        type=int,
        metavar="PORT",
        help="start a gateway there too, with the APIs of OpenAI, Cohere and TEI: build-repo help gateway",
    )
    arguments.add_argument("-v", "--verbose", action="store_true", help="show Triton's log")
    return arguments


def run(options: argparse.Namespace) -> int:
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port)
    echo = (lambda line: print(line, file=sys.stderr, flush=True)) if options.verbose else None
    with running(options.repository, options.host, ports, echo=echo) as server, contextlib.ExitStack() as stack:
        if options.openai_port is not None:
            stack.enter_context(gateway(server.url, options.host, options.openai_port))
        table = Table(title=f"Triton on {options.repository}", title_justify="left")
        for column in ("model", "version", "state"):
            table.add_column(column)
        for row in server.models():
            table.add_row(*row)
        console = Console()
        console.print(table)
        for kind, port in (("gRPC", ports.grpc), ("HTTP", ports.http), ("metrics", ports.metrics)):
            console.print(f"{kind:>8}  {options.host}:{port}", highlight=False)
        if options.openai_port is not None:
            console.print(f"{'OpenAI':>8}  http://{options.host}:{options.openai_port}/v1", highlight=False)
        console.print("ready; stop with Ctrl-C", highlight=False)
        with contextlib.suppress(KeyboardInterrupt):
            while server.process.poll() is None:
                threading.Event().wait(0.2)
            raise ServeError(f"Triton stopped by itself, with status {server.process.returncode}; -v shows its log")
    console.print("stopped")
    return 0
