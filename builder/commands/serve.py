"""`build-repo serve`: a real Triton on a repository, in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from builder.commands import REPOSITORY, VERIFY_KEY_HELP, count, output, screen, tcp_port
from builder.commands.gateway import add_on_demand
from builder.common.addresses import join_port
from builder.common.errors import SpecError
from builder.serving.server.embedded import EMBEDDED
from builder.serving.server.gateway import supervised_gateway
from builder.serving.server.process import adopting_orphans
from builder.serving.server.triton import Ports, TritonServer, refuse_taken_ports, running
from builder.serving.server.watch import keep_running


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo serve",
        description="Run Triton Inference Server on a repository, without Docker, until Ctrl-C.",
    )
    add = arguments.add_argument
    add("repository", nargs="?", **REPOSITORY)
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    add(
        "--insecure-bind",
        action="store_true",
        help="allow a --host that other machines reach; anybody there can take over this old server",
    )
    for kind, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        add(f"--{kind}-port", type=tcp_port, default=port, metavar="PORT", help=f"default {port}")
    add(
        "--openai-port",
        type=tcp_port,
        metavar="PORT",
        help="start a gateway there too, with the APIs of OpenAI, Cohere and TEI: build-repo help gateway",
    )
    add_on_demand(arguments)
    add(
        "--ray",
        action="store_true",
        help="Tritons on a Ray cluster, behind --openai-port: the cluster of the variable RAY_ADDRESS, or one of this "
        "machine alone; needs the extra ray",
    )
    add(
        "--replicas",
        type=_range,
        metavar="N:M",
        help="on Ray: N replicas, or from N to M as the load asks for (default 1)",
    )
    add("--verify-key", type=Path, metavar="FILE", help=f"serve only what was signed: {VERIFY_KEY_HELP}")
    add("--strict", action="store_true", help="serve all models or none (default: those that load)")
    add("-v", "--verbose", action="store_true", help="show Triton's log")
    return arguments


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    return count(least), count(most or least)


def run(options: argparse.Namespace) -> int:
    if options.load_on_demand and options.openai_port is None:
        raise SpecError("--load-on-demand needs the gateway, which loads the models: --openai-port PORT")
    if not options.load_on_demand and (options.memory_gb is not None or options.pin):
        raise SpecError("--memory-gb and --pin say what --load-on-demand loads; give that too")
    if options.ray:
        return _run_on_ray(options)
    if options.replicas:
        raise SpecError("--replicas is of --ray; give that too")
    ports = Ports(options.http_port, options.grpc_port, options.metrics_port)
    echo = (lambda line: print(line, file=sys.stderr, flush=True)) if options.verbose else None
    if options.openai_port in vars(ports).values():
        raise SpecError(f"--openai-port is {options.openai_port}, which is one of Triton's ports; choose another")
    if options.openai_port is not None:
        refuse_taken_ports(options.host, {"openai": options.openai_port})  # now, and not when all models are loaded
    with contextlib.suppress(KeyboardInterrupt), adopting_orphans(), contextlib.ExitStack() as gateway:
        start = partial(_start, options, ports, echo, gateway, cache(partial(_gateway, options, ports, gateway)))
        keep_running(start, partial(_show, options), _say)
    output.print("stopped")
    return 0


def _run_on_ray(options: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raises BuilderError."""
    from builder.clusters.ray.cluster import cluster_address, connected, read_options, serving

    if options.openai_port is None or options.strict or options.verify_key:
        raise SpecError(
            "--ray needs --openai-port, where clients ask, and serves the models that load: leave out --strict and "
            "--verify-key (verify first: build-repo verify)"
        )
    if options.load_on_demand and options.memory_gb is None:
        raise SpecError("--load-on-demand with --ray needs the memory that each Triton may take: --memory-gb N")
    least, most = options.replicas or (1, 1)
    settings = {"repository": str(options.repository.resolve()), "min_replicas": least, "max_replicas": most}
    settings |= {"on_demand": options.load_on_demand, "insecure_bind": options.insecure_bind}
    replica_options = read_options(settings)
    refuse_taken_ports(options.host, {"openai": options.openai_port})
    address = cluster_address()
    with contextlib.suppress(KeyboardInterrupt), connected(address):
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))  # Ray installs its own handler
        with serving(replica_options, options.host, options.openai_port, *_on_demand(options), say=_say):
            _say(f"{least} to {most} replicas on {address or 'this machine'}")
            output.print(f"{'OpenAI':>8}  http://{join_port(options.host, options.openai_port)}/v1")
            output.print("ready; stop with Ctrl-C")
            signal.pause()
    output.print("stopped")
    return 0


class LoadCount:
    """Tells `show` from the log of a starting Triton how many models of a repository are loaded."""

    def __init__(self, repository: Path, show: Callable[[str], None]) -> None:
        self.missing = {path.parent.name for path in repository.glob("*/config.pbtxt")}
        self.models, self.show = len(self.missing), show

    def read(self, line: str) -> None:
        """Read one line of the log."""
        loaded = re.search(r"successfully loaded '([^']+)'", line)
        if loaded and loaded[1] in self.missing:
            self.missing.remove(loaded[1])
            self.show(f"starting Triton, {self.models - len(self.missing)} of {self.models} models are loaded")


@contextlib.contextmanager
def _start(
    options: argparse.Namespace,
    ports: Ports,
    echo: Callable[[str], None] | None,
    gateway: contextlib.ExitStack,
    begin_gateway: Callable[[], None],
) -> Iterator[TritonServer]:
    """Run Triton. The gateway, which begins with the first one and outlives all, is stopped before the last one is."""
    with contextlib.ExitStack() as stack:
        with screen.status("starting Triton") as status:
            server = stack.enter_context(
                running(
                    options.repository,
                    options.host,
                    ports,
                    echo=echo or LoadCount(options.repository, status.update).read,
                    strict=options.strict,
                    insecure_bind=options.insecure_bind,
                    verify_key=options.verify_key,
                    on_demand=options.load_on_demand,
                    liveness=True,
                )
            )
        try:
            begin_gateway()
            yield server
        except BaseException:
            gateway.close()  # it finishes the running requests
            raise


def _gateway(options: argparse.Namespace, ports: Ports, stack: contextlib.ExitStack) -> None:
    """Start the gateway, if one was asked for, until `stack` is closed."""
    if options.openai_port is None:
        return
    url = join_port(options.host, ports.grpc)
    stack.enter_context(supervised_gateway(url, options.host, options.openai_port, *_on_demand(options), say=_say))


def _on_demand(options: argparse.Namespace) -> list[str]:
    """Return the gateway's options."""
    if not options.load_on_demand:
        return []
    memory = [] if options.memory_gb is None else ["--memory-gb", str(options.memory_gb)]
    pins = [argument for name in options.pin for argument in ("--pin", name)]
    key = [] if options.verify_key is None else ["--verify-key", str(options.verify_key)]
    return ["--load-on-demand", "--repository", str(options.repository), *memory, *pins, *key]


def _say(text: str) -> None:
    output.print(f"{time.strftime('%H:%M:%S')} {escape(text)}", soft_wrap=True)


def _show(options: argparse.Namespace, server: TritonServer) -> None:
    """Print the models, and where they answer."""
    if options.load_on_demand:
        _say("models are loaded when they are asked for, by the gateway")
    else:
        models = server.models()
        table = Table(title=f"Triton on {escape(str(options.repository))}", title_justify="left")
        for column in ("model", "version", "state"):
            table.add_column(column)
        for model in models:
            table.add_row(model.name, model.version, model.state)
        output.print(table)
        for model in models:
            if model.state != "READY":
                _say(f"{model.name} is not served: {model.reason or model.state}. Check it: build-repo check")
    ports = server.ports
    for kind, port in (("gRPC", ports.grpc), ("HTTP", ports.http), ("metrics", ports.metrics)):
        output.print(f"{kind:>8}  {join_port(server.host, port)}")
    if options.openai_port is not None:
        output.print(f"{'OpenAI':>8}  http://{join_port(options.host, options.openai_port)}/v1")
    output.print(f"Triton {EMBEDDED}: for development and load tests, not for clients you do not trust")
    output.print("ready; stop with Ctrl-C")
