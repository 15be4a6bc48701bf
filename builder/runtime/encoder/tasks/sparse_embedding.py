"""Embed texts sparsely: return the tokens of the vocabulary that matter to each text, with their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...fields import Field
from .. import task
from .feature_extraction import Task as FeatureExtraction
from .feature_extraction import text_inputs

NONE = -1  # fills rows that have fewer tokens than another row of the request


class Task(FeatureExtraction):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return text_inputs(parameters)

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("indices", "TYPE_INT32", (-1,)), Field("values", "TYPE_FP32", (-1,)))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        """Return indices in ascending order; rows with fewer than the longest end with -1 and the value 0."""
        reached = [np.flatnonzero(output["weights"] > 0) for output in outputs]
        shape = len(reached), max(1, *map(len, reached))
        indices, values = np.full(shape, NONE, np.int32), np.zeros(shape, np.float32)
        for row, (tokens, output) in enumerate(zip(reached, outputs)):
            indices[row, : len(tokens)], values[row, : len(tokens)] = tokens, output["weights"][tokens]
        return {"indices": indices, "values": values}
