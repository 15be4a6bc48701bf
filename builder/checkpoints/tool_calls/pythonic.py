"""Parser of calls in Python's notation: [name(city="Oslo"), other(n=2)], used by Llama 4, ToolACE and others.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama4
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import ClassVar

from builder.checkpoints.tool_calls.finder import Finder, NotACall, Reading, ToolCall, as_call

MARK, END = "<|python_start|>", "<|python_end|>"
OPENING = re.compile(r"\[\s*(?P<name>[A-Za-z_][\w.]*)?\s*(?P<open>\()?")
NAME = re.compile(r"[A-Za-z_][\w.]*")
JSON_NAMES = {"true": True, "false": False, "null": None}  # models mix the notations


class Pythonic(Finder):
    """List of calls whose arguments all have names and are literals."""

    begins: ClassVar[tuple[str, ...]] = (MARK, "[")
    quotes: ClassVar[str] = "\"'"

    def read(self, text: str, last: bool) -> Reading | None:
        mark = len(MARK) if text.startswith(MARK) else 0
        body = text[mark:].lstrip()
        if not body:
            return None
        match = OPENING.match(body)
        if match is None or (match["open"] is None and match.end() < len(body)):
            raise NotACall
        length = self.value(body)
        if length is None:
            return None
        calls = _calls(body[:length])
        rest = body[length:].lstrip() if mark and calls else ""
        if rest.startswith(END):
            return Reading(len(text) - len(rest) + len(END), calls)
        if mark and calls and not last and END.startswith(rest):
            return None
        return Reading(len(text) - len(body) + length, calls)


def _calls(text: str) -> tuple[ToolCall, ...]:
    """Return the calls of a list; none if an entry is not a call, or the text is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about unknown escapes
            parsed = ast.parse(text.strip(), mode="eval").body
        calls = [_call(element) for element in parsed.elts] if isinstance(parsed, ast.List) else []
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ()
    return () if None in calls else tuple(call for call in calls if call is not None)


def _call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    arguments = {str(k.arg): ast.literal_eval(_Names().visit(k.value)) for k in node.keywords}
    name = ast.unparse(node.func)
    return as_call(name, arguments) if NAME.fullmatch(name) else None


class _Names(ast.NodeTransformer):
    """Replaces JSON's constants with Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(JSON_NAMES[node.id]), node) if node.id in JSON_NAMES else node
