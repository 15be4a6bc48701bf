"""Open a whole front without Triton: one model's pipeline over the executor that its serving.json names.

A shared front imports this module, and transport.py, from the version folders of models that other versions of
build-repo may have built.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from pathlib import Path

from ..contract import ContractError, load_encoder
from .pipeline import Pipeline


def refuse_cpu(rounding: Collection[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise RuntimeError on a CPU that has one of the instruction sets `rounding`.

    There the engine would multiply in fewer bits than the answers were verified in.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    present = sorted(flags & set(rounding))
    if present:
        raise RuntimeError(
            f"this CPU has {', '.join(present)}: OpenVINO would multiply in bf16, and this model was verified in fp32. "
            "Build it on a CPU like this one, or with --engine onnxruntime"
        )


def open_front(folder: Path) -> Pipeline:
    """Open the version in `folder` and warm it up. Raises ContractError, RuntimeError on the wrong CPU."""
    serving = load_encoder(folder)
    refuse_cpu(serving.not_on_cpus_with)
    if not Path(__file__).with_name("executors").joinpath(f"{serving.executor}.py").is_file():
        raise ContractError(f"serving.json.executor is {serving.executor!r}, which is not here. Build the model again")
    executor = importlib.import_module(f".executors.{serving.executor}", __package__).Executor(folder, serving)
    pipeline = Pipeline(folder, executor.infer, executor.map_calls)
    pipeline.warm_up()
    return pipeline
