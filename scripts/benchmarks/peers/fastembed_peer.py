"""FastEmbed on an ONNX model: WORK.json FOLDER.

It runs in this process: it is a library, without a server. WORK has texts, threads and seconds; the output has
milliseconds per text alone and texts per second in sorted batches of 32.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType


def main() -> None:
    work, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    TextEmbedding.add_custom_model(
        model="m",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="local/m"),
        dim=size,
        model_file="onnx/model.onnx",
    )
    model = TextEmbedding("m", specific_model_path=str(folder), threads=work["threads"])
    texts = work["texts"]
    rates = {}
    for batch in (1, 32):
        ordered = texts if batch == 1 else sorted(texts, key=len)
        list(model.embed(ordered[:32], batch_size=batch))
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < work["seconds"]:
            index = done % len(ordered)
            done += len(list(model.embed(ordered[index : index + batch], batch_size=batch)))
        rates[batch] = done / (time.perf_counter() - start)
    print(json.dumps({"alone_ms": 1000 / rates[1], "batched_per_s": rates[32]}))


main()
