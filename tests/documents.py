"""The commands and examples of README.md and the pages in docs/, and how each is checked.

A command is parsed by the parser that would run it; nothing is executed.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from mkdocs.__main__ import cli as mkdocs
from starlette.routing import Match, Route

from builder import cli
from builder.checkpoints.tasks import all_tasks
from builder.commands import VERBS
from builder.commands.build import OWN
from builder.common.distribution import DISTRIBUTION
from builder.common.errors import SpecError
from builder.options import load_pod_options, load_specs, make_spec
from builder.repository.sharing.hosting import NAMES_THE_MODEL
from builder.runtime.adapter_files import ADAPTER
from builder.serving.gateway.app import routes
from builder.serving.gateway.context import GatewayState
from builder.serving.gateway.endpoint import Endpoint
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.validation import validate_body
from scripts.documentation.code import PARAMETERS

ROOT = Path(__file__).parent.parent
CLUSTER = {
    "kubectl": ("apply", "create", "delete", "get", "port-forward", "rollout"),
    "helm": ("install", "lint", "rollback", "uninstall", "upgrade"),
    "ray": ("start",),
    "serve": ("deploy", "shutdown", "status"),
}
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))
BLOCK = re.compile(r"^```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n]*", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z_:]+")
URL = re.compile(r"localhost:8000/v2/(models/[\w.-]+(?P<action>/infer|/generate|/generate_stream)?|health/ready)")
# Options of other programs that pages mention without a command: Docker's and tritonserver's.
FOREIGN_OPTIONS = {
    "--backend",  # of NVIDIA's OpenAI front
    "--build-arg",
    "--cache-config",
    "--shm-size",
    "--model-control-mode",
    "--disable-auto-complete-config",
    "--grpc-max-response-pool-size",
    "--grpc-restricted-protocol",
    "--http-restricted-api",
}


def blocks(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the fenced blocks of a page: language, the rest of its line, text."""
    for match in BLOCK.finditer(text):
        yield match["language"], match["rest"].strip(), match["text"]


def inline_code(text: str) -> list[str]:
    """Return the text between single backticks, outside of fenced blocks."""
    return [" ".join(code.split()) for code in INLINE.findall(BLOCK.sub("", text))]


def commands(block: str) -> Iterator[list[str]]:
    """Yield the simple commands of a shell block, each as its words."""
    lexer = shlex.shlex(COMMENT.sub("", block.replace("\\\n", " ")), posix=True, punctuation_chars=";|&\n")
    lexer.commenters = ""  # shlex would also remove the line feed after a comment
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if word.strip(";|&\n"):
            words.append(word)
        elif words:
            yield words
            words = []
    if words:
        yield words


def check_command(words: list[str]) -> None:
    """Raise AssertionError unless the program exists and accepts its arguments."""
    program, *arguments = words
    if program == "build-repo":
        _build_repo(arguments)
    elif program.startswith("scripts/"):
        _script(program, arguments)
    elif program == "docker":
        _docker(arguments)
    elif program == "curl":
        _curl(arguments)
    elif program in CLUSTER:
        assert arguments[0] in CLUSTER[program], f"{program} {arguments[0]}"
    elif program == "mkdocs":
        mkdocs.commands[arguments[0]].make_context(arguments[0], arguments[1:])
    elif program == "pip":
        _pip(arguments)
    else:
        assert program in ("source", "perf_analyzer", "openssl"), (
            f"{program} is not a program that the documentation may name"
        )


def _build_repo(arguments: list[str]) -> None:
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            command, options = cli.parse(arguments)
        verb = command.__name__.rsplit(".", 1)[-1]
        if verb == "build" and not options.model.endswith(".yaml"):
            parsed = vars(options)
            make_spec(model=options.model, **{key: parsed[key] for key in parsed if key not in OWN})
        for item in options.values if verb == "query" else ():
            assert item.split("=")[0] in request_fields(), f"no task has an input {item.split('=')[0]!r}"
    except SystemExit as stopped:
        if stopped.code:
            raise AssertionError(output.getvalue().strip().splitlines()[-1]) from stopped
    except SpecError as error:
        raise AssertionError(str(error)) from error


@cache
def request_fields() -> set[str]:
    """Return every input of every task, those of checkpoints with prompts, of shared fronts and of adapters too."""
    parameters = {**PARAMETERS, "prompts": {"query": ""}}
    return {field.name for task in all_tasks().values() for field in task.fields(parameters)[0]} | {
        NAMES_THE_MODEL,
        ADAPTER.name,
    }


def _script(program: str, arguments: list[str]) -> None:
    path = ROOT / program
    assert path.is_file(), f"{program} does not exist"
    assert path.stat().st_mode & 0o100, f"{program} is not executable"
    sources = [path.read_text("utf-8")]
    if program == "scripts/bench" and arguments:
        module = ROOT / "scripts" / "benchmarks" / arguments.pop(0)
        files = [module.with_suffix(".py"), module / "__main__.py", *module.parent.glob(f"{module.name}_*.py")]
        sources = [source.read_text("utf-8") for source in files if source.is_file()]
        assert sources, f"there is no benchmark {module.name}"
    elif program == "scripts/docs":
        sources = [(ROOT / "scripts" / "documentation" / "pages.py").read_text("utf-8")]
    elif program == "scripts/test":
        for argument in arguments:
            assert argument.startswith("-") or (ROOT / argument).exists(), f"{argument} does not exist"
        return
    for argument in arguments:
        if argument.startswith("-"):
            assert any(re.search(rf"{argument}\b", source) for source in sources), f"{program} has no {argument}"


def _docker(arguments: list[str]) -> None:
    if arguments[0] != "compose":
        assert arguments[0] in ("build", "push", "run"), f"docker {arguments[0]}"
        return
    profiles = {profile for service in COMPOSE["services"].values() for profile in service["profiles"]}
    rest = arguments[1:]
    while rest[:1] in (["--profile"], ["-f"]):
        assert rest[0] == "-f" or rest[1] in profiles, f"docker-compose.yml has no profile {rest[1]}"
        rest = rest[2:]
    action = rest.pop(0)
    assert action in ("up", "run", "build"), f"docker compose {action}"
    service = next((word for word in rest if not word.startswith("-")), None)
    assert service is None or service in COMPOSE["services"], f"docker-compose.yml has no service {service}"


def _curl(arguments: list[str]) -> None:
    url, *rest = arguments
    if url == "localhost:8002/metrics":
        return
    if url.startswith("localhost:9000/"):
        _gateway(url.removeprefix("localhost:9000"), dict(pairwise(rest)))
        return
    match = URL.fullmatch(url)
    assert match, f"{url} is not an address of Triton"
    if not rest:
        return
    assert rest[0] == "-d", f"curl {rest[0]}"
    body = json.loads(rest[1])
    named = {entry["name"] for entry in body["inputs"]} if match["action"] == "/infer" else set(body)
    assert named <= request_fields(), f"no task has an input {(named - request_fields()).pop()!r}"
    for message in json.loads(body.get("messages", "[]")):
        assert set(message) == {"role", "content"}


def _gateway(path: str, options: dict[str, str]) -> None:
    """Check that a route of the gateway exists and accepts the body."""
    assert options["-H"] == "content-type: application/json"
    scope = {"type": "http", "method": "POST", "path": path, "root_path": ""}
    gateway = GatewayState(GatewaySettings(), Any, Any, Any)  # type: ignore[arg-type]  # nothing is asked
    (route,) = [route for route in routes(gateway) if route.matches(scope)[0] is Match.FULL]
    assert isinstance(route, Route)
    assert isinstance(route.app, Endpoint)
    assert route.app.schema is not None
    validate_body(route.app.schema, json.loads(options["-d"]))


def _pip(arguments: list[str]) -> None:
    assert arguments[0] in ("install", "uninstall", "download"), f"pip {arguments[0]}"
    for option, value in pairwise(arguments):
        if option in ("--constraint", "--requirement"):
            assert (ROOT / value).is_file(), f"{value} does not exist"
    extras = re.findall(rf"(?:\.|{DISTRIBUTION})\[(.*?)\]", " ".join(arguments))
    declared = (ROOT / "pyproject.toml").read_text("utf-8")
    for extra in ",".join(extras).split(",") if extras else ():
        assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), f"the project has no extra {extra}"


@cache
def known_options() -> set[str]:
    """Return every option of every verb, and of the project's scripts."""
    names = [verb.replace("-", "_") for verb in VERBS] + ["build"]
    parsers: list[ArgumentParser] = [importlib.import_module(f"builder.commands.{name}").parser() for name in names]
    scripts = [
        path.read_text("utf-8")
        for path in (ROOT / "scripts").rglob("*")
        if path.is_file() and path.suffix in ("", ".py")
    ]
    own = {option for text in scripts for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    return {"--version", *FOREIGN_OPTIONS, *own, *(o for parser in parsers for o in parser._option_string_actions)}


def check_inline(code: str) -> None:
    """Raise AssertionError for a command or an option in running text that does not exist."""
    words = shlex.split(code)
    script = words[0].startswith("scripts/") and not words[0].endswith((".py", "/"))
    if script or (words[0] in ("build-repo", "docker") and len(words) > 1):
        check_command(words)
    elif words[0].startswith("--"):
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        unknown = set(options) - known_options()
        assert not unknown, f"no command has an option {unknown.pop()}"
        values = [word for word in words if not word.startswith("--")]
        if values and not any(PLACEHOLDER.fullmatch(value) for value in values) and not set(options) & FOREIGN_OPTIONS:
            check_command(["build-repo", "org/model", *words])


def check_yaml(title: str, text: str, folder: Path) -> None:
    """Raise AssertionError or SpecError unless it is a models.yaml that the specification accepts."""
    assert title == 'title="models.yaml"', f"what is this YAML? {title or text[:40]}"
    path = folder / "models.yaml"
    path.write_text(text, "utf-8")
    (folder / "teams").mkdir(exist_ok=True)
    (folder / "teams" / "search.yaml").write_text("models: [{model: org/search}]", "utf-8")
    (folder / "checkpoints" / "news").mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        assert load_specs(path)
        load_pod_options(path)


def check_python(text: str) -> None:
    """Raise SyntaxError, ImportError or AssertionError unless it compiles and its imports exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
