"""Locate each field of a config.pbtxt: protobuf's own parser returns values without positions.

Grammar: protobuf.dev, "Text Format Language Specification". Only texts that protobuf has parsed are read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tritonclient.grpc import model_config_pb2

from builder.common.errors import RepositoryError
from builder.repository.config.render import parse, quote
from builder.repository.lint.findings import Edit

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
    return _Reader(text).read()


def span_of(field: str, spans: Mapping[str, FieldSpan]) -> FieldSpan | None:
    """Return the span of a field, such as `input[0].dims` or `input.dims`; None if it is not in the text."""
    return spans.get(field.replace("[0]", ""))


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

    def read(self) -> dict[str, FieldSpan]:
        self._message("", "")
        return self.spans

    def _peek(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    def _next(self) -> tuple[str, int, int]:
        token = self.tokens[self.position]
        self.position += 1
        return token

    def _message(self, path: str, closing: str) -> str | None:
        """Read fields up to `closing`; return the text of the field `key`, for entries of a map."""
        counts: dict[str, int] = {}
        key = None
        while self.position < len(self.tokens) and self._peek() != closing:
            name, start, _ = self._next()
            if name in (";", ","):
                continue
            if self._peek() == ":":
                self._next()
            for span, inner in self._values(f"{path}{name}", start, counts, name):
                self._keep(f"{path}{name}", counts[name], span, inner)
                counts[name] += 1
            if name == "key":
                key = _unquoted(self.text[self.spans[f"{path}key"].value : self.spans[f"{path}key"].end])
        if closing and self.position < len(self.tokens):
            self._next()
        return key

    def _keep(self, path: str, number: int, span: FieldSpan, key: str | None) -> None:
        self.spans[f"{path}[{number}]" if number else path] = span
        if key is not None:
            self.spans[f"{path}[{key}]"] = span

    def _values(
        self, path: str, start: int, counts: dict[str, int], name: str
    ) -> Iterator[tuple[FieldSpan, str | None]]:
        """Yield the value of a field, or of a list of messages one by one, with the key of an entry of a map."""
        counts.setdefault(name, 0)
        messages = (
            self._peek() == "[" and self.position + 1 < len(self.tokens) and self.tokens[self.position + 1][0] in OPEN
        )
        if not messages:
            yield self._value(_inside(path, counts[name]), start, is_standalone=True)
            return
        self._next()
        while self.position < len(self.tokens) and self._peek() != "]":
            if self._peek() == ",":
                self._next()
                continue
            yield self._value(_inside(path, counts[name]), self.tokens[self.position][1], is_standalone=False)
        self._next()

    def _value(self, path: str, start: int, is_standalone: bool) -> tuple[FieldSpan, str | None]:
        key = None
        token, value, _ = self._next()
        if token in OPEN:
            key = self._message(path, OPEN[token])
        elif token == "[":
            while self._peek() not in ("]", ""):
                self._next()
            self._next()
        elif token[0] in "\"'":
            while self._peek()[:1] in ('"', "'") and self._peek():
                self._next()
        end = self.tokens[self.position - 1][2]
        return FieldSpan(start, end, value, self.text.count("\n", 0, start) + 1, is_standalone), key


def _inside(path: str, number: int) -> str:
    return f"{path}[{number}]." if number else f"{path}."


def _unquoted(literal: str) -> str:
    try:
        return str(parse(f"name: {literal}", "").name)
    except RepositoryError:
        return literal
