"""Write model2vec.json: the answers of model2vec, which is not installed with the project, to seeded checkpoints.

python -m tests.golden.static_checkpoints FOLDER          # in .venv
python tests/golden/make_model2vec.py FOLDER     # with model2vec==0.10.0
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from model2vec import StaticModel  # type: ignore[import-not-found]  # of another environment

TEXTS = [
    "the train leaves at nine",
    "Zürich 東京 – the naïve 🚆 café",
    "🚆",
    "\u200b",
    "the museum is closed on monday, the train leaves at nine and the soup of the day needs a little salt",
]


def main(folder: Path) -> None:
    golden: dict[str, Any] = {"model2vec": importlib.metadata.version("model2vec"), "texts": TEXTS, "embeddings": {}}
    for checkpoint in sorted(path for path in folder.iterdir() if path.is_dir()):
        vectors = StaticModel.from_pretrained(checkpoint).encode(TEXTS)
        golden["embeddings"][checkpoint.name] = [[round(float(value), 7) for value in vector] for vector in vectors]
    Path(__file__).with_name("model2vec.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
