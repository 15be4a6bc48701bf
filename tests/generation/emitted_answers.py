"""Answers of emitted code in the interpreter that runs this: python emitted_answers.py REPOSITORY, JSON out.

Needs what builder/runtime/requirements.txt pins, nothing of this project; keeps to Python 3.10.
"""

import importlib
import json
import platform
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

GENERATING = ("writes", "speaks", "sums")
TEXT = "The team won the match in the last minute."


def text(value: str) -> "np.ndarray":
    return np.array([value.encode()], np.object_)


def emitted(repository: Path, name: str, module: str) -> Any:
    """Return a module of a version's folder, which is the package "1" as it is in Triton."""
    for known in [key for key in sys.modules if key.split(".")[0] == "1"]:
        del sys.modules[known]
    sys.path[0] = str(repository / name)
    return importlib.import_module(f"1.{module}")


def written(repository: Path, name: str) -> str:
    """Return the greedy answer of a decode loop."""
    service = emitted(repository, name, "generation.service").Service(repository / name / "1")
    done = threading.Event()
    answers: list[dict[str, np.ndarray] | Exception] = []

    def respond(answer: "dict[str, np.ndarray] | Exception", last: bool) -> None:
        answers.append(answer)
        if last:
            done.set()

    service.loop.start()
    try:
        service.submit({"text_input": text(TEXT)}, {"temperature": 0.0, "max_tokens": 12}, respond)
        assert done.wait(600)
    finally:
        service.loop.stop()
    texts = []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        texts.append(answer["text_output"][0].decode())
    return "".join(texts)


def scored(repository: Path, name: str) -> "list[float]":
    """Return every number of the answer of an encoder in process."""
    folder = repository / name / "1"
    pipeline = emitted(repository, name, "encoder.pipeline")
    serving = importlib.import_module("1.contract").load_encoder(folder)
    executor = importlib.import_module(f"1.encoder.executors.{serving.executor}").Executor(folder, serving)
    pipeline = pipeline.Pipeline(folder, executor.infer, executor.map_calls)
    (answer,) = pipeline([{"text_input": text(TEXT)[None]}])
    if isinstance(answer, Exception):
        raise answer
    return [float(v) for values in answer.values() if values.dtype != np.object_ for v in values.ravel()]


def main() -> None:
    repository = Path(sys.argv[1])
    answers = {
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "texts": {name: written(repository, name) for name in GENERATING},
        "scores": scored(repository, "topics"),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
