"""Run ONNX Runtime in the front's own process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...contract import ContractError, EncoderServing, Session
from ...lora import LoraStacks
from ...sessions import open_session


class Executor:
    """Runs the graph beside serving.json."""

    map_calls = map

    def __init__(self, folder: Path, serving: EncoderServing) -> None:
        if serving.model is None or not isinstance(serving.session, Session):
            raise ContractError("serving.json names no graph for ONNX Runtime in process. Build the model again")
        self.session = open_session(folder / serving.model, serving.session)
        self.lora = LoraStacks.of((value.name, value.shape) for value in self.session.get_inputs())
        self.outputs = list(serving.outputs)

    def infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        inputs = feeds if self.lora is None else self.lora.beside(feeds)
        return dict(zip(self.outputs, self.session.run(self.outputs, inputs)))
