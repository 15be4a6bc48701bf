"""`build-repo serve`: a real Triton on a repository, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, VERIFY_KEY_HELP, count, tcp_port
from builder.commands.gateway import add_on_demand
from builder.common.errors import SpecError
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.gateway import kept_gateway
from builder.serving.server.process import adopting_orphans
from builder.serving.server.triton import ModelState, Ports, TritonServer, refuse_taken_ports, running
from builder.serving.server.watch import keep_running


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo serve",
        description="Run Triton Inference Server on a repository, without Docker, until Ctrl-C.",
    )
    arguments.add_argument("repository", nargs="?", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    arguments.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    arguments.add_argument(
        "--insecure-bind",
        action="store_true",
        help="allow a --host that other machines reach; anybody there can take over this old server",
    )
    for kind, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        arguments.add_argument(f"--{kind}-port", type=tcp_port, default=port, metavar="PORT", help=f"default {port}")
    arguments.add_argument(
        "--openai-port",
        type=tcp_port,
        metavar="PORT",
        help="start a gateway there too, with the APIs of OpenAI, Cohere and TEI: build-repo help gateway",
    )
    add_on_demand(arguments)
    _add_ray(arguments)
    arguments.add_argument(
        "--verify-key", type=Path, metavar="FILE", help=f"serve only what was signed: {VERIFY_KEY_HELP}"
    )
    arguments.add_argument("--strict", action="store_true", help="serve all models or none (default: those that load)")
    arguments.add_argument("-v", "--verbose", action="store_true", help="show Triton's log")
    return arguments


def _add_ray(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--ray",
        action="store_true",
        help="replicas on a Ray cluster, behind --openai-port: the cluster of the variable RAY_ADDRESS, or one of "
        "this machine alone; needs the extra ray",
    )
    arguments.add_argument(
        "--replicas",
        type=_range,
        metavar="N:M",
        help="on Ray: N replicas, or from N to M as the load asks for (default 1)",
    )
    arguments.add_argument(
        "--models-per-replica",
        type=count,
        metavar="N",
        help="on Ray: models loaded at once; those used last stay (default 8)",
    )


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return count(least), count(most or least)


def run(options: argparse.Namespace) -> int:
    if options.ray:
        return _run_on_ray(options)
    if options.replicas or options.models_per_replica:
        raise SpecError("--replicas and --models-per-replica are of --ray; give that too")
    if options.load_on_demand and options.openai_port is None:
        raise SpecError("--load-on-demand needs the gateway, which loads the models: --openai-port PORT")
    if not options.load_on_demand and (options.memory_gb is not None or options.pin):
        raise SpecError("--memory-gb and --pin say what --load-on-demand loads; give that too")
    console = Console()
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port)
    echo = (lambda line: print(line, file=sys.stderr, flush=True)) if options.verbose else None
    if options.openai_port in vars(ports).values():
        raise SpecError(f"--openai-port is {options.openai_port}, which is one of Triton's ports; choose another")
    if options.openai_port is not None:
        refuse_taken_ports(options.host, {"openai": options.openai_port})  # now, and not when all models are loaded
    with contextlib.suppress(KeyboardInterrupt), adopting_orphans(), contextlib.ExitStack() as gateway:
        start = partial(
            _start, options, ports, echo, gateway, cache(partial(_gateway, options, ports, console, gateway))
        )
        keep_running(start, partial(_show, console, options), partial(_say, console))
    console.print("stopped")
    return 0


def _run_on_ray(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises BuilderError."""
    from builder.clusters.ray.cluster import cluster_address, connected, serving
    from builder.clusters.ray.options import read_options

    if options.openai_port is None or options.load_on_demand or options.strict or options.verify_key:
        raise SpecError(
            "--ray needs --openai-port, where clients ask, and loads models as they are asked for: leave out "
            "--load-on-demand, --strict and --verify-key (verify first: build-repo verify)"
        )
    least, most = options.replicas or (1, 1)
    settings = {"repository": str(options.repository.resolve()), "min_replicas": least, "max_replicas": most}
    if options.models_per_replica:
        settings["models_per_replica"] = options.models_per_replica
    replica_options = read_options(settings)
    console, address = Console(), cluster_address()
    with contextlib.suppress(KeyboardInterrupt), connected(address):
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # Ray installs its own handler
        with serving(replica_options, options.host, options.openai_port):
            _say(console, f"{least} to {most} replicas on {address or 'this machine'}")
            console.print(f"{'OpenAI':>8}  http://{options.host}:{options.openai_port}/v1", highlight=False)
            console.print("ready; stop with Ctrl-C", highlight=False)
            signal.pause()
    console.print("stopped")
    return 0


@contextlib.contextmanager
def _start(
    options: argparse.Namespace,
    ports: Ports,
    echo: Callable[[str], None] | None,
    gateway: contextlib.ExitStack,
    begin_gateway: Callable[[], None],
) -> Iterator[TritonServer]:
    """Run Triton. The gateway, which begins with the first one and outlives all, is stopped before the last one is."""
    with running(
        options.repository,
        options.host,
        ports,
        echo=echo,
        strict=options.strict,
        insecure_bind=options.insecure_bind,
        verify_key=options.verify_key,
        on_demand=options.load_on_demand,
        liveness=True,
    ) as server:
        try:
            begin_gateway()
            yield server
        except BaseException:
            gateway.close()  # it finishes the running requests
            raise


def _gateway(options: argparse.Namespace, ports: Ports, console: Console, stack: contextlib.ExitStack) -> None:
    """Start the gateway, if one was asked for, until `stack` is closed."""
    if options.openai_port is None:
        return
    url, say = f"{options.host}:{ports.grpc}", partial(_say, console)
    stack.enter_context(kept_gateway(url, options.host, options.openai_port, *_on_demand(options), say=say))


def _on_demand(options: argparse.Namespace) -> list[str]:
    """Return the gateway's options."""
    if not options.load_on_demand:
        return []
    memory = [] if options.memory_gb is None else ["--memory-gb", str(options.memory_gb)]
    pins = [argument for name in options.pin for argument in ("--pin", name)]
    key = [] if options.verify_key is None else ["--verify-key", str(options.verify_key)]
    return ["--load-on-demand", "--repository", str(options.repository), *memory, *pins, *key]


def _say(console: Console, text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {escape(text)}", highlight=False, soft_wrap=True)


def _show(console: Console, options: argparse.Namespace, server: TritonServer) -> None:
    """Print the models, and where they answer."""
    if options.load_on_demand:
        _say(console, "models are loaded when they are asked for, by the gateway")
    else:
        _show_models(console, options, server.models())
    ports = server.ports
    for kind, port in (("gRPC", ports.grpc), ("HTTP", ports.http), ("metrics", ports.metrics)):
        console.print(f"{kind:>8}  {server.host}:{port}", highlight=False)
    if options.openai_port is not None:
        console.print(f"{'OpenAI':>8}  http://{options.host}:{options.openai_port}/v1", highlight=False)
    console.print(
        f"Triton {EMBEDDED}: for development and load tests, not for clients you do not trust", highlight=False
    )
    console.print("ready; stop with Ctrl-C", highlight=False)


def _show_models(console: Console, options: argparse.Namespace, models: list[ModelState]) -> None:
    table = Table(title=f"Triton on {escape(str(options.repository))}", title_justify="left")
    for column in ("model", "version", "state"):
        table.add_column(column)
    for model in models:
        table.add_row(model.name, model.version, model.state)
    console.print(table)
    for model in models:
        if model.state != "READY":
            _say(console, f"{model.name} is not served: {model.reason or model.state}. Check it: build-repo check")
