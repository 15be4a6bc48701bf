"""`build-repo query`: ask a served model, one line of JSON per answer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.commands import URL
from builder.common.errors import BuilderError, SpecError
from builder.serving.client.client import Client


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo query",
        description="Send requests to a served model over gRPC: one from KEY=VALUE arguments, or one for each line of "
        "a file or of standard input. A line is a JSON object of the model's inputs or, for a model with one required "
        "input, its text. Each answer is printed as one line of JSON; on a terminal, generated text is shown as it "
        "arrives.",
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add("values", nargs="*", metavar="KEY=VALUE", help="inputs of one request; a VALUE in [...] is read as a JSON list")
    add("--file", type=Path, help="file with one request a line; - is standard input")
    add("--url", **URL)
    return arguments


def run(options: argparse.Namespace) -> int:
    with Client(options.url, options.name) as client:
        required = [field.name for field in client.signature.inputs if not field.optional] or ["text_input"]
        failed = False
        for sample in _requests(options, required):
            try:
                if client.signature.in_pieces and sys.stdout.isatty() and "n" not in sample:
                    _show(client.stream({"stream": True, **sample}))
                else:
                    print(json.dumps(client.ask(sample), ensure_ascii=False), flush=True)
            except BuilderError as error:
                failed = True
                print(json.dumps({"error": str(error)}, ensure_ascii=False), flush=True)
    return int(failed)


def _show(answers: Iterator[dict[str, Any]]) -> None:
    """Print text as it comes, then why it ended."""
    for answer in answers:
        print("".join(answer["text_output"]), end="", flush=True)
        if "finish_reason" in answer:
            print(f"\n[{', '.join(answer['finish_reason'])}; {answer['completion_tokens'][0]} tokens]", flush=True)


def _requests(options: argparse.Namespace, required: list[str]) -> Iterator[dict[str, Any]]:
    if options.values:
        yield dict(_key_value(item) for item in options.values)
        return
    if options.file is None and sys.stdin.isatty():
        raise SpecError(f"nothing to ask: give {required[0]}=..., --file FILE, or lines on standard input")
    for number, text in enumerate(_lines(options.file), 1):
        if text.startswith(b"{"):
            yield _json(text, f"line {number}")
        elif text:
            if len(required) != 1:
                raise SpecError(f"this model needs {', '.join(required)}: write each line as a JSON object")
            yield {required[0]: text}


def _lines(file: Path | None) -> Iterator[bytes]:
    try:
        with sys.stdin.buffer if file is None or file == Path("-") else file.open("rb") as stream:
            for line in stream:
                yield line.rstrip(b"\r\n")
    except OSError as error:
        raise SpecError(f"{file} cannot be read ({error.strerror}); name another with --file") from error


def _key_value(item: str) -> tuple[str, Any]:
    key, separator, value = item.partition("=")
    if not separator:
        raise SpecError(f"{item!r} is not KEY=VALUE; write the name of an input before it, such as text_input={item}")
    return key, _json(value, key) if value.startswith("[") else value


def _json(text: str | bytes, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"{what} begins like JSON and is not ({error}); correct it") from error
