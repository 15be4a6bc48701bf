"""Run Echo in the front's own process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...contract import ContractError, EncoderServing, Session  # type: ignore[import-untyped]
from ...sessions import open_session  # type: ignore[import-untyped]


class Executor:
    """Executor of the graph beside serving.json."""

    map_calls = map

    def __init__(self, folder: Path, serving: EncoderServing) -> None:
        if serving.model is None or not isinstance(serving.session, Session):
            raise ContractError("serving.json names no graph for Echo in process. Build the model again")
        self.session = open_session(folder / serving.model, serving.session)
        self.outputs = list(serving.outputs)

    def infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return dict(zip(self.outputs, self.session.run(self.outputs, feeds), strict=True))
