"""Parser of calls in Python's notation: [name(city="Oslo"), other(n=2)], used by Llama 4, ToolACE and others.

Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama4
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence

from builder.checkpoints.tool_calls.finder import Finder, NotACall, ToolCall, as_call

OPENING = re.compile(r"\[\s*(?P<name>[A-Za-z_][\w.]*)?\s*(?P<open>\()?")
NAME = re.compile(r"[A-Za-z_][\w.]*")
JSON_NAMES = {"true": True, "false": False, "null": None}  # models mix the notations


class Pythonic(Finder):
    """List of calls whose arguments all have names and are literals."""

    begins = ("<|python_start|>", "[")
    end = "<|python_end|>"
    quotes = "\"'"

    def value_start(self, body: str) -> int:
        match = OPENING.match(body)
        if match is None or (match["open"] is None and match.end() < len(body)):
            raise NotACall
        return 0

    def calls(self, head: str, value: str) -> Sequence[ToolCall | None]:
        """Return the calls of a list; none if the text is not Python."""
        try:
            with warnings.catch_warnings(action="ignore"):  # about unknown escapes
                parsed = ast.parse(value, mode="eval").body
            return [_call(element) for element in parsed.elts] if isinstance(parsed, ast.List) else []
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return []


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
