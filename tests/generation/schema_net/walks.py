"""Random walks through the texts that a guide allows; each must end in a document of its schema."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import extend, validator_for
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from builder.runtime.fields import InputError
from builder.runtime.generation.guides import Guide, Guides

END = 0
VOCABULARY = 400
TOKENS = 240  # of a walk; those that are longer are cut off, as by max_tokens
TEXTS = ('{"name": "a small museum", "open": true, "rooms": [1, 2.5, -3e7, 1999]}', "water expands when it freezes") * 3
CLOSING = ('"', "}", "]")


def make_guides(folder: Path) -> Guides:
    """Return guides over a byte-level tokeniser of few tokens, which it writes to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Guides(folder / "tokenizer.json", VOCABULARY, [END])


@dataclass
class Findings:
    """Counts of the outcomes of schemas and of walks; `wrong`: schemas with invalid answers."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)


class Walker:
    """Walker under the guides of one tokeniser."""

    def __init__(self, guides: Guides, walks: int) -> None:
        self.guides, self.walks = guides, walks
        self.tokenizer = Tokenizer.from_file(str(guides.file))
        self.closing = np.array([END, *(self.tokenizer.token_to_id(text) for text in CLOSING)])

    def look(self, schemas: Iterable[Any]) -> Findings:
        """Return the outcomes of `schemas`."""
        findings = Findings()
        for number, schema in enumerate(schemas):
            findings.counts["schemas"] += 1
            try:
                guide = self.guides({"json_schema": schema})
            except InputError as error:
                findings.counts["refused"] += 1
                findings.refusals[reason(str(error))] += 1
                continue
            findings.counts["accepted"] += 1
            for walk in range(self.walks):
                self._walk(schema, guide, np.random.default_rng((number, walk)), findings)
        return findings

    def _walk(self, schema: Any, guide: Guide, chance: np.random.Generator, findings: Findings) -> None:
        findings.counts["walks"] += 1
        try:
            text = self.answer(guide.copy(), chance)
        except InputError as error:
            problem: str | None = f"the walk was stuck: {error}"
            text = ""
        else:
            if text is None:
                findings.counts["cut off"] += 1
                return
            findings.counts["documents"] += 1
            problem = problem_of(text, schema)
        if problem is not None:
            findings.counts["invalid"] += 1
            findings.wrong.append({"schema": schema, "answer": text, "problem": problem})

    def answer(self, guide: Guide, chance: np.random.Generator) -> str | None:
        """Return the text of one walk; None if it is cut off."""
        tokens: list[int] = []
        eagerness = chance.choice((0.0, 2.0, 6.0))  # to come to an end
        for step in range(TOKENS):
            if guide.forced:
                token = guide.forced[0]
            else:
                scores = chance.normal(0, 3, VOCABULARY)
                scores[self.closing] += eagerness + 12 * step / TOKENS
                guide.apply(scores)
                token = int(scores.argmax())
            if token != END:
                tokens.append(token)
                guide.push(token)
            if token == END or guide.complete:
                return str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        return None


def problem_of(text: str, schema: Any) -> str | None:
    """Return the problem of a document under any interpretation of repeated names; None if it is valid."""
    for members in (dict, _first_of_each):
        try:
            document = json.loads(
                text,
                object_pairs_hook=members,
                parse_constant=_refuse,
                parse_int=_whole,
                parse_float=_finite,
            )
        except ValueError as error:
            return f"it is not JSON that all readers take: {error}"
        for problem in judge_of(schema).iter_errors(document):
            return str(problem.message)
    return None


def judge_of(schema: Any) -> Any:
    """Return jsonschema's validator with exact decimals and ECMA 262 patterns."""
    kind = extend(validator_for(schema, default=Draft202012Validator), {"multipleOf": _multiple, "pattern": _pattern})
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def reason(message: str) -> str:
    """Return the reason of a refusal without names and numbers."""
    message = message.removeprefix("guide is refused: ")
    message = re.sub(r"^#\S*/", "", message)
    if message.startswith("Unimplemented keys"):
        return "a keyword that is not implemented"
    return re.sub(r"[-\d.]+|'[^']*'|\([^)]*\)|/[^ ]*/", "N", message)[:90]


def _multiple(validator: Any, step: Any, value: Any, schema: Mapping[str, Any]) -> Any:
    if validator.is_type(value, "number") and Fraction(str(value)) % Fraction(str(step)):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {step}")


def _pattern(validator: Any, pattern: str, value: Any, schema: Mapping[str, Any]) -> Any:
    if validator.is_type(value, "string") and not re.search(pattern, value, re.ASCII):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _whole(text: str) -> int:
    if abs(int(text)) >= 2**63:
        raise ValueError(f"{text} has more than 64 bits")
    return int(text)


def _finite(text: str) -> float:
    if not np.isfinite(float(text)):
        raise ValueError(f"{text} is no finite double")
    return float(text)
