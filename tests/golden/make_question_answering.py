"""Write question_answering.json: the last question-answering pipeline's answers for seeded checkpoints.

transformers 5 has no question-answering pipeline. Run in a separate environment, on checkpoints of this project:

    python -m tests.golden.checkpoints FOLDER          # in .venv
    python tests/golden/make_question_answering.py FOLDER/question-answering

The second one with transformers==4.57.6, torch==2.13.0, numpy<2.
"""

import json
import sys
from pathlib import Path
from typing import Any

import transformers

LONG = (
    "The harbour was built in 1891 by two brothers from Bergen. For thirty years it served fishing boats only. "
    "In 1923 the railway reached the town, and the first ferry left for Aberdeen in the same summer. The ferry "
    "sank in a storm in 1931; all passengers were saved by the crew of a whaler. Today the harbour has a museum, "
    "a school for sailors and a small shipyard that repairs wooden boats from all over the north. "
) * 3
REQUESTS: list[dict[str, Any]] = [
    {"question": "Who built the harbour?", "context": "The harbour was built in 1891 by two brothers from Bergen."},
    {"question": "When?", "context": "The ferry sank in 1931.", "top_k": 4},
    {"question": "When?", "context": "The ferry sank in 1931.", "handle_impossible_answer": True, "top_k": 3},
    {"question": "What does the harbour have today?", "context": LONG},
    {"question": "What does the harbour have today?", "context": LONG, "top_k": 5, "max_answer_len": 4},
    {"question": "Who saved the passengers?", "context": LONG, "doc_stride": 20, "top_k": 3},
    {"question": "Who saved the passengers?", "context": LONG, "handle_impossible_answer": True, "top_k": 2},
    {"question": "Où était le café?", "context": "Le café était à Zürich – près de l'église.", "max_answer_len": 30},
]
MAX_LENGTH = 128


def main(folder: Path) -> None:
    golden = {"transformers": transformers.__version__, "max_length": MAX_LENGTH, "cases": []}
    for checkpoint in sorted(path for path in folder.iterdir() if path.is_dir()):
        settings = json.loads((checkpoint / "golden.json").read_text())
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(checkpoint / "tokenizer.json"), model_max_length=MAX_LENGTH, **settings
        )
        model = transformers.AutoModelForQuestionAnswering.from_pretrained(checkpoint).eval()
        pipeline = transformers.pipeline("question-answering", model=model, tokenizer=tokenizer, device="cpu")
        for request in REQUESTS:
            answers = pipeline(**request)
            answers = answers if isinstance(answers, list) else [answers]
            case = {"checkpoint": checkpoint.name, "request": request, "answers": answers}
            golden["cases"].append(case)
    target = Path(__file__).with_name("question_answering.json")
    target.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
