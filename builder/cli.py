"""The command line: `build-repo MODEL`, and verbs. Anything that is not a verb is a model or a models.yaml.

build-repo MODEL [options]        build and publish one model
build-repo models.yaml            build many, declared in a file
build-repo serve [DIR]            a real Triton on a repository
build-repo query NAME key=value   ask a served model
build-repo load-test NAME         perf_analyzer on a served model
build-repo check [DIR]            lint a repository without a server
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import time
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from builder.errors import BuilderError, ServeError, SpecError

screen = Console(stderr=True)
DEFAULT_REPOSITORY = Path("model_repository")
DEFAULT_URL = "127.0.0.1:8001"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for an error the user can mend, 130 for an interrupt."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    is_verb = bool(arguments) and arguments[0] in VERBS
    parser, command = VERBS[arguments[0]] if is_verb else (_build_parser, _build)
    options = parser().parse_args(arguments[1:] if is_verb else arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(command(options))
    except BuilderError as error:
        screen.print(f"[bold red]error:[/] {_escaped(error)}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        screen.print("interrupted")
        return 130


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _escaped(error: Exception) -> str:
    return str(error).replace("[", "\\[")


# build


def _build_parser() -> argparse.ArgumentParser:
    from builder.spec import BuildSpec

    parser = argparse.ArgumentParser(
        prog="build-repo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="Hub id, local folder, or models.yaml")
    for name, field in BuildSpec.model_fields.items():
        if not isinstance(field.json_schema_extra, dict) or not field.json_schema_extra.get("flag"):
            continue
        flags = [f"--{name.replace('_', '-')}", *(["-o"] if name == "output" else [])]
        kind, choices = _kind(field.annotation)
        text = f"{field.description}" + (f" (default {field.default})" if field.default is not None else "")
        if kind is bool:
            parser.add_argument(*flags, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            parser.add_argument(
                *flags, type=kind, choices=choices, default=argparse.SUPPRESS, help=text, metavar=name.upper()
            )
    parser.add_argument("--json", action="store_true", help="print the report as JSON on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what the libraries say")
    return parser


def _kind(annotation: Any) -> tuple[Any, list[Any] | None]:
    """The type of a flag and its choices, from a field's annotation."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        choices = list(typing.get_args(annotation))
        return type(choices[0]), choices
    return annotation, None


def _build(options: argparse.Namespace) -> int:
    from builder.spec import load_specs, make_spec

    flags = {key: value for key, value in vars(options).items() if key not in ("model", "json", "verbose")}
    if options.model.endswith((".yaml", ".yml")):
        if flags:
            raise SpecError(f"with a models.yaml, options belong in the file; found --{min(flags).replace('_', '-')}")
        specs = load_specs(Path(options.model))
    else:
        specs = [make_spec(model=options.model, **flags)]

    with screen.status("loading torch and transformers"):
        from builder.checkpoint import quiet_libraries
        from builder.stages import build

        if not options.verbose:
            quiet_libraries()
    reports = []
    for spec in specs:
        screen.print(f"[bold]{spec.entry_name}[/] from {spec.model}", highlight=False)
        with _silence(not options.verbose):
            report = build(spec, _stage)
        reports.append(report)
        for warning in report.warnings:
            screen.print(f"  [yellow]warning:[/] {warning}", highlight=False)
        fused = ", ".join(
            f"{count} {name}" for name, count in report.fused.items() if name not in ("attention", "layers")
        )
        screen.print(f"  fused: {report.fused['attention']} of {report.fused['layers']} attentions; {fused}")
        if not options.json:
            Console().print(report.table())
        screen.print(f"  published {report.name} and {report.name}_model in {spec.output}", highlight=False)
    if options.json:
        documents = [report.document() for report in reports]
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=1))
    return 0


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """One line a stage: a spinner while it runs, its time when it is done."""
    start = time.perf_counter()
    with screen.status(name):
        yield
    screen.print(f"  [green]✓[/] {name:<16} {time.perf_counter() - start:6.1f} s", highlight=False)


@contextlib.contextmanager
def _silence(silent: bool) -> Iterator[None]:
    """Keep what libraries print, from Python or C++, off standard output while a build runs."""
    if not silent:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# serve


def _serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build-repo serve", description="Run a real Triton on a repository.")
    parser.add_argument("repository", nargs="?", type=Path, default=DEFAULT_REPOSITORY)
    parser.add_argument("--host", default="127.0.0.1")
    for kind, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{kind}-port", type=int, default=port)
    parser.add_argument("-v", "--verbose", action="store_true", help="forward Triton's log")
    return parser


def _serve(options: argparse.Namespace) -> int:
    from builder.serve.triton import Ports, running

    ports = Ports(options.http_port, options.grpc_port, options.metrics_port)
    echo = (lambda line: print(line, file=sys.stderr, flush=True)) if options.verbose else None
    with running(options.repository, options.host, ports, echo=echo) as server:
        table = Table(title=f"Triton on {options.repository}", title_justify="left")
        for column in ("model", "version", "state"):
            table.add_column(column)
        for row in server.models():
            table.add_row(*row)
        console = Console()
        console.print(table)
        for kind, port in (("gRPC", ports.grpc), ("HTTP", ports.http), ("metrics", ports.metrics)):
            console.print(f"{kind:>8}  {options.host}:{port}", highlight=False)
        console.print("ready; stop with Ctrl-C", highlight=False)
        with contextlib.suppress(KeyboardInterrupt):
            while server.process.poll() is None:
                threading.Event().wait(0.2)
            raise ServeError(f"Triton stopped by itself, with status {server.process.returncode}; -v shows its log")
    console.print("stopped")
    return 0


# query


def _query_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build-repo query",
        description="Ask a served model over gRPC. Each line of input is a JSON object of the model's inputs, or, for "
        "a model with one required input, its text. Each answer is one line of JSON.",
    )
    parser.add_argument("name", help="the model")
    parser.add_argument("values", nargs="*", metavar="KEY=VALUE", help="inputs; a VALUE in [...] is a JSON list")
    parser.add_argument("--file", type=Path, help="read requests from this file, one a line; - is standard input")
    parser.add_argument("--url", default=DEFAULT_URL, metavar="HOST:PORT")
    return parser


def _query(options: argparse.Namespace) -> int:
    from builder.serve.client import Client

    with Client(options.url, options.name) as client:
        required = [field.name for field in client.signature.inputs if not field.optional]
        failed = False
        for sample in _requests(options, required):
            try:
                print(json.dumps(client.ask(sample), ensure_ascii=False), flush=True)
            except BuilderError as error:
                failed = True
                print(json.dumps({"error": str(error)}, ensure_ascii=False), flush=True)
    return int(failed)


def _requests(options: argparse.Namespace, required: list[str]) -> Iterator[dict[str, Any]]:
    if options.values:
        yield dict(_key_value(item) for item in options.values)
        return
    if options.file is None and sys.stdin.isatty():
        raise SpecError(f"nothing to ask: give {required[0]}=..., --file FILE, or lines on standard input")
    stream = sys.stdin.buffer if options.file in (None, Path("-")) else options.file.open("rb")
    with stream:
        for line in stream:
            text = line.rstrip(b"\r\n")
            if text.startswith(b"{"):
                yield json.loads(text)
            elif text:
                if len(required) != 1:
                    raise SpecError(f"this model needs {', '.join(required)}: write each line as a JSON object")
                yield {required[0]: text}


def _key_value(item: str) -> tuple[str, Any]:
    key, found, value = item.partition("=")
    if not found:
        raise SpecError(f"{item!r} is not KEY=VALUE")
    return key, json.loads(value) if value.startswith("[") else value


# load-test


def _load_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build-repo load-test",
        description="Drive a served model with perf_analyzer; starts the embedded Triton when no server answers.",
    )
    parser.add_argument("name", help="the model")
    parser.add_argument("--url", default=None, metavar="HOST:PORT", help=f"default {DEFAULT_URL}")
    parser.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY)
    parser.add_argument("--concurrency", default="1,8,32", help="comma-separated (default 1,8,32)")
    parser.add_argument("--samples", type=Path, help="JSON lines of the task's inputs")
    parser.add_argument("--json", action="store_true")
    return parser


def _load_test(options: argparse.Namespace) -> int:
    from builder.serve.load_test import load_table, load_test
    from builder.serve.triton import running

    try:
        concurrencies = [int(part) for part in options.concurrency.split(",")]
    except ValueError:
        raise SpecError(f"--concurrency {options.concurrency!r} is no list of numbers such as 1,8,32") from None
    with contextlib.ExitStack() as stack:
        url = options.url or DEFAULT_URL
        if options.url is None and not _answers(url):
            screen.print(f"no server at {url}: starting one on {options.repository}", highlight=False)
            url = stack.enter_context(running(options.repository)).url
        loads = load_test(url, options.name, _load_samples(options, url), concurrencies)
    if options.json:
        print(json.dumps([load.__dict__ for load in loads], indent=1))
    else:
        Console().print(load_table(options.name, loads))
    return 0


def _answers(url: str) -> bool:
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    with grpc.InferenceServerClient(url) as client:
        try:
            return bool(client.is_server_live(client_timeout=2))
        except InferenceServerException:
            return False


def _load_samples(options: argparse.Namespace, url: str) -> Sequence[Any]:
    """The user's samples, or the default ones of the task that the model says it has."""
    from builder.samples import load_samples, with_mask
    from builder.serve.client import Client
    from builder.tasks import find_task

    with Client(url, options.name) as client:
        if options.samples is not None:
            return load_samples(options.samples, client.signature.inputs)
        task = client.signature.parameters.get("task")
        if task is None:
            raise SpecError(f"{options.name} does not say its task; give inputs for it with --samples FILE")
        return [
            with_mask(sample, client.signature.parameters.get("mask_token", "")) for sample in find_task(task).samples
        ]


# check


def _check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="build-repo check", description="Lint a repository without a server.")
    parser.add_argument("repository", nargs="?", type=Path, default=DEFAULT_REPOSITORY)
    parser.add_argument(
        "--triton", metavar="RELEASE", help="the release to check against; that of the build when left out"
    )
    return parser


def _check(options: argparse.Namespace) -> int:
    from builder.engines.releases import RELEASES
    from builder.repository.check import check
    from builder.repository.publish import recover

    if options.triton is not None and options.triton not in RELEASES:
        raise SpecError(f"Triton {options.triton} is not known; known are {', '.join(RELEASES)}")
    for name in recover(options.repository):
        screen.print(f"{name}: an interrupted build was undone", highlight=False)
    problems = check(options.repository, options.triton)
    for problem in problems:
        screen.print(f"[red]✗[/] {_escaped(Exception(problem))}", highlight=False, soft_wrap=True)
    if not problems:
        screen.print(f"[green]✓[/] {options.repository}: nothing to complain about", highlight=False)
    return int(bool(problems))


VERBS: dict[str, tuple[Any, Any]] = {
    "serve": (_serve_parser, _serve),
    "query": (_query_parser, _query),
    "load-test": (_load_parser, _load_test),
    "check": (_check_parser, _check),
}
