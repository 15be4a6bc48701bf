"""Run Echo in the front's own process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime

from ...contract import EncoderServing  # type: ignore[import-untyped]


class Executor:
    """Executor of the graph beside serving.json."""

    map_calls = map

    def __init__(self, folder: Path, serving: EncoderServing) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / str(serving.model)))
        self.outputs = list(serving.outputs)

    def infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return dict(zip(self.outputs, self.session.run(self.outputs, feeds), strict=True))
