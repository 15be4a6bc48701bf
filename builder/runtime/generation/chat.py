"""Render a chat as one prompt with the checkpoint's own template, in transformers' environment and sandbox.

The rules are those of transformers 5's `apply_chat_template`: the variables of a template (messages, tools, documents,
the named special tokens, `raise_exception`, `strftime_now`, `tojson` with its keywords, `{% generation %}`, loop
controls), the changes to a message beforehand (keys without a value are removed, reasoning gets each of its names), and
what the sandbox forbids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
from jinja2 import nodes, parser
from jinja2.utils import Namespace

from ..fields import InputError
from .sandbox import MAX_VALUE_LENGTH, LimitError, Sandbox

TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # ends a message that the answer continues; the prompt ends before it
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # as in vLLM
THINKING_SWITCHES = ("enable_thinking", "thinking")
RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms; the first that is present counts


class ChatTemplate:
    """Renders messages. `source` comes from the checkpoint and is not trusted: it cannot reach any Python object.

    `with_tools`: a separate template for requests with tools, if there is one. `problem`: why the template does not
    compile; every chat is then refused with this reason, while text prompts are answered. `supports_tools`: True if the
    template reads the tools. `request_variables`: the variables that a request may add.
    """

    def __init__(self, source: str, tokens: "Mapping[str, str]", with_tools: "str | None" = None) -> None:
        self.problem = ""
        self.tokens = dict(tokens)
        self.supports_tools = False
        self.request_variables: "frozenset[str]" = frozenset()
        self.environment = _environment()
        try:
            self.template = self.tool_template = self.environment.from_string(source)
            if with_tools is not None:
                self.tool_template = self.environment.from_string(with_tools)
            read = [
                jinja2.meta.find_undeclared_variables(self.environment.parse(s)) for s in (source, with_tools or source)
            ]
            self.supports_tools = "tools" in read[1]
            self.request_variables = frozenset(set.union(*read) - RESERVED - {*self.tokens, *self.environment.globals})
        except jinja2.TemplateSyntaxError as error:
            self.problem = f"the model's chat template does not compile: line {error.lineno}: {error.message}"
        except Exception as error:  # nested too deeply, for example: the server has to start all the same
            self.problem = f"the model's chat template does not compile: {error!r}"

    def variables(self, added: "Mapping[str, Any]", effort: str = "") -> "dict[str, Any]":
        """Return the variables that a request adds: `added`, and those that set `effort` in this template.

        As in vLLM, every effort but none turns thinking on. Raises InputError for a variable that the template does not
        read.
        """
        for name in added:
            if name not in self.request_variables and not self.problem:
                known = ", ".join(sorted(self.request_variables)) or "none"
                raise InputError(
                    f"chat_template_kwargs has {name!r}, which is not a variable of this checkpoint's chat template "
                    f"that a request can set; it has: {known}"
                )
        if not effort:
            return dict(added)
        if effort not in EFFORTS:
            raise InputError(f"reasoning_effort is {effort!r}; expected one of {', '.join(EFFORTS)}")
        meaning = {"reasoning_effort": effort, **dict.fromkeys(THINKING_SWITCHES, effort != "none")}
        meant = {name: value for name, value in meaning.items() if name in self.request_variables}
        if not meant:
            raise InputError(
                "reasoning_effort is not something that this checkpoint's chat template reads; leave it out"
            )
        return {**meant, **added}

    @property
    def without_thinking(self) -> "dict[str, bool]":
        """Variables that turn this template's reasoning off; none if it cannot."""
        return {name: False for name in THINKING_SWITCHES if name in self.request_variables}

    def __call__(
        self,
        messages: "Sequence[Mapping[str, Any]]",
        tools: "Sequence[Mapping[str, Any]] | None" = None,
        added: "Mapping[str, Any] | None" = None,
        continues: bool = False,
    ) -> str:
        """Render the prompt up to the assistant's answer. Raises InputError for what the template refuses.

        `added`: further variables. `continues`: True if the answer continues the last message.
        """
        if self.problem:
            raise InputError(f"{self.problem}; send the prompt as text_input")
        read = [_message(message) for message in messages]
        if continues:
            read[-1] = {**read[-1], "content": _tagged(read[-1].get("content"))}
        variables = {**(added or {}), "messages": read, "tools": tools, "documents": None}
        template = self.template if tools is None else self.tool_template
        try:
            text = self._render(template, {**variables, "add_generation_prompt": not continues, **self.tokens})
        except RecursionError as error:
            raise InputError("the model's chat template refuses these messages: they have too many levels") from error
        except Exception as error:  # a template is a program: it can raise anything
            raise InputError(f"the model's chat template refuses these messages: {error}") from error
        return _before_tag(text) if continues else text

    def _render(self, template: jinja2.Template, variables: "Mapping[str, Any]") -> str:
        self.environment.begin()
        pieces, length = [], 0
        for piece in template.generate(**variables):
            self.environment.step()
            pieces.append(piece)
            length += len(piece)
            if length > MAX_VALUE_LENGTH:
                raise LimitError(f"a prompt longer than {MAX_VALUE_LENGTH} characters")
        return "".join(pieces)


def _message(entry: "Mapping[str, Any]") -> "dict[str, Any]":
    message = {name: value for name, value in entry.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, REASONING[0]: reasoning}


def _tagged(content: Any) -> Any:
    """Return the content of a message with the mark after its last text."""
    if isinstance(content, str):
        return content + TAG
    for at in reversed(range(len(content) if isinstance(content, list) else 0)):
        part = content[at]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return [*content[:at], {**part, "text": part["text"] + TAG}, *content[at + 1 :]]
    raise InputError("continue_final_message needs text in the last message, which the answer continues")


def _before_tag(text: str) -> str:
    """Return a rendered chat up to the mark; like transformers, allow for a template that trims messages."""
    place = text.rfind(TAG.strip())
    if place < 0:
        raise InputError("continue_final_message: the model's chat template leaves the last message out")
    return text[:place] if text.startswith(TAG, place) else text[:place].rstrip()


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training: render its text, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    def _say(self, caller: "Callable[[], str]") -> str:
        return caller()


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else that a Python class would lead to."""

    def __call__(self, *positional: Any, **named: Any) -> "dict[Any, Any]":
        return dict(*positional, **named)

    def fromkeys(self, *positional: Any) -> "dict[Any, Any]":
        return dict.fromkeys(*positional)


class _Namespace(Namespace):
    """A namespace without attributes that begin with an underscore."""

    def __init__(*positional: Any, **named: Any) -> None:  # like jinja2's own, so that `self` is a name like any other
        attributes = dict(*positional[1:], **named)
        for name in attributes:
            _public(name)
        Namespace.__init__(positional[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _public(name)
        super().__setitem__(name, value)


def _public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template cannot set {name!r}, which begins with an underscore")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: "int | None" = None,
    separators: "tuple[str, str] | None" = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
