"""Read what a request asks of a text, and write it in front of the text as GLiNER2 does.

Knows requests and words; knows nothing about tokens or engines. Sources: gliner2 2.1.0, inference/schema_model.py (the
form of a request), processor.py (SchemaTransformer).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..fields import JSON_TYPES, InputError

PROMPT, SEPARATOR, TEXT = "[P]", "[SEP_STRUCT]", "[SEP_TEXT]"
DESCRIPTION, EXAMPLE, ANSWER = "[DESCRIPTION]", "[EXAMPLE]", "[OUTPUT]"
STRUCTURE, ENTITIES, RELATION, CLASSIFICATION = "[C]", "[E]", "[R]", "[L]"  # kinds of parts, by their markers
MARKERS = (PROMPT, SEPARATOR, TEXT, DESCRIPTION, EXAMPLE, ANSWER, STRUCTURE, ENTITIES, RELATION, CLASSIFICATION)
ACTIVATIONS = ("auto", "sigmoid", "softmax")
PARTS = ("structures", "entities", "relations", "classifications")  # of a schema, in their order before the text
THRESHOLD = 0.5


@dataclass(frozen=True)
class Label:
    """An entity type, field, end of a relation or class.

    `threshold`: None for the request's. `choices`: the values of a field, if it names them.
    """

    name: str
    threshold: float | None = None
    only_best: bool = False
    choices: "tuple[str, ...]" = ()


@dataclass(frozen=True)
class Part:
    """Entity types, or one relation, structure or classification.

    `threshold`: of classes. `prompt`: its name, with descriptions and examples.
    """

    kind: str
    name: str
    prompt: str
    labels: "tuple[Label, ...]"
    multi_label: bool = False
    threshold: float = THRESHOLD
    top_k: int | None = None
    activation: str = "auto"


@dataclass
class Layout:
    """Words before a text, and the numbers of those that are markers, in the order of the schema's parts.

    `values`: words after them, of fields with choices. `prompts`: of parts that find spans. `labels`: of entity types.
    """

    words: "list[str]" = field(default_factory=list)
    values: "list[str]" = field(default_factory=list)
    prompts: "list[int]" = field(default_factory=list)
    labels: "list[int]" = field(default_factory=list)
    fields: "list[int]" = field(default_factory=list)
    choices: "list[int]" = field(default_factory=list)


def lay_out(parts: "Sequence[Part]") -> Layout:
    """Return the words of a schema."""
    layout = Layout()
    places = {ENTITIES: layout.labels, CLASSIFICATION: layout.choices}
    for part in parts:
        if layout.words:
            layout.words.append(SEPARATOR)
        if part.kind != CLASSIFICATION:
            layout.prompts.append(len(layout.words) + 1)
        layout.words += ["(", PROMPT, part.prompt, "("]
        for label in part.labels:
            places.get(part.kind, layout.fields).append(len(layout.words))
            layout.words += [part.kind, label.name]
        layout.words += [")", ")"]
        layout.values += _values(part)
    layout.words.append(TEXT)
    return layout


def _values(part: Part) -> "list[str]":
    """Return the words of a structure's fields with choices."""
    words: "list[str]" = []
    for label in part.labels:
        if label.choices:
            listed = [word for choice in label.choices for word in ("|", choice)][1:]
            words += [*([","] if words else []), label.name, "(", *listed, ")"]
    return ["(", f"{part.name}:", *words, ")"] if words else []


def entity_types(labels: "Sequence[str]") -> "list[Part]":
    """Return the schema that looks for entities of these types."""
    return [_entities({label: {} for label in labels}, "labels")]


def read_schema(document: str, where: str) -> "list[Part]":
    """Return the parts of a schema, a JSON object. `where`: its name in errors. Raises InputError."""
    try:
        schema = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from error
    schema = _mapping(schema, where, PARTS)
    found: "list[Part]" = []
    if "structures" in schema:
        found += [_structure(name, *one) for name, one in _each(schema["structures"], f"{where}.structures").items()]
    if "entities" in schema:
        found.append(_entities(_named(schema["entities"], f"{where}.entities"), f"{where}.entities"))
    if "relations" in schema:
        named = _named(schema["relations"], f"{where}.relations")
        found += [_relation(name, value, f"{where}.relations.{name}") for name, value in named.items()]
    if "classifications" in schema:
        listed = _list(schema["classifications"], f"{where}.classifications")
        found += [_classification(value, f"{where}.classifications[{at}]") for at, value in enumerate(listed)]
        _refuse_equal([part.name for part in found if part.kind == CLASSIFICATION], f"{where}.classifications")
    if not found:
        raise InputError(f"{where} is empty; expected one or more of {', '.join(PARTS)}")
    return found


def _entities(named: "Mapping[str, Any]", where: str) -> Part:
    labels, descriptions = [], {}
    for name, value in named.items():
        own = f"{where}.{name}"
        value = _mapping(value, own, ("description", "dtype", "threshold"))
        labels.append(Label(name, _share(value, "threshold", own), _only_best(value, own)))
        if value.get("description") is not None:
            descriptions[name] = _text(value["description"], f"{own}.description", True)
    return Part(ENTITIES, "entities", f"entities{_described(descriptions)}", tuple(labels))


def _relation(name: str, value: Any, where: str) -> Part:
    value = _mapping(value, where, ("description", "threshold"))
    threshold = _share(value, "threshold", where)
    described = _text(value.get("description") or "", f"{where}.description", True)
    ends = tuple(Label(end, threshold, True) for end in ("head", "tail"))
    return Part(RELATION, name, f"{name}: {described}" if described else name, ends)


def _structure(name: str, value: Any, where: str) -> Part:
    fields, descriptions = [], {}
    for at, one in enumerate(_list(_mapping(value, where, ("fields",)).get("fields"), f"{where}.fields")):
        own = f"{where}.fields[{at}]"
        one = _mapping(one, own, ("name", "dtype", "choices", "description", "threshold"))
        choices = _texts(one["choices"], f"{own}.choices") if one.get("choices") is not None else ()
        _refuse_equal([choice.lower() for choice in choices], f"{own}.choices")  # by which their scores are found
        label = _text(one.get("name"), f"{own}.name")
        fields.append(Label(label, _share(one, "threshold", own), _only_best(one, own), tuple(choices)))
        if one.get("description"):
            descriptions[label] = _text(one["description"], f"{own}.description")
    _refuse_equal([label.name for label in fields], f"{where}.fields")
    return Part(STRUCTURE, name, f"{name}{_described(descriptions)}", tuple(fields))


def _classification(value: Any, where: str) -> Part:
    known = ("task", "labels", "multi_label", "cls_threshold", "top_k", "class_act", "prompt", "examples")
    value = _mapping(value, where, known)
    name, labels = _text(value.get("task"), f"{where}.task"), value.get("labels")
    descriptions: "dict[str, str]" = {}
    if isinstance(labels, dict):
        descriptions = {label: _text(one, f"{where}.labels.{label}", True) for label, one in labels.items()}
    names = _texts(list(descriptions) or labels, f"{where}.labels")
    if len(names) < 2:
        raise InputError(f"{where}.labels has one label; expected at least two")
    multi_label, top_k = value.get("multi_label", False), value.get("top_k")
    activation = value.get("class_act") or ACTIVATIONS[0]
    if not isinstance(multi_label, bool):
        raise InputError(f"{where}.multi_label is {_short(multi_label)}; expected true or false")
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise InputError(f"{where}.top_k is {_short(top_k)}; expected a number from 1 on")
    if activation not in ACTIVATIONS:
        raise InputError(f"{where}.class_act is {_short(activation)}; expected one of {', '.join(ACTIVATIONS)}")
    question = _text(value.get("prompt") or "", f"{where}.prompt", True)
    examples = _list(value["examples"], f"{where}.examples", 0) if value.get("examples") is not None else []
    prompt, different = (f"{name}: {question}" if question else name) + _described(descriptions), set(names)
    for at, example in enumerate(examples):
        pair = _texts(example, f"{where}.examples[{at}]", False)
        if len(pair) != 2:
            raise InputError(f"{where}.examples[{at}] has {len(pair)} texts; expected a text and its label")
        prompt += f" {EXAMPLE} {pair[0]} {ANSWER} {pair[1]}" if pair[1] in different else ""
    threshold = _share(value, "cls_threshold", where)
    return Part(
        CLASSIFICATION,
        name,
        prompt,
        tuple(Label(label) for label in names),
        multi_label,
        THRESHOLD if threshold is None else threshold,
        top_k,
        activation,
    )


def _described(descriptions: "Mapping[str, str]") -> str:
    return "".join(f" {DESCRIPTION} {label}: {text}" for label, text in descriptions.items())


def _named(value: Any, where: str) -> "dict[str, Any]":
    """Return the settings of each name: of a list of names, or of an object of descriptions or settings."""
    if isinstance(value, list):
        return {name: {} for name in _texts(value, where)}
    if not isinstance(value, dict) or not value:
        raise InputError(f"{where} is {_short(value)}; expected a list of names, or an object of their descriptions")
    return {_text(name, where): {"description": one} if isinstance(one, str) else one for name, one in value.items()}


def _each(value: Any, where: str) -> "dict[str, tuple[Any, str]]":
    """Return the value of each name and where it is."""
    if not isinstance(value, dict) or not value:
        raise InputError(f"{where} is {_short(value)}; expected an object of names and their fields")
    return {_text(name, where): (one, f"{where}.{name}") for name, one in value.items()}


def _mapping(value: Any, where: str, known: "Sequence[str]") -> "dict[str, Any]":
    if not isinstance(value, dict):
        raise InputError(f"{where} is {_short(value)}; expected an object of {', '.join(known)}")
    for name in value:
        if name not in known:
            raise InputError(f"{where} has {name[:100]!r}, which is not supported; known are {', '.join(known)}")
    return value


def _list(value: Any, where: str, least: int = 1) -> "list[Any]":
    if not isinstance(value, list) or len(value) < least:
        raise InputError(f"{where} is {_short(value)}; expected a list" + (" that is not empty" if least else ""))
    return value


def _texts(value: Any, where: str, different: bool = True) -> "list[str]":
    texts = [_text(one, f"{where}[{at}]") for at, one in enumerate(_list(value, where))]
    if different:
        _refuse_equal(texts, where)
    return texts


def _text(value: Any, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise InputError(f"{where} is {_short(value)}; expected a text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell it
        raise InputError(f"{where} has half of a surrogate pair, which is not a character") from error
    return value


def _refuse_equal(names: "Sequence[str]", where: str) -> None:
    seen: "set[str]" = set()
    for name in names:
        if name in seen:
            raise InputError(f"{where} names {name[:100]!r} twice")
        seen.add(name)


def _share(value: "Mapping[str, Any]", name: str, where: str) -> "float | None":
    """Return a number from 0 to 1, or None."""
    share = value.get(name)
    if share is None:
        return None
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
        raise InputError(f"{where}.{name} is {_short(share)}; expected a score from 0 to 1")
    return float(share)


def _only_best(value: "Mapping[str, Any]", where: str) -> bool:
    kind = value.get("dtype") or "list"
    if kind not in ("list", "str"):
        raise InputError(f"{where}.dtype is {_short(kind)}; expected list (all) or str (the best one)")
    return bool(kind == "str")


def _short(value: Any) -> str:
    """Return a value for a message: itself, or its type if it is long."""
    written = json.dumps(value, ensure_ascii=False)
    return written if len(written) <= 100 else f"a long {JSON_TYPES[type(value)]}"
