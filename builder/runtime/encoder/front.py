"""Open a whole front without Triton: one model's pipeline over the executor that its serving.json names.

A shared front imports this module, and transport.py, from the version folders of models that other versions of
build-repo may have built.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from ..contract import ContractError, load_encoder
from ..cpus import refuse_cpu
from .pipeline import Pipeline


def open_front(folder: Path) -> Pipeline:
    """Open the version in `folder` and warm it up. Raises ContractError, RuntimeError on the wrong CPU."""
    serving = load_encoder(folder)
    refuse_cpu(serving.not_on_cpus_with, serving.needs_cpus_with)
    if not Path(__file__).with_name("executors").joinpath(f"{serving.executor}.py").is_file():
        raise ContractError(f"serving.json.executor is {serving.executor!r}, which is not here. Build the model again")
    executor = importlib.import_module(f".executors.{serving.executor}", __package__).Executor(folder, serving)
    pipeline = Pipeline(folder, executor.infer, executor.map_calls, getattr(executor, "lora", None))
    pipeline.warm_up()
    return pipeline
