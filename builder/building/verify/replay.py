"""Repeat recorded calls on the engine that this interpreter finds first: python replay.py CALLS ANSWERS.

Run by runtimes.py in a process of its own, where another version of an engine comes before this build's. The engine's
own package opens the graph, builder/engines/*/replay.py, whose file each case names. Both files are pickles that the
build itself writes and reads. Needs numpy, the engine, and the emitted executors.
"""

import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np


def replay_graph(opener: Any, case: "dict[str, Any]") -> "list[Any]":
    """Repeat calls of one graph, each by itself."""
    infer = opener.open_graph(case)
    return [infer(feeds) for feeds in case["calls"]]


def replay_loop(opener: Any, case: "dict[str, Any]") -> "list[Any]":
    """Repeat calls of an emitted executor, in their order: a cache is filled and read again."""
    sys.path.append(case["builder"])
    from runtime.generation.executors.base import CallPart  # type: ignore[import-not-found]

    executor = opener.open_executor(case)
    answers = []
    for name, recorded in case["calls"]:
        arguments = (CallPart(*value) if isinstance(value, tuple) else value for value in recorded)
        answer = getattr(executor, name)(*arguments)
        answers.append(comparable(name, answer, executor.geometry.vocabulary))
    return answers


def comparable(name: str, answer: Any, vocabulary: int) -> Any:
    """Return the answer of `name` in the form that is compared, copied to new arrays.

    The most probable tokens become an array of the logits of all tokens, in which the others have the lowest of these:
    two tokens with equal logits may then change places.
    """
    if name == "likeliest":
        logits = np.repeat(answer.logits[:, -1:], vocabulary, axis=1)
        np.put_along_axis(logits, answer.tokens, answer.logits, axis=1)
        return [logits, np.array(answer.totals)]
    if name == "draft":
        return [np.array(answer.logits), np.array(answer.hidden_states)]
    return np.array(answer) if name == "run" else answer if name == "encode" else None


WAYS = {"graph": replay_graph, "loop": replay_loop}


def load_module(file: str) -> Any:
    """Return the module in `file`, which stands alone."""
    spec = importlib.util.spec_from_file_location("opener", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(calls: Path, answers: Path) -> None:
    """Write each case's answers, or the reason why it has none."""
    replies: list[list[Any] | str] = []
    for case in pickle.loads(calls.read_bytes()):
        try:
            replies.append(WAYS[case["way"]](load_module(case["opener"]), case))
        except Exception as error:
            replies.append(f"{type(error).__name__}: {error}")
    answers.write_bytes(pickle.dumps(replies))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
