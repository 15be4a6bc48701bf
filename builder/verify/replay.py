"""Make recorded calls again on the engine that this interpreter finds first: python replay.py CALLS ANSWERS.

Run by runtimes.py in a process of its own, where another version of ONNX Runtime or OpenVINO comes before this build's.
Both files are pickles that the build itself writes and reads. Needs numpy, the engine, and the emitted executors.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np


def graph(case: "dict[str, Any]") -> "list[Any]":
    """Calls of one graph, as Triton's ONNX Runtime backend makes them: all optimisations, one thread."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = case["threads"]
    session = onnxruntime.InferenceSession(case["model"], options, providers=["CPUExecutionProvider"])
    return [dict(zip(case["outputs"], session.run(case["outputs"], feeds), strict=True)) for feeds in case["calls"]]


def representation(case: "dict[str, Any]") -> "list[Any]":
    """Calls of a model of OpenVINO."""
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": case["threads"]}
    if case["arithmetic"] == "bf16":  # Triton's backend can be told nothing else
        settings["INFERENCE_PRECISION_HINT"] = "bf16"
    request = core.compile_model(core.read_model(case["model"]), "CPU", settings).create_infer_request()
    found = []
    for feeds in case["calls"]:
        request.infer(feeds)
        found.append({name: request.get_tensor(name).data.copy() for name in case["outputs"]})
    return found


def loop(case: "dict[str, Any]") -> "list[Any]":
    """Calls of an emitted executor, in their order: a cache is filled and read again."""
    sys.path.append(case["builder"])
    import onnxruntime
    from runtime.contract import Session  # type: ignore[import-not-found]
    from runtime.generation.executors.base import CrossGeometry, Geometry  # type: ignore[import-not-found]
    from runtime.generation.executors.bls import Bls  # type: ignore[import-not-found]
    from runtime.generation.executors.cross_attending import CrossAttending  # type: ignore[import-not-found]
    from runtime.generation.executors.in_process import InProcess  # type: ignore[import-not-found]

    onnxruntime.set_default_logger_severity(4)
    geometry = Geometry(**case["geometry"])
    executor: Any
    if case["kind"] == "bls":
        session = onnxruntime.InferenceSession(case["models"][0], providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        inputs = [value.name for value in session.get_inputs()]

        def infer(feeds: "dict[str, np.ndarray]") -> "dict[str, np.ndarray]":
            return dict(zip(names, session.run(names, feeds), strict=True))

        executor = Bls(infer, inputs, geometry)
    elif case["kind"] == "openvino":
        from runtime.generation.executors.openvino import OpenVino  # type: ignore[import-not-found]

        options = Session(engine="openvino", threads=case["threads"], entries=case["properties"])
        executor = OpenVino(Path(case["models"][0]), geometry, options)
    else:
        paths, options = map(Path, case["models"]), Session(threads=case["threads"])
        if case["cross"] is None:
            executor = InProcess(*paths, geometry, options)
        else:
            executor = CrossAttending(*paths, geometry, CrossGeometry(**case["cross"]), options)
    found = []
    for name, arguments in case["calls"]:
        answer = getattr(executor, name)(*arguments)
        found.append(np.array(answer) if name == "run" else answer if name == "encode" else None)
    return found


WAYS = {"graph": graph, "representation": representation, "loop": loop}


def main(calls: Path, answers: Path) -> None:
    """Each case's answers, or in words why it has none."""
    found: list[list[Any] | str] = []
    for case in pickle.loads(calls.read_bytes()):
        try:
            found.append(WAYS[case["way"]](case))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    answers.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
