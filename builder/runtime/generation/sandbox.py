"""Run chat templates in jinja2's immutable sandbox, with limits on time, text and numbers.

A template comes from a checkpoint and is not trusted: nested loops, a macro that calls itself or a string that doubles
would otherwise block a server forever. Loops and calls count as steps; each step checks the clock.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jinja2.exceptions
import jinja2.sandbox
from jinja2 import nodes

SECONDS = 2.0  # of this thread's CPU time, for one chat; it may be exceeded by one step
MAX_VALUE_LENGTH = 4 << 20  # characters or items of any value, and of a prompt
LARGEST_POWER = 64
WIDE = re.compile(r"\d{6,}")  # in a format string: a width that would fill memory
PADDING_FILTERS = ("center", "format", "indent", "wordwrap")  # filters whose arguments set the length of the result


class LimitError(jinja2.exceptions.SecurityError):
    """A template exceeded its limit of time, text or numbers."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = threading.local()
        self.filters["_steps"] = self.steps
        self.filters["_sized"] = sized
        for name in PADDING_FILTERS:
            self.filters[name] = _padding(name, self.filters[name])

    def begin(self) -> None:
        """Start the time limit in this thread."""
        self.clock.end = time.thread_time() + SECONDS

    def step(self) -> None:
        if time.thread_time() > getattr(self.clock, "end", float("inf")):
            raise LimitError(f"they took it more than {SECONDS:g} s")

    def steps(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield `values`, counting one step each."""
        for value in values:
            self.step()
            yield value

    def call(__self, __context: Any, __callable: Any, *arguments: Any, **named: Any) -> Any:  # signature as in jinja2
        __self.step()
        if isinstance(getattr(__callable, "__self__", None), str):
            _refuse_wide("", *arguments, *named.values())
        return super().call(__context, __callable, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else _format(value.__self__, wrapped)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.step()
        if operator == "**" and isinstance(right, int | float) and right > LARGEST_POWER:
            raise LimitError(f"a power of {right}, more than {LARGEST_POWER}")
        if operator == "%" and isinstance(left, str):
            _refuse_wide(left, *(right if isinstance(right, tuple) else (right,)))
        if operator == "*" and {type(left), type(right)} & {str, list, tuple}:
            whole, times = (left, right) if hasattr(left, "__len__") else (right, left)
            if isinstance(times, int) and len(whole) * times > MAX_VALUE_LENGTH:
                raise LimitError(f"a value longer than {MAX_VALUE_LENGTH}")
        return sized(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Wrap every loop in `steps`, and every concatenation with ~ in `sized`."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = self._filtered(loop.iter, "_steps")
        for parent in [tree, *tree.find_all(nodes.Node)]:
            for field, value in parent.iter_fields():
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, self._filtered(value, "_sized"))
                elif isinstance(value, list):
                    value[:] = [self._filtered(v, "_sized") if isinstance(v, nodes.Concat) else v for v in value]
        return tree

    def _filtered(self, value: nodes.Node, name: str) -> Any:
        return nodes.Filter(value, name, [], [], None, None).set_environment(self).set_lineno(value.lineno)


def sized(value: Any) -> Any:
    """Return `value`; raise LimitError if it is too long."""
    if isinstance(value, str | list | tuple) and len(value) > MAX_VALUE_LENGTH:
        raise LimitError(f"a value longer than {MAX_VALUE_LENGTH}")
    return value


def _padding(name: str, apply: Any) -> Any:
    """Return the filter `apply`, which then raises LimitError if its result would be too long."""

    @functools.wraps(apply)  # keeps jinja2's marks for further arguments, such as the environment
    def guarded(*arguments: Any, **named: Any) -> Any:
        text = next((value for value in arguments if isinstance(value, str)), "") if name == "format" else ""
        _refuse_wide(text, *arguments, *named.values())
        return sized(apply(*arguments, **named))

    return guarded


def _format(text: str, apply: Any) -> Any:
    """Return str.format of `text`, which then raises LimitError if a field is too wide."""

    @functools.wraps(apply)
    def guarded(*arguments: Any, **named: Any) -> Any:
        _refuse_wide(text, *arguments, *named.values())
        return sized(apply(*arguments, **named))

    return guarded


def _refuse_wide(format: str, *values: Any) -> None:
    """Raise LimitError for a width, in a format string or a number, to which text would be padded."""
    if WIDE.search(format) or any(isinstance(value, int) and value > MAX_VALUE_LENGTH for value in values):
        raise LimitError("a width of more than 5 digits")
