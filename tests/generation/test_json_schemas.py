"""Schemas that llguidance does not fully enforce are corrected, or refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.runtime.fields import InputError
from builder.runtime.generation import guides as guides_module
from builder.runtime.generation.guides import Guide, Guides
from builder.runtime.generation.numerals import NumeralState
from tests.generation.schema_net.generated import generated
from tests.generation.schema_net.pairs import pairs
from tests.generation.schema_net.shapes import shapes
from tests.generation.schema_net.walks import END, Walker, make_guides, problem_of

WALKS = 8


@pytest.fixture(scope="module")
def guides(module_folder: Callable[[str], Path]) -> Guides:
    return make_guides(module_folder("schemas"))


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the process that checks expressions, which takes a quarter of a second per schema."""
    monkeypatch.setattr(guides_module, "INTERSECTING", ())


def allows(guides: Guides, schema: dict[str, Any], text: str) -> bool:
    """Return True if `schema` accepts `text` as a complete answer, in tokens or byte by byte."""
    guide = guides({"json_schema": schema})
    texts = guides._numerals().texts
    spellings = (guides.tokenizer.tokenize_str(text), [texts.index(bytes((byte,))) for byte in text.encode()])
    return any(_goes_through(guide.copy(), tokens) for tokens in spellings)


def _goes_through(guide: Guide, tokens: list[int]) -> bool:
    for token in [*tokens, END]:
        if guide.complete:
            return token == END
        scores = np.zeros(guide.vocabulary)
        guide.apply(scores)
        if scores[token] == -np.inf:
            return False
        if token != END:
            guide.push(token)
    return True


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0", "0.5"),
    ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, "3", "3.25"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0", "-0.5"),
    ({"type": "number", "minimum": 0.12345678901234567, "maximum": 0.5}, "0", "0.2"),
    ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, "0.99999999999999999999", "0.999"),
    ({"type": "integer", "maximum": 9007199254740993}, "9007199254740994", "9007199254740992"),
    ({"type": "string", "format": "date-time"}, '"2024-01-31T12:30:60Z"', '"2024-01-31T12:30:59Z"'),
    ({"type": "string", "format": "date-time"}, '"2023-02-29T12:30:00Z"', '"2024-02-29T12:30:00Z"'),
    ({"type": "string", "format": "date"}, '"1900-02-29"', '"2000-02-29"'),
    ({"type": "string", "format": "date"}, '"0000-01-01"', '"0001-01-01"'),
    ({"type": "string", "format": "hostname"}, f'"{"a." * 127}a"', f'"{"a." * 126}a"'),
    ({"type": "string", "format": "time", "pattern": "Z$"}, '"10:00:00+01:00"', '"10:00:00Z"'),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}},
        '{"a":1,"\\u0061":true}',
        '{"a":1,"b":true}',
    ),
    (
        {"type": "object", "properties": {"a": {"type": "null"}}, "x-guidance": {"key_separator": "="}},
        '{"a"=null}',
        "{}",
    ),
    ({"x-guidance": {"lenient": True}, "type": "string", "maxLength": 1}, '"ab"', '"a"'),
    ({"type": "number"}, "1e999", "1e99"),
    ({"type": "integer"}, "1" * 19, "1" * 18),
    ({}, "[1e-999]", "[1e-99]"),
]


@pytest.mark.parametrize(("schema", "invalid", "valid"), INVALID)
def test_guide_allows_no_invalid_document(
    schema: dict[str, Any], invalid: str, valid: str, guides: Guides, unchecked: None
) -> None:
    """Regression: llguidance allows the first text of each, which JSON parsers or validators refuse."""
    assert not allows(guides, schema, invalid)
    assert allows(guides, schema, valid)
    assert problem_of(valid, schema) is None


TREE: dict[str, Any] = {
    "$defs": {"tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}},
    "$ref": "#/$defs/tree",
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, "#/minProperties is 2"),
    ({"patternProperties": {"^a": {}}, "minProperties": 3, "required": ["a"]}, "#/minProperties is 3"),
    ({"const": 12345678901234567890}, "#/const is 12345678901234567890"),
    ({"properties": {"a/b": {"enum": ["x", {"y": 1e25}]}}}, "#/properties/a~1b/enum is 1e[+]25"),
    ({"const": "\x01"}, "#/const has a control character"),
    ({"type": "number", "minimum": 1e19}, "#/minimum is 1e[+]19"),
    ({"type": "number", "multipleOf": 0.07000000001}, "#/multipleOf is 0.07000000001"),
    ({"multipleOf": 100000}, "#/multipleOf is 100000; expected at most"),
    ({"allOf": [{"multipleOf": 501}, {"multipleOf": 499}]}, "multipleOf: 499, 501 have 249999 in common"),
    ({"$ref": "#"}, "# of the schema needs itself"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "# of the schema needs itself"),
    ({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}, "#/properties/a of the schema needs itself"),
    ({**TREE, "$defs": {"tree": {**TREE["$defs"]["tree"], "required": ["next"]}}}, "needs itself"),
    ({"anyOf": [{"$ref": "#"}, False]}, "needs itself"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED)
def test_schema_that_cannot_be_kept_is_refused_by_name(
    schema: dict[str, Any], message: str, guides: Guides, unchecked: None
) -> None:
    """Regression: each schema gave invalid answers, or an error that exposed the parser's state."""
    with pytest.raises(InputError, match=message):
        guides({"json_schema": schema})


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "null"}]},
        {"type": "object", "properties": {"a": False}},
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2, "required": ["x"]},
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
        {"type": "integer", "minimum": 0, "maximum": 18446744073709551615, "deprecated": True},
        {"type": "integer", "multipleOf": 4999},
        {"type": "number", "multipleOf": 0.01, "exclusiveMinimum": 0},
    ],
)
def test_schema_that_can_be_kept_is_answered(schema: dict[str, Any], guides: Guides, unchecked: None) -> None:
    findings = Walker(guides, WALKS).look([schema])
    assert findings.counts["documents"]
    assert findings.wrong == []


def nets() -> Iterator[Any]:
    """Yield a part of the net of `scripts/bench schemas`."""
    yield from list(pairs(1))[::41]
    yield from generated(50, seed=28)
    for schemas in shapes().values():
        yield from sorted(schemas, key=lambda schema: len(str(schema)))[:200:40]


def test_random_walks_end_in_valid_documents_only(guides: Guides, unchecked: None) -> None:
    findings = Walker(guides, walks=2).look(nets())
    assert findings.wrong == []
    assert findings.counts["accepted"] > findings.counts["refused"]
    assert findings.counts["documents"] > findings.counts["accepted"]


def test_number_of_a_document_is_followed_across_tokens() -> None:
    assert NumeralState().after(b'{"a1e9999":"\\"1e9999') == NumeralState(quoted=True)
    assert NumeralState().after(b'{"a":-1').after(b"2.5") == NumeralState(part="decimals", whole=2, decimals=1)
    assert NumeralState().after(b"1.5e+12,") == NumeralState()
    for text, is_too_long in ((b"1e99", False), (b"1e100", True), (b"1" * 15 + b".", True), (b"1" * 18, False)):
        assert NumeralState().after(text).is_too_long is is_too_long


def test_choice_of_thousands_of_texts_is_answered(guides: Guides) -> None:
    """Regression: more than 2,000 alternatives failed the answer with an error that exposed the parser's state."""
    texts = [f"{number} of many" for number in range(4000)]
    walker = Walker(guides, 1)
    answers = {walker.answer(guides({"choice": texts}), np.random.default_rng(seed)) for seed in range(8)}
    assert answers <= set(texts)
    assert len(answers) > 1


def test_error_of_a_guide_shows_no_state(guides: Guides) -> None:
    """Regression: the state of llguidance's parser was part of the message."""
    guide = guides({"regex": "ab"})
    with pytest.raises(InputError, match="guide cannot go on") as caught:
        guide.push(guides._numerals().texts.index(b"x"))
    assert "{" not in str(caught.value)


def test_guide_beyond_ascii_is_checked_in_any_locale() -> None:
    """Regression: the pipe to the process that checks expressions used the encoding of the locale."""
    program = (
        "import sys\n"
        "from builder.runtime.generation.guides import refuse_endless, grammar_of\n"
        "import llguidance\n"
        "refuse_endless(grammar_of({'regex': '(\\u0434\\u0430|\\u043d\\u0435\\u0442)'}, llguidance))\n"
        "refuse_endless(grammar_of({'regex': '(\\u0434\\u0430'}, llguidance))\n"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **ascii_only}, capture_output=True)
    assert done.stderr.splitlines()[-1].startswith(b"builder.runtime.fields.InputError: guide is refused: ")
    assert b"unclosed group" in done.stderr


def test_deeply_nested_schema_is_refused(guides: Guides) -> None:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(900):
        schema = {"anyOf": [schema]}
    with pytest.raises(InputError):
        guides({"json_schema": schema})
