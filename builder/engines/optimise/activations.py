"""Read values inside a graph on real inputs, for calibration, sensitivity and reconstruction.

Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnxruntime import InferenceSession

from builder.common.workplace import temporary_folder
from builder.engines.onnxruntime import open_session
from builder.graphs.onnx.graph import MODEL_FILE, save_graph

Feeds = Mapping[str, np.ndarray]
Opened = Callable[[Path, int], InferenceSession]  # of a file, with so many threads


def watch(
    model: onnx.ModelProto, names: Sequence[str], feeds: Sequence[Feeds], opened: Opened = open_session
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the tensors `names` of `model`, one mapping for each of `feeds`, as ONNX Runtime computes them.

    No other tensor is computed as an output.
    """
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted({*names}))
    with temporary_folder() as folder:
        session = opened(save_graph(watched, folder / MODEL_FILE).path, 0)
    outputs = list(dict.fromkeys(names))
    inputs = {value.name for value in session.get_inputs()}
    for feed in feeds:
        values = session.run(outputs, {name: np.asarray(feed[name]) for name in inputs})
        yield dict(zip(outputs, values, strict=True))
