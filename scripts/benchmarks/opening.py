"""Time of each stage of opening a version of an encoder: python -m scripts.benchmarks.opening FOLDER FOLDER.

It opens the first version of a process and then another. It is a program of its own, so nothing is imported before.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from builder.runtime.shared.emitted import package_of


def opened(folders: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each stage, for the first and the later one."""
    figures = {}
    for which, folder in zip(("first", "later"), map(Path, folders), strict=True):
        times = [time.perf_counter()]
        package = package_of(folder)
        for module in ("encoder.front", "encoder.executors.onnxruntime"):
            importlib.import_module(f"{package}.{module}")
        times.append(time.perf_counter())
        contract = importlib.import_module(f"{package}.contract")
        serving = contract.load_encoder(folder)
        importlib.import_module(f"{package}.encoder.tasks.{serving.task}")
        times.append(time.perf_counter())
        text = importlib.import_module(f"{package}.encoder.text").TextEncoder(folder / "tokenizer.json", False)
        times.append(time.perf_counter())
        session = importlib.import_module(f"{package}.sessions").open_session(folder / serving.model, serving.session)
        times.append(time.perf_counter())
        numpy = importlib.import_module("numpy")  # the emitted Python has imported it
        for row in serving.warm_up:
            session.run(None, {name: numpy.array([row[name]], numpy.int64) for name in serving.inputs})
        times.append(time.perf_counter())
        del text, session
        names = ("imports", "serving.json", "tokeniser", "session", "first calls")
        figures[which] = {
            n: round(1000 * (b - a), 1) for n, (a, b) in zip(names, itertools.pairwise(times), strict=True)
        }
    return figures


if __name__ == "__main__":
    print(json.dumps(opened(sys.argv[1:])))
