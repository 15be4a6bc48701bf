"""Write entity_extraction.json: the gliner package's answers for seeded checkpoints.

Run in a separate environment, on checkpoints of this project:

    python -m tests.golden.checkpoints FOLDER                        # in .venv
    python tests/golden/make_entity_extraction.py FOLDER/gliner      # with gliner==0.2.29
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gliner import GLiNER  # type: ignore[import-not-found]  # of an environment of its own

LABELS = ["person", "location", "date"]
TEXTS = [
    "Mario Rossi moved from Turin to Boston last year to study marine biology.",
    "Anna Schmidt founded the company in Hamburg in 1998; it was sold to a Swedish bank.",
    "  Où était le café ?\tÀ Zürich \u2013 près de l'église (n°\u00a07)\n\U0001f600 naïve_test well-known  ",
    "東京タワーは1958年に完成した。",
    "Yes",
]
REQUESTS: list[dict[str, Any]] = [
    *({"text_input": text, "labels": LABELS} for text in TEXTS),
    {"text_input": TEXTS[0], "labels": ["place where somebody lives", "person", "person"], "threshold": 0.3},
    {"text_input": TEXTS[1], "labels": LABELS, "flat_ner": False},
    {"text_input": TEXTS[1], "labels": [*LABELS, "organisation"], "multi_label": True, "threshold": 0.4},
    {"text_input": TEXTS[2], "labels": ["städte"], "flat_ner": False, "multi_label": True, "threshold": 0.0},
    {"text_input": " ".join([TEXTS[0], TEXTS[1]] * 8), "labels": LABELS, "threshold": 0.8, "truncate": True},
]
NAMES = ("threshold", "flat_ner", "multi_label")


def main(folder: Path) -> None:
    golden: dict[str, Any] = {"gliner": version("gliner"), "cases": []}
    for checkpoint in sorted(path for path in folder.iterdir() if path.is_dir()):
        model = GLiNER.from_pretrained(str(checkpoint), strict=True, local_files_only=True)
        for number, request in enumerate(REQUESTS):
            options = {name: request[name] for name in NAMES if name in request}
            entities = model.predict_entities(request["text_input"], request["labels"], **options)
            answer = [[one["start"], one["end"], one["label"], round(one["score"], 6)] for one in entities]
            golden["cases"].append({"checkpoint": checkpoint.name, "request": number, "entities": answer})
    golden["requests"] = REQUESTS
    target = Path(__file__).with_name("entity_extraction.json")
    target.write_text(json.dumps(golden, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
