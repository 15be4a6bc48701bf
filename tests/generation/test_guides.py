"""Guided answers: random logits yield only valid documents, and other rows do not change."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from builder.runtime.contract import Arena, LayerShape, dump, load_generation
from builder.runtime.fields import InputError
from builder.runtime.generation import guides as guides_module
from builder.runtime.generation import service as service_module
from builder.runtime.generation.executors.base import Geometry, last_of_rows
from builder.runtime.generation.guides import MAX_GUIDE_LENGTH
from builder.runtime.generation.options import COMMON
from builder.runtime.generation.service import Service
from builder.serving.gateway.generation.tool_calling import Tool, call_schema
from tests.generation.executors import ArenaExecutor
from tests.servings import decoder_serving

LENGTH = 640
VOCABULARY, END = 420, 0  # logits of more tokens than the tokeniser has
TEXTS = ('{"name": "a small museum", "open": true, "rooms": [1, 2.5, -3]}', "water expands when it freezes") * 3

# The keywords of JSON Schema, in the shapes of its test suite and of applications.
SCHEMAS: dict[str, Any] = {
    "anything": True,
    "types": {"type": ["integer", "boolean", "null"]},
    "const": {"const": {"a": [1, "b"]}},
    "enum": {"enum": ["red", 4, None, [True], {"x": 1}]},
    "integer range": {"type": "integer", "minimum": -5, "maximum": 120},
    "exclusive range": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 200},
    "string lengths": {"type": "string", "minLength": 2, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "ipv4": {"type": "string", "format": "ipv4"},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"enum": ["x", "y"]}], "items": False},
    "required": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}, "c": {"type": "null"}},
        "required": ["c", "a"],
        "additionalProperties": False,
    },
    "additional": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    "one of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, name: {"type": "boolean"}},
                "required": ["kind"],
                "additionalProperties": False,
            }
            for kind, name in (("a", "x"), ("b", "y"))
        ]
    },
    "all of": {
        "type": "object",
        "allOf": [
            {"properties": {"a": {"type": "integer", "minimum": 0}}, "required": ["a"]},
            {"properties": {"a": {"maximum": 9}, "b": {"type": "boolean"}}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "references": {
        "$defs": {"point": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "recursion": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": {"type": "boolean"},
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["leaf", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "escaped names": {
        "type": "object",
        "properties": {'quo"te': {"const": 1}, "new\nline": {"const": "é"}},
        "required": ['quo"te', "new\nline"],
        "additionalProperties": False,
    },
    "an application's": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 12},
            "priority": {"enum": ["low", "high"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
            "due": {"type": "string", "format": "date"},
            "estimate": {"type": "number", "minimum": 0, "maximum": 100},
        },
        "required": ["title", "priority", "tags", "due"],
        "additionalProperties": False,
    },
}


class RandomExecutor(ArenaExecutor):
    """Executor of random logits that depend only on the tokens, not on slot or batch."""

    def __init__(self, slots: int) -> None:
        super().__init__(Geometry(slots, LENGTH, VOCABULARY, ((1, 1),)))
        self.calls: list[tuple[int, int]] = []

    def run(
        self, first: int, tokens: np.ndarray, lengths: np.ndarray, logits_positions: np.ndarray | None = None
    ) -> np.ndarray:
        rows, new = tokens.shape
        self.calls.append((rows, new))
        for row, length in enumerate(lengths.tolist()):
            self.arena["key_0"][first + row, 0, length : length + new, 0] = tokens[row]
        drawn = []
        for row, column in zip(
            *np.divmod(last_of_rows(tokens) if logits_positions is None else logits_positions, new), strict=True
        ):
            held = self.arena["key_0"][first + row, 0, : lengths[row] + column + 1, 0].astype(np.int64)
            drawn.append(np.random.default_rng(held).normal(0, 4, VOCABULARY))
        return np.array(drawn, np.float32)


@pytest.fixture(scope="module")
def folder(module_folder: Callable[[str], Path]) -> Path:
    """Return a model's folder without its graph: a byte-level tokeniser, and serving.json."""
    version = module_folder("guided")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>"], show_progress=False, initial_alphabet=letters
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(version / "tokenizer.json"))
    fields = [field.name for field in COMMON]
    arena = Arena(slots=4, length=LENGTH, dtype="float32", layers=(LayerShape(1, 1),))
    defaults = {"temperature": 0.0}
    serving = decoder_serving(vocabulary=VOCABULARY, arena=arena, end_ids=(END,), fields=fields, defaults=defaults)
    (version / "serving.json").write_text(dump(serving))
    return version


class Asked:
    """Service over RandomExecutor, and its answers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int = 4) -> None:
        self.executor = RandomExecutor(slots)
        monkeypatch.setattr(service_module, "make_executor", lambda *arguments: self.executor)
        self.service = Service(folder)
        self.answers: dict[int, dict[str, np.ndarray] | Exception] = {}

    def ask(self, *requests: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the texts and finish reasons of requests that run together."""
        for number, request in enumerate(requests):
            parameters = {"text_input": "so", "max_tokens": 400, **request}
            if "guide" in parameters:
                parameters["guide"] = json.dumps(parameters["guide"])

            def answer(value: Any, last: bool, number: int = number) -> None:
                self.answers[number] = value

            self.service.submit({}, parameters, answer)
        self.service.loop.run_until_idle()
        return [self._read(self.answers[number]) for number in range(len(requests))]

    @staticmethod
    def _read(answer: Any) -> tuple[str, str]:
        if isinstance(answer, Exception):
            raise answer
        return answer["text_output"][0].decode(), answer["finish_reason"][0].decode()


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(folder, monkeypatch)


@pytest.mark.parametrize("name", SCHEMAS)
def test_guide_yields_only_valid_documents_from_random_logits(name: str, asked: Asked) -> None:
    """Greedy and sampled, several at once; answers cut off by max_tokens have that finish reason."""
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    guide = {"json_schema": schema if isinstance(schema, dict) else {}}
    requests = [{"guide": guide, **_sampled(seed)} for seed in range(3)]
    ended = 0
    for text, reason in asked.ask({"guide": guide}, *requests):
        if reason == "stop":
            validator.validate(json.loads(text))
            ended += 1
        else:
            assert name in ("anything", "additional", "recursion"), "what can go on for ever"
    assert ended or name == "anything"


@pytest.mark.skipif("JSON_SCHEMA_TEST_SUITE" not in os.environ, reason="JSON_SCHEMA_TEST_SUITE is not set: a checkout")
def test_guide_passes_the_json_schema_test_suite(asked: Asked) -> None:
    """Source of draft 2020-12's schemas: https://github.com/json-schema-org/JSON-Schema-Test-Suite."""
    files = sorted(Path(os.environ["JSON_SCHEMA_TEST_SUITE"], "tests", "draft2020-12").rglob("*.json"))
    groups = [group for file in files for group in json.loads(file.read_text())]
    counts: Counter[str] = Counter()
    for schema in (group["schema"] for group in groups if isinstance(group["schema"], dict)):
        try:
            answers = asked.ask(*({"guide": {"json_schema": schema}, **_sampled(seed, 200)} for seed in range(4)))
        except InputError:
            counts["refused"] += 1
            continue
        counts["kept to"] += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for document in (json.loads(text) for text, reason in answers if reason == "stop"):
            counts["documents"] += 1
            if not _has_classes(schema):
                validator.validate(document)
    print(dict(counts))
    assert counts["documents"] > counts["kept to"] > 0.4 * len(groups)


def _sampled(seed: int, tokens: int = 400) -> dict[str, Any]:
    return {"temperature": 1.0, "random_seed": seed, "max_tokens": tokens}


def _has_classes(schema: Mapping[str, Any]) -> bool:
    r"""Return True if a pattern has classes, such as \W and \p{Letter}, that the validator's Python reads otherwise."""
    return re.search(r"\\\\[pPwWdDsS]", json.dumps(schema)) is not None


@pytest.mark.parametrize(
    ("guide", "whole"),
    [
        ({"regex": "(yes|no), [a-f]{3,5}!"}, "(yes|no), [a-f]{3,5}!"),
        ({"choice": ["water", 'a "quoted" one', "freezes"]}, 'water|a "quoted" one|freezes'),
        ({"choice": ["é ü", "😀", "back\\slash", "a\tb", "c/d"]}, r"é ü|😀|back\\slash|a\tb|c/d"),
        ({"grammar": 'start: word (", " word)*\nword: "ice" | "steam"'}, "(ice|steam)(, (ice|steam))*"),
    ],
)
def test_guide_of_regex_grammar_and_choice(guide: dict[str, Any], whole: str, asked: Asked) -> None:
    requests = [{"guide": guide, **_sampled(seed)} for seed in range(4)]
    for text, reason in asked.ask(*requests):
        assert reason == "stop"
        assert re.fullmatch(whole, text)


def test_guide_follows_the_schema_of_each_tool_call(asked: Asked) -> None:
    """Regression: a reference to the first use of a repeated schema was resolved against the schema of the whole call.

    JavaScript libraries write such references; the schema of the whole call has a `name` too.
    """
    properties = {
        "name": {"enum": ["x", "y"]},
        "again": {"$ref": "#/properties/name"},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        "flag": {"$ref": "#/definitions/flag"},
        "node": {"$ref": "#/$defs/node"},
    }
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    parameters |= {"definitions": {"flag": {"type": "boolean"}}, "additionalProperties": False}
    schemas = {name: {**parameters, "$defs": {"node": {"const": name}}} for name in ("a", "b")}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": schema}})
        for name, schema in schemas.items()
    ]
    choices: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "b"}})
    for choice in choices:
        guide = {"guide": {"json_schema": call_schema(tools, choice)}}
        ended = [
            text for text, reason in asked.ask(*({**guide, **_sampled(seed)} for seed in range(4))) if reason == "stop"
        ]
        assert ended
        for text in ended:
            call = json.loads(text)
            jsonschema.validate(call["arguments"], schemas[call["name"]])


def test_guide_keeps_its_spaces(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint removes spaces before punctuation from its answers."""
    copy = Path(shutil.copytree(folder, tmp_path / "cleaned"))
    (copy / "serving.json").write_text(dump(replace(load_generation(copy), clean_up=True)))
    ((text, _),) = Asked(copy, monkeypatch).ask({"guide": {"regex": "(yes|no) , [a-f]{3,5} !"}})
    assert re.fullmatch("(yes|no) , [a-f]{3,5} !", text)


def test_guide_of_json_object_yields_an_object(asked: Asked) -> None:
    answers = asked.ask(*({"guide": {"json_object": True}, "temperature": 1.0, "random_seed": n} for n in range(8)))
    ended = [text for text, reason in answers if reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_guided_answer_does_not_change_other_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows, guided or not, greedy or sampled, get identical tokens."""
    guide = {"json_schema": SCHEMAS["an application's"]}
    kinds: list[dict[str, Any]] = [
        {"max_tokens": 60},
        {"max_tokens": 60, "temperature": 1.0, "random_seed": 3},
        {"max_tokens": 40, "temperature": 1.0, "random_seed": 4, "top_p": 0.9, "repetition_penalty": 1.3},
        {"guide": guide},
        {"guide": guide, "temperature": 1.0, "random_seed": 5},
        {"guide": guide, "temperature": 1.0, "random_seed": 5, "logprobs": 1},
    ]
    together = Asked(folder, monkeypatch, slots=6).ask(*kinds)
    assert together == [Asked(folder, monkeypatch).ask(kind)[0] for kind in kinds]
    assert together[4] == together[5]


def test_forced_tokens_need_no_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"const": {"a long name of a property": "and a long text that can only be this one"}}
    alone = Asked(folder, monkeypatch)
    ((text, reason),) = alone.ask({"guide": {"json_schema": schema}})
    assert json.loads(text) == schema["const"]
    assert reason == "stop"
    tokens = len(alone.service.tokenizer.encode(text).ids)
    assert tokens > 20
    assert len(alone.executor.calls) <= 2
    slow = Asked(folder, monkeypatch)
    ((again, _),) = slow.ask({"guide": {"json_schema": schema}, "logprobs": 0})
    assert again == text
    assert len(slow.executor.calls) >= tokens - 1, "log-probabilities take the logits of each"


def test_sequences_of_a_request_have_a_guide_each(asked: Asked) -> None:
    guide = {"json_schema": SCHEMAS["required"]}
    asked.ask({"guide": guide, "n": 3, "temperature": 1.0, "random_seed": 1})
    answer: Any = asked.answers[0]
    documents = [json.loads(text) for text in answer["text_output"]]
    for document in documents:
        jsonschema.validate(document, SCHEMAS["required"])
    assert len(asked.service.guides.compiled) == 1


REFUSED: Sequence[tuple[Any, str]] = [
    ({"json_schema": {"type": "nope"}}, "guide is refused: Invalid type: nope"),
    ({"json_schema": {"not": {"type": "string"}}}, r'guide is refused: Unimplemented keys: \["not"\]'),
    ({"regex": "(a"}, "unclosed group"),
    ({"grammar": "start: nothing"}, 'unknown name: "nothing"'),
    ({"choice": []}, "must be a list of texts"),
    ({"choice": ["a"], "regex": "b"}, "guide must be a JSON object with one of"),
    ({"json_object": False}, "guide must be a JSON object with one of"),
    ({"xml": "a"}, "guide must be a JSON object with one of"),
    ({"regex": "a\ud800"}, "half of one; send both"),
    ({"regex": "a" * MAX_GUIDE_LENGTH}, "characters; expected at most"),
]


@pytest.mark.parametrize(("guide", "message"), REFUSED)
def test_invalid_guide_is_refused_with_the_reason(guide: Any, message: str, asked: Asked) -> None:
    with pytest.raises(InputError, match=message):
        asked.ask({"guide": guide})
    assert asked.ask({"guide": {"choice": ["a"]}}) == [("a", "stop")]


@pytest.mark.parametrize("other", [{"min_tokens": 3}, {"ignore_eos": True}, {"num_beams": 2}])
def test_options_that_contradict_a_guide_are_refused(other: dict[str, Any], asked: Asked) -> None:
    with pytest.raises(InputError, match=f"guide and {next(iter(other))} contradict each other"):
        asked.ask({"guide": {"choice": ["a"]}, **other})


def test_guide_that_compiles_too_long_is_refused_in_time(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deciding whether thirty expressions can all match takes longer than any request may."""
    monkeypatch.setattr(guides_module, "CHECK_CPU_S", 1)
    monkeypatch.setattr(guides_module, "CHECK_TIMEOUT_S", 600)
    schema = {"type": "string", "allOf": [{"pattern": f"a.*b{number}.*c"} for number in range(30)]}
    with pytest.raises(InputError, match="takes more than 1 s or too much memory"):
        asked.ask({"guide": {"json_schema": schema}})


def test_guide_and_bans_without_a_token_fail_one_request(asked: Asked) -> None:
    tokenizer = asked.service.tokenizer
    bans = {str(tokenizer.token_to_id(letter)): -1e9 for letter in "ab"}
    requests: list[dict[str, Any]] = [
        {"guide": {"regex": "[ab]{3}"}, "bad_words": ["a", "b"], "logit_bias": json.dumps(bans)},
        {"max_tokens": 5},
    ]
    with pytest.raises(InputError, match="leaves no token that the other options"):
        asked.ask(*requests)
    answer: Any = asked.answers[1]
    assert answer["completion_tokens"] == [5]


def test_without_llguidance_only_guides_are_refused(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"install what build-repo's requirements\.txt pins"):
        asked.ask({"guide": {"choice": ["a"]}})
    assert asked.ask({"max_tokens": 3})[0][1] == "length"
