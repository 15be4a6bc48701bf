"""Create the seeded checkpoints that golden answers belong to: python -m tests.golden.checkpoints FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from tests.extractors import GLINER2S, GLINERS, make_gliner, make_gliner2
from tests.tiny_encoders import SPECIAL, make_checkpoint

QUESTION_ANSWERING = ("bert", "roberta", "xlm-roberta")


def make_question_answering(folder: Path) -> None:
    """Create the checkpoints that answer questions, with the tokeniser files that an older transformers reads."""
    for model_type in QUESTION_ANSWERING:
        target = make_checkpoint(folder / model_type, model_type, "question-answering")
        names = AutoTokenizer.from_pretrained(target).model_input_names
        (target / "golden.json").write_text(json.dumps({**SPECIAL, "model_input_names": names}))


if __name__ == "__main__":
    make_question_answering(Path(sys.argv[1]) / "question-answering")
    for name, settings in GLINERS.items():
        make_gliner(Path(sys.argv[1]) / "gliner" / name, **settings)
    for name, settings in GLINER2S.items():
        make_gliner2(Path(sys.argv[1]) / "gliner2" / name, **settings)
