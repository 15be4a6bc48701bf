"""Answer from a table of tokens' vectors in the front's own process, with numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ...contract import ContractError, EncoderServing
from ..table import Table


class Executor:
    """Reads the table beside serving.json."""

    map_calls = map

    def __init__(self, folder: Path, serving: EncoderServing) -> None:
        if serving.model is None:
            raise ContractError("serving.json names no table. Build the model again")
        self.table = Table(folder / serving.model)
        (self.output,) = serving.outputs

    def infer(self, feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {self.output: self.table.embed(feeds["input_ids"], feeds["attention_mask"])}
