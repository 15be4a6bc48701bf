"""Tables of tokens' vectors, which numpy reads: written in a precision, and described as a graph."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np

from builder.common.engines import ENGINES
from builder.graphs.onnx.graph import Graph
from builder.runtime.encoder.table import FILE, ROWS, SCALES, SCHEMA, TableSettings

BACKEND = "numpy"
assert ENGINES[BACKEND].model_file == FILE
HIGHEST = 127  # of the whole numbers of a row in int8


def write_table(rows: np.ndarray, settings: TableSettings, folder: Path, precision: str) -> Graph:
    """Write `rows` (tokens, size), float32, into `folder` in fp32, fp16 or int8, and return them as a graph.

    In int8 each row has a scale of its own, so that its largest number becomes 127 or -127.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(settings)}), "utf-8")
    if precision == "int8":
        largest = np.abs(rows).max(axis=1)
        scales = np.where(largest > 0, largest / HIGHEST, 1).astype(np.float32)
        np.save(folder / SCALES, scales)
        stored = np.rint(rows / scales[:, None]).astype(np.int8)
    else:
        stored = rows.astype({"fp32": np.float32, "fp16": np.float16}[precision], copy=False)
    np.save(folder / ROWS, np.ascontiguousarray(stored))
    size = sum((folder / name).stat().st_size for name in (ROWS, SCALES) if (folder / name).is_file())
    inputs, outputs = ("input_ids", "attention_mask"), ("features",)
    return Graph(path, inputs, outputs, ((settings.dimensions,),), 0, 0, Counter(), size, BACKEND)
