"""Write information_extraction.json: the gliner2 package's answers for seeded checkpoints.

Run in a separate environment, on checkpoints of this project:

    python -m tests.golden.checkpoints FOLDER                             # in .venv
    python tests/golden/make_information_extraction.py FOLDER/gliner2     # with gliner2==2.1.0
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gliner2 import AutoExtractor, Schema  # type: ignore[import-not-found]  # of an environment of its own
from safetensors import safe_open

LABELS = ["person", "location", "date"]
TEXTS = [
    "Mario Rossi moved from Turin to Boston last year to study marine biology.",
    "Anna Schmidt founded the company in Hamburg in 1998; it was sold to a Swedish bank",
    "  Où était le café ?\tÀ Zürich \u2013 près de l'église (n°\u00a07)\n\U0001f600 naïve_test well-known  ",
    "東京タワーは1958年に完成した。 नमस्ते cafe\u0301",
    "Yes",
    "Write to Anna.Schmidt@example.com, @anna or see https://example.com/a?b=c",
]
DESCRIBED = {
    "person": {"description": "somebody's name", "threshold": 0.3},
    "city": "where people live",
    "date": {"dtype": "str"},
}
REQUESTS: list[dict[str, Any]] = [
    *({"text_input": text, "labels": LABELS} for text in TEXTS),
    {"text_input": TEXTS[0], "labels": ["place where somebody lives", "person", "person"], "threshold": 0.3},
    {"text_input": TEXTS[1], "schema": {"entities": DESCRIBED}, "threshold": 0.4},
    {"text_input": TEXTS[3], "labels": [f"type {number}" for number in range(40)], "threshold": 0.7},
    {"text_input": " ".join([TEXTS[0], TEXTS[1]] * 4), "labels": LABELS[:2], "threshold": 0.9},
]
CLASSES: list[dict[str, Any]] = [
    {"task": "sentiment", "labels": ["positive", "negative", "neutral"]},
    {"task": "topic", "labels": {"travel": "going somewhere", "money": "banks and companies"}, "multi_label": True},
    {
        **{"task": "aspects", "labels": ["price", "place", "time"], "multi_label": True, "cls_threshold": 0.2},
        **{"top_k": 2, "class_act": "softmax", "prompt": "what is it about?"},
        "examples": [["It was cheap.", "price"], ["It was red.", "colour"]],
    },
]
REQUESTS += [
    {"text_input": TEXTS[0], "schema": {"classifications": CLASSES}},
    {"text_input": TEXTS[3], "schema": {"entities": LABELS, "classifications": CLASSES[:2]}},
]
PERSON = {
    "fields": [
        {"name": "name", "dtype": "str", "description": "first and last name"},
        {"name": "places", "threshold": 0.3},
        {"name": "mood", "dtype": "str", "choices": ["Happy", "sad", "in between"]},
        {"name": "traits", "choices": ["Kind", "sad", "well-known"], "threshold": 0.2},
    ]
}
TRIP = {"fields": [{"name": "from"}, {"name": "to"}]}
REQUESTS += [
    {"text_input": TEXTS[0], "schema": {"relations": ["lives in", "works for"]}, "threshold": 0.2},
    {
        "text_input": TEXTS[1],
        "schema": {"relations": {"founded": "who founded what", "sold to": {"threshold": 0.1}, "near": {}}},
    },
    {"text_input": TEXTS[0], "schema": {"structures": {"person": PERSON}}, "threshold": 0.4},
    {
        "text_input": TEXTS[2],
        "schema": {
            "structures": {"person": PERSON, "trip": TRIP},
            "entities": DESCRIBED,
            "relations": ["lives in"],
            "classifications": CLASSES[:1],
        },
        "threshold": 0.7,
    },
]


def main(folder: Path) -> None:
    golden: dict[str, Any] = {"gliner2": version("gliner2"), "saved": {}, "cases": []}
    for checkpoint in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = AutoExtractor.from_pretrained(str(checkpoint))
        golden["saved"][checkpoint.name] = saved(model)
        for number, request in enumerate(REQUESTS):
            schema = (
                Schema.from_dict(request["schema"]) if "schema" in request else Schema().entities(request["labels"])
            )
            options = {"include_confidence": True, "include_spans": True, "threshold": request.get("threshold", 0.5)}
            answer = read(model.extract(request["text_input"], schema, **options), request)
            golden["cases"].append({"checkpoint": checkpoint.name, "request": number, **answer})
    golden["requests"] = REQUESTS
    target = Path(__file__).with_name("information_extraction.json")
    target.write_text(json.dumps(golden, ensure_ascii=False) + "\n")


def saved(model: Any) -> dict[str, Any]:
    """Return the files and the shapes of the weights that the library saves."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
        with safe_open(Path(folder, "model.safetensors"), "pt") as weights:
            shapes = {name: weights.get_slice(name).get_shape() for name in sorted(weights.keys())}
        return {"files": files, "weights": shapes}


def read(answer: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in the form of this project: of the text as it was sent, spans by their start, best class first.

    The library adds a full stop to a text without one, and the description to the name of a relation.
    """
    text, schema = request["text_input"], request.get("schema", {})
    entities = [
        {"label": label, **one}
        for label, found in (answer.get("entities") or {}).items()
        for one in value(found if isinstance(found, list) else [found] if found else [], text)
    ]
    classes = {}
    for task in schema.get("classifications", []):
        chosen = answer[task["task"]] if task.get("multi_label") else [answer[task["task"]]]
        scores = [{"label": one["label"], "score": round(one["confidence"], 6)} for one in chosen]
        classes[task["task"]] = sorted(scores, key=lambda one: -float(one["score"]))
    relations = [
        {"label": name, **{end: value(one[end], text) for end in ("head", "tail")}}
        for name in schema.get("relations", [])
        for key, found in answer["relation_extraction"].items()
        if key == name or key.startswith(f"{name}: ")
        for one in found
    ]
    structures = {
        name: [{field: value(one, text) for field, one in found.items()} for found in answer[name] or []]
        for name in schema.get("structures", {})
    }
    return {
        "entities": sorted(entities, key=lambda one: int(one["start"])),
        "classifications": classes,
        "relations": [one for one in relations if one["head"] and one["tail"]],
        "structures": {name: [one for one in found if any(one.values())] for name, found in structures.items()},
    }


def value(found: Any, text: str) -> Any:
    """Return the value of a field: its place in `text`, if it is a span, and its score."""
    if isinstance(found, list):
        return sorted(filter(None, (value(one, text) for one in found)), key=lambda one: int(one.get("start", 0)))
    if found is None or found.get("start", -1) >= len(text):
        return None
    score = round(found["confidence"], 6)
    if "start" not in found:
        return {"text": found["text"], "score": score}
    start, end = found["start"], min(found["end"], len(text))
    assert found["text"] in (text[start:end], f"{text[start:end]}.")
    return {"start": start, "end": end, "text": text[start:end], "score": score}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
