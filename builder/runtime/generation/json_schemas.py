"""Normalise JSON schemas that llguidance reads too generously; refuse by name what cannot be normalised.

Schemas that require themselves are refused too: their answers would never end, and llguidance would fail within one.
A normalised schema allows no more than the one that was sent, so an answer is valid under both. `scripts/bench schemas`
checks that with llguidance 1.9. Knows JSON Schema (draft 2020-12); knows nothing about grammars.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext
from typing import Any, TypeGuard
from urllib.parse import unquote

from ..fields import InputError
from .numerals import MAX_DIGITS

BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # map any names to schemas
DATA = ("const", "enum", "default", "examples")  # values that are not schemas
WITHOUT_EFFECT = ("x-guidance", "deprecated", "contentSchema")  # llguidance obeys the first and refuses the others
ESCAPED = {chr(code) for code in range(32)} - set("\b\f\n\r\t")  # characters that need \u, which answers may not have
JOINED = ("allOf", "anyOf", "oneOf", "$ref")  # keywords that apply several schemas to one value
MAX_STEP = 5000  # largest multipleOf for llguidance, counted in units of its last decimal
MAX_EXACT_INTEGER = 2**53
MAX_BOUND = 2**63 - 1024  # the largest double below 2**63
MAX_ANSWER_NUMBER = Decimal("1e118")  # more than any number of an answer, see numerals.py
BOUNDS = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))

# String formats that llguidance accepts too generously: 29 February, or second 60 at any minute. Sources: RFC 3339
# (dates and times; years from 1 on, as calendars of programming languages have them, and no leap seconds); RFC 1035 and
# RFC 5321 (lengths of names of hosts and of addresses).
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    f"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
LENGTHS = {"hostname": 253, "email": 254}
PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def normalised(schema: "Mapping[str, Any]") -> "dict[str, Any]":
    """Return `schema` without constructs that llguidance gets wrong. Raises InputError if one cannot be rewritten."""
    result: "dict[str, Any]" = _mended(schema, "#")
    _refuse_steps(result)
    return result


def subschemas(schema: Any, place: str = "#") -> "Iterator[tuple[str, dict[str, Any]]]":
    """Yield the schemas in `schema`, innermost first, with the JSON pointers by which references name them."""
    if isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from subschemas(part, f"{place}/{number}")
    elif isinstance(schema, dict):
        for name, value in schema.items():
            inner = f"{place}/{pointer(name)}"
            if name in BY_NAME and isinstance(value, dict):
                for key, part in value.items():
                    yield from subschemas(part, f"{inner}/{pointer(key)}")
            elif name not in DATA:
                yield from subschemas(value, inner)
        yield place, schema


def pointer(name: str) -> str:
    """Return `name` as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _mended(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_mended(part, f"{place}/{number}") for number, part in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    result: "dict[str, Any]" = {}
    for name, value in schema.items():
        inner = f"{place}/{pointer(name)}"
        if name in BY_NAME and isinstance(value, dict):
            result[name] = {key: _mended(part, f"{inner}/{pointer(key)}") for key, part in value.items()}
        elif name in DATA:
            _refuse_constants(value, inner) if name in ("const", "enum") else None
            result[name] = value
        elif name not in WITHOUT_EFFECT:
            result[name] = _mended(value, inner)
    _refuse_counted_names(result, place)
    _mend_format(result)
    _mend_bounds(result, place)
    return result


def _refuse_constants(value: Any, place: str) -> None:
    """Raise InputError for a constant that an answer cannot repeat exactly."""
    for part in value if isinstance(value, list) else value.values() if isinstance(value, dict) else ():
        _refuse_constants(part, place)
    if isinstance(value, str) and ESCAPED & set(value):
        raise InputError(f"{place} has a control character, which guided answers cannot have; leave it out")
    if _is_number(value) and not _is_exact(value):
        raise InputError(
            f"{place} is {value!r}, a number beyond 64 bits or what doubles hold exactly; send it as a string"
        )


def _refuse_counted_names(schema: "Mapping[str, Any]", place: str) -> None:
    """Raise InputError where an answer could reach `minProperties` by repeating a name."""
    count, required = schema.get("minProperties"), schema.get("required", [])
    if not _is_number(count) or not isinstance(required, list) or count <= len(set(map(str, required))) + 1:
        return
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if not closed:
        raise InputError(
            f"{place}/minProperties is {count}, but repeated names cannot be ruled out; name {count - 1} or more "
            "properties in required, or lower it"
        )


def _mend_format(schema: "dict[str, Any]") -> None:
    """Rewrite, in place, formats that llguidance knows only roughly."""
    name = schema.get("format")
    if not isinstance(name, str):
        return
    longest = schema.get("maxLength")
    if name in LENGTHS:
        schema["maxLength"] = min(longest, LENGTHS[name]) if _is_number(longest) else LENGTHS[name]
    if name not in PATTERNS:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = PATTERNS[name]
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"] = [*schema["allOf"], {"pattern": PATTERNS[name]}]


def _mend_bounds(schema: "dict[str, Any]", place: str) -> None:
    """Rewrite, in place, the bounds of numbers that llguidance would pass, all below 2**63."""
    step = schema.get("multipleOf")
    widest = _widest_multiple(step, place) if _is_number(step) else None
    for name, exclusive_name, sign in BOUNDS:
        bound, exclusive = schema.pop(name, None), schema.pop(exclusive_name, None)
        if exclusive is True:  # as in draft 4
            bound, exclusive = None, bound
        bounds = []
        if _is_number(bound):
            bounds.append(_inner(bound, sign, f"{place}/{name}", is_exclusive=False))
        if _is_number(exclusive) and _is_passed(exclusive, sign):
            bounds.append(_inner(exclusive, sign, f"{place}/{exclusive_name}", is_exclusive=True))
        elif _is_number(exclusive):
            schema[exclusive_name] = exclusive
        if widest is not None:
            bounds.append(-sign * widest)
        given = [bound for bound in bounds if bound is not None]
        if given:
            schema[name] = _as_json(max(given) if sign > 0 else min(given), sign)


def _is_passed(exclusive: "int | float", sign: int) -> bool:
    """Return True if llguidance may allow the bound itself: a whole number before a point, or a large one."""
    return abs(exclusive) >= MAX_EXACT_INTEGER or (sign * exclusive >= 0 and exclusive == int(exclusive))


def _inner(value: "int | float", sign: int, place: str, is_exclusive: bool) -> "Decimal | None":
    """Return the outermost bound that answers may reach; None where no answer reaches as far."""
    if not math.isfinite(value):
        raise InputError(f"{place} is {value}; expected a finite number")
    bound = Decimal(repr(value))
    if abs(bound) > MAX_BOUND:
        if sign * bound > 0:
            raise InputError(f"{place} is {value!r}; numbers of answers stay below 2**63")
        return None if abs(bound) >= MAX_ANSWER_NUMBER else Decimal(-sign * MAX_BOUND)
    with localcontext() as context:
        context.prec = 64
        if is_exclusive:
            digits = max(0, bound.adjusted() + 1)
            bound += sign * Decimal(1).scaleb(min(0, digits - MAX_DIGITS))
        rounding = ROUND_CEILING if sign > 0 else ROUND_FLOOR
        return bound.quantize(Decimal(1).scaleb(-MAX_DIGITS), rounding=rounding)


def _as_json(bound: Decimal, sign: int) -> "int | float":
    """Return `bound` as llguidance reads it, as a double: exactly, or a little further inside."""
    if bound != bound.to_integral_value():
        return float(bound)
    whole = int(bound)
    double = float(whole)
    while sign * (int(double) - whole) < 0:
        double = math.nextafter(double, sign * math.inf)
    return int(double)


def _widest_multiple(step: "int | float", place: str) -> Decimal:
    """Return the largest bound of 15 digits. Raises InputError for a step that llguidance cannot count in."""
    exact, counted, decimals = Decimal(repr(step)) if math.isfinite(step) else None, float(step), 0
    while counted % 1 and decimals <= MAX_DIGITS:
        counted, decimals = counted * 10, decimals + 1
    if exact is None or step <= 0 or counted > MAX_STEP or Decimal(int(counted)).scaleb(-decimals) != exact:
        raise InputError(f"{place}/multipleOf is {step!r}; expected at most {MAX_STEP}, without its decimal point")
    return Decimal(10) ** (MAX_DIGITS - decimals)


def _refuse_steps(schema: "Mapping[str, Any]") -> None:
    """Raise InputError for several `multipleOf` that may meet in one number, and are too many to count in together."""
    parts = [part for _, part in subschemas(schema)]
    steps = {Decimal(repr(part["multipleOf"])) for part in parts if _is_number(part.get("multipleOf"))}
    decimals = max((-int(step.as_tuple().exponent) for step in steps), default=0)
    common = math.lcm(*(int(step.scaleb(decimals)) for step in steps))
    if len(steps) > 1 and common > MAX_STEP and any(name in part for part in parts for name in JOINED):
        raise InputError(
            f"multipleOf: {', '.join(map(str, sorted(steps)))} have {common} in common; expected at most {MAX_STEP}, "
            f"or a schema without {', '.join(JOINED)}"
        )


def _is_number(value: Any) -> "TypeGuard[int | float]":
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_exact(value: "int | float") -> bool:
    """Return True if llguidance, which reads doubles, writes the same number."""
    if not math.isfinite(value) or abs(value) > MAX_BOUND:
        return False
    return abs(value) <= MAX_EXACT_INTEGER or (float(value) == value and Decimal(repr(value)) == Decimal(value))


def refuse_endless_documents(schema: "Mapping[str, Any]") -> None:
    """Raise InputError if no finite document is valid under a part of `schema`."""
    open_parts = dict(subschemas(schema))
    while open_parts:
        settled = [place for place, part in open_parts.items() if _is_finite(place, part, open_parts)]
        if not settled:
            raise InputError(
                f"guide is refused: {min(open_parts)} of the schema needs itself, directly or through $ref, so that no "
                "document of it ends; make what refers back optional"
            )
        for place in settled:
            del open_parts[place]


def _is_finite(place: str, schema: "Mapping[str, Any]", open_parts: "Mapping[str, Any]") -> bool:
    """Return True if a finite document is valid here, assuming none for the schemas at `open_parts`."""
    if "const" in schema or "enum" in schema:
        return True
    every = [f"{place}/allOf/{number}" for number, _ in enumerate(_list(schema, "allOf"))]
    if isinstance(schema.get("$ref"), str):
        every.append(unquote(schema["$ref"]))
    if any(other in open_parts for other in every):
        return False
    for name in ("anyOf", "oneOf"):
        options = [f"{place}/{name}/{number}" for number, part in enumerate(_list(schema, name)) if part is not False]
        if options and all(option in open_parts for option in options):
            return False
    kinds = schema.get("type", "any")
    needed = {"array": _items, "object": _properties}
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in needed or not any(other in open_parts for other in needed[kind](place, schema)):
            return True
    return False


def _items(place: str, schema: "Mapping[str, Any]") -> "Iterator[str]":
    """Yield the places of the schemas of items that an array must have."""
    count, first = schema.get("minItems", 0), len(_list(schema, "prefixItems"))
    if isinstance(count, int):
        yield from (f"{place}/prefixItems/{number}" for number in range(min(count, first)))
        if count > first:
            yield f"{place}/items"


def _properties(place: str, schema: "Mapping[str, Any]") -> "Iterator[str]":
    """Yield the places of the schemas of properties that an object must have."""
    named = schema.get("properties")
    for name in _list(schema, "required"):
        if isinstance(named, dict) and name in named:
            yield f"{place}/properties/{pointer(name)}"
        elif not schema.get("patternProperties"):
            yield f"{place}/additionalProperties"


def _list(schema: "Mapping[str, Any]", name: str) -> "Sequence[Any]":
    value = schema.get(name, [])
    return value if isinstance(value, list) else []
