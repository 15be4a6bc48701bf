"""Random nested schemas, with compatible and incompatible keywords.

hypothesis-jsonschema is not used: its last release is of 2024, it knows draft 7, and its strategy for schemas is a part
of its own tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

NAMES = ("a", "b", "ab", "id", "é", 'quo"te', "x/y", "z~")
TEXTS = ("", "a", "ab", "red", 'quo"te', "é", "line\nbreak", "2024-02-29", "back\\slash", "😀")
NUMBERS = (0, 1, -1, 2, 10, 255, -40, 0.5, 0.1, -0.25, 1.5, 99.99, 1e-7, 2**31, 2**53, -(2**63), 1e300, 123456.789)
PATTERNS = (
    r"^[a-z]+$",
    r"^\d{2,4}$",
    "a|b",
    "^x-",
    r"^(foo|bar)?$",
    r"[^,]",
    r"^.{2}$",
    r"\.",
    r"^[A-Z][a-z]*(-[A-Z])?$",
)
FORMATS = ("date", "date-time", "time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration", "int32")
DEPTH = 3


def generated(count: int, seed: int) -> Iterator[Any]:
    """Yield `count` schemas."""
    for number in range(count):
        yield _Source(random.Random(f"{seed} {number}")).root()


class _Source:
    """Generator of one random schema."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.definitions: dict[str, Any] = {}

    def root(self) -> Any:
        names = self.chance.sample(("node", "leaf"), self.chance.choice((0, 0, 1, 2)))
        self.definitions = dict.fromkeys(names)
        for name in names:
            self.definitions[name] = self.schema(DEPTH - 1)
        schema = self.schema(DEPTH)
        return {**schema, "$defs": self.definitions} if self.definitions and isinstance(schema, dict) else schema

    def schema(self, depth: int) -> Any:
        chance = self.chance
        if chance.random() < 0.05:
            return chance.choice((True, {}, False)) if depth < DEPTH else {}
        draws = [self.number, self.string, self.constant, self.plain]
        if depth > 0:
            draws += [self.array, self.object, self.object, self.combined]
        if self.definitions and depth < DEPTH:
            draws.append(self.reference)
        return chance.choice(draws)(depth)

    def plain(self, depth: int) -> dict[str, Any]:
        kinds = ("string", "integer", "number", "boolean", "null")
        return {"type": self.chance.choice((*kinds, self.chance.sample(kinds, 2)))}

    def constant(self, depth: int) -> dict[str, Any]:
        if self.chance.random() < 0.5:
            return {"const": self.value(depth)}
        return {"enum": [self.value(depth) for _ in range(self.chance.randint(1, 4))]}

    def value(self, depth: int) -> Any:
        chance = self.chance
        simple: list[Callable[[], Any]] = [
            lambda: chance.choice(TEXTS),
            lambda: chance.choice(NUMBERS),
            lambda: chance.choice((None, True, False)),
        ]
        if depth > 0:
            simple.append(lambda: [self.value(0) for _ in range(chance.randint(0, 2))])
            simple.append(lambda: {name: self.value(0) for name in chance.sample(NAMES, chance.randint(0, 2))})
        return chance.choice(simple)()

    def number(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": self.chance.choice(("number", "integer"))}
        low, high = sorted(self.chance.sample(NUMBERS, 2))
        self.maybe(schema, self.chance.choice(("minimum", "exclusiveMinimum")), low)
        self.maybe(schema, self.chance.choice(("maximum", "exclusiveMaximum")), high)
        self.maybe(schema, "multipleOf", self.chance.choice((1, 2, 5, 7, 100, 0.5, 0.01)), 0.2)
        return schema

    def string(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        least = self.chance.randint(0, 3)
        self.maybe(schema, "minLength", least, 0.4)
        self.maybe(schema, "maxLength", least + self.chance.randint(0, 5), 0.4)
        self.maybe(schema, "pattern", self.chance.choice(PATTERNS), 0.4)
        self.maybe(schema, "format", self.chance.choice(FORMATS), 0.25)
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array"}
        least = self.chance.randint(0, 2)
        self.maybe(schema, "prefixItems", [self.schema(depth - 1) for _ in range(self.chance.randint(1, 2))], 0.4)
        self.maybe(schema, "items", self.schema(depth - 1), 0.8)
        self.maybe(schema, "minItems", least, 0.5)
        self.maybe(schema, "maxItems", least + self.chance.randint(0, 2), 0.6)
        return self.shuffled(schema)

    def object(self, depth: int) -> dict[str, Any]:
        names = self.chance.sample(NAMES, self.chance.randint(0, 4))
        schema: dict[str, Any] = {"type": "object"}
        self.maybe(schema, "properties", {name: self.schema(depth - 1) for name in names}, 0.9)
        self.maybe(schema, "required", [name for name in NAMES if self.chance.random() < 0.3 and name in names], 0.7)
        self.maybe(schema, "additionalProperties", self.chance.choice((False, True, self.schema(0))), 0.7)
        patterns = self.chance.sample(("^a", "d$", "^x", "[0-9]"), self.chance.randint(1, 2))
        self.maybe(schema, "patternProperties", {pattern: self.schema(0) for pattern in patterns}, 0.25)
        self.maybe(schema, "minProperties", self.chance.randint(0, 4), 0.15)
        self.maybe(schema, "maxProperties", self.chance.randint(0, 4), 0.15)
        return self.shuffled(schema)

    def combined(self, depth: int) -> dict[str, Any]:
        name = self.chance.choice(("anyOf", "anyOf", "oneOf", "allOf"))
        parts = [self.schema(depth - 1) for _ in range(self.chance.randint(1, 3))]
        schema: dict[str, Any] = {name: parts}
        if self.chance.random() < 0.4:
            beside = self.chance.choice((self.object, self.number, self.string, self.plain))(depth - 1)
            schema = {**schema, **beside}
        return self.shuffled(schema)

    def reference(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/{self.chance.choice(list(self.definitions))}"}
        self.maybe(schema, "description", "a reference", 0.2)
        return schema

    def maybe(self, schema: dict[str, Any], name: str, value: Any, likelihood: float = 0.5) -> None:
        if self.chance.random() < likelihood:
            schema[name] = value

    def shuffled(self, schema: dict[str, Any]) -> dict[str, Any]:
        names = list(schema)
        self.chance.shuffle(names)
        return {name: schema[name] for name in names}
