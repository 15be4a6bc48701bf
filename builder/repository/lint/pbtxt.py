"""Locate each field of a config.pbtxt, and write the edits of findings into it (--fix).

Protobuf's own parser returns values without positions. Grammar: protobuf.dev, "Text Format Language Specification".
Only texts that protobuf has parsed are read here.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc import model_config_pb2

from builder.common.errors import RepositoryError
from builder.repository.config.render import parse, quote
from builder.repository.lint.findings import Edit, Finding
from builder.repository.signing_keys import SIGNATURE

TOKEN = re.compile(
    r"""\s+|\#[^\n]*|(?P<token>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[{}<>\[\]:;,]|[^\s{}<>\[\]:;,"'#]+)"""
)
OPEN = {"{": "}", "<": ">"}


@dataclass(frozen=True)
class FieldSpan:
    """Offsets of a field: `start` of its name, `value` of its value, and `end`; `line` from 1.

    `is_standalone`: False for an element of a list in brackets, which has commas around it.
    """

    start: int
    end: int
    value: int
    line: int
    is_standalone: bool


def field_spans(text: str) -> dict[str, FieldSpan]:
    """Return the span of each field by its path, such as `input[1].dims` and `parameters[NAME]`.

    The first of a repeated field has no number.
    """
    reader = _Reader(text)
    reader.message("", "")
    return reader.spans


def span_of(field: str, spans: Mapping[str, FieldSpan]) -> FieldSpan | None:
    """Return the span of a field, such as `input[0].dims` or `input.dims`; None if it is not in the text."""
    return spans.get(field.replace("[0]", ""))


def fix(repository: Path, findings: Sequence[Finding]) -> list[str]:
    """Apply the edits of `findings`; return a sentence for each file that was changed or left unchanged.

    A configuration that is a link, is signed, or has a syntax that an edit does not fit, is left unchanged. Raises
    RepositoryError if a configuration cannot be written.
    """
    edits: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.fix is not None:
            edits.setdefault((finding.model, finding.file), []).append(finding)
    return [_fix(repository / file, file, model, of_file) for (model, file), of_file in edits.items()]


def _fix(path: Path, file: str, model: str, findings: Sequence[Finding]) -> str:
    codes: dict[Edit, str] = {finding.fix: finding.code for finding in findings if finding.fix is not None}
    changes = ", ".join(f"{edit} ({code})" for edit, code in codes.items())
    if path.is_symlink():
        return f"{file}: left as it is: it is a link. By hand: {changes}"
    if (path.parent / SIGNATURE).exists():
        return f"{file}: left as it is: the model is signed. By hand, and then sign it again: {changes}"
    try:
        text = edited(path.read_text("utf-8"), list(codes), model)
        if text is None:
            return f"{file}: left as it is: it is written in a way that is not understood here. By hand: {changes}"
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(text, "utf-8")
        unfinished.chmod(path.stat().st_mode)
        os.replace(unfinished, path)
    except UnicodeDecodeError:
        return f"{file}: left as it is: it is not UTF-8. By hand: {changes}"
    except OSError as error:
        raise RepositoryError(f"{path} cannot be written: {error.strerror or error}") from error
    return f"{file}: {changes}"


def edited(text: str, edits: list[Edit], name: str) -> str | None:
    """Return `text` with `edits`, otherwise unchanged; None if that is not the same configuration with these edits."""
    expected = parse(text, name)
    result = text
    for edit in edits:
        result = _apply(result, edit)
        _apply_to(expected, edit)
    try:
        return result if parse(result, name) == expected else None
    except RepositoryError:
        return None


def _apply(text: str, edit: Edit) -> str:
    numbered = re.compile(rf"{re.escape(edit.field)}(\[\d+\])?")
    spans = {span for path, span in field_spans(text).items() if numbered.fullmatch(path) and span.is_standalone}
    for span in sorted(spans, key=lambda span: span.start, reverse=True):
        if edit.value is None:
            text = _without(text, span)
        else:
            text = f'{text[: span.value]}"{quote(edit.value)}"{text[span.end :]}'
    return text


def _without(text: str, span: FieldSpan) -> str:
    """Return `text` without a field, and without its line if nothing else is on it."""
    start, end = span.start, span.end
    before = text.rfind("\n", 0, start) + 1
    after = re.compile(r"[ \t;,]*\n?").match(text, end)
    assert after is not None
    if not text[before:start].strip() and text[after.start() : after.end()].endswith("\n"):
        return text[:before] + text[after.end() :]
    return text[:start] + text[end:].lstrip(";,")


def _apply_to(config: model_config_pb2.ModelConfig, edit: Edit) -> None:
    name, _, key = edit.field.partition("[")
    if edit.value is not None:
        setattr(config, name, edit.value)
    elif key:
        config.parameters.pop(key.rstrip("]"), None)
    else:
        config.ClearField(name)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [(m["token"], m.start("token"), m.end("token")) for m in TOKEN.finditer(text) if m["token"]]
        self.position = 0
        self.spans: dict[str, FieldSpan] = {}

    def _peek(self, ahead: int = 0) -> str:
        """Return a token without reading it; empty after the last one."""
        position = self.position + ahead
        return self.tokens[position][0] if position < len(self.tokens) else ""

    def _next(self) -> tuple[str, int, int]:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def message(self, path: str, closing: str) -> str | None:
        """Read fields up to `closing`; return the text of the field `key`, for entries of a map."""
        counts: Counter[str] = Counter()
        key = None
        while self._peek() not in (closing, ""):
            name, start, _ = self._next()
            if name in (";", ","):
                continue
            if self._peek() == ":":
                self._next()
            if self._peek() == "[" and self._peek(1) in OPEN:  # a list of messages
                self._next()
                while self._peek() not in ("]", ""):
                    if self._peek() == ",":
                        self._next()
                        continue
                    self._field(f"{path}{name}", counts[name], self.tokens[self.position][1], is_standalone=False)
                    counts[name] += 1
                self._next()
            else:
                self._field(f"{path}{name}", counts[name], start, is_standalone=True)
                counts[name] += 1
            if name == "key":
                key = _unquoted(self.text[self.spans[f"{path}key"].value : self.spans[f"{path}key"].end])
        if self._peek():
            self._next()
        return key

    def _field(self, path: str, number: int, start: int, is_standalone: bool) -> None:
        """Read the value of a field, the one with this number at `path`, and note its span."""
        numbered = f"{path}[{number}]" if number else path
        key = None
        token, value, _ = self._next()
        if token in OPEN:
            key = self.message(f"{numbered}.", OPEN[token])
        elif token == "[":
            while self._peek() not in ("]", ""):
                self._next()
            self._next()
        elif token[0] in "\"'":
            while self._peek()[:1] in ('"', "'") and self._peek():
                self._next()
        end = self.tokens[self.position - 1][2]
        span = FieldSpan(start, end, value, self.text.count("\n", 0, start) + 1, is_standalone)
        self.spans[numbered] = span
        if key is not None:
            self.spans[f"{path}[{key}]"] = span


def _unquoted(literal: str) -> str:
    try:
        return str(parse(f"name: {literal}", "").name)
    except RepositoryError:
        return literal
