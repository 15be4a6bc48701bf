"""The emitted files of every target, for a graph without weights: file names, and every config.pbtxt.

python -m tests.golden.repositories rewrites tests/golden/repositories/*.txt; read the difference before you commit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from builder.engines.placement import version_files
from builder.graphs.onnx.graph import Graph
from builder.options import make_spec
from builder.repository.config.render import render
from builder.repository.layout.encoder import lay_out, serving_document
from builder.runtime.fields import Field

FOLDER = Path(__file__).parent / "repositories"
TARGETS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cpu-bls": {"executor": "bls"},
    "cpu-openvino": {"engine": "openvino", "precision": "bf16"},
    "cpu-openvino-bls": {"engine": "openvino", "precision": "bf16", "executor": "bls"},
    "cuda": {"target": "cuda", "precision": "fp16", "gpu": {"devices": [0, 1], "memory_limit_mb": 2048}},
    "tensorrt": {"target": "tensorrt", "precision": "fp16", "gpu": {"cuda_graphs": True}},
    "tensorrt-onnxruntime": {"target": "tensorrt", "engine": "onnxruntime", "precision": "fp16"},
}
ENGINES = {"cpu-openvino": "openvino", "cpu-openvino-bls": "openvino", "tensorrt": "tensorrt"}


def graph(engine: str) -> Graph:
    """Return the signature of an encoder's graph."""
    inputs = ("input_ids", "attention_mask")
    operators = Counter[str]()
    return Graph(Path("nowhere/model.onnx"), inputs, ("features",), ((384,),), 20, 9, operators, 0, engine)


def repository(name: str) -> str:
    """Return the entries of one target as text."""
    spec = make_spec(model="org/encoder", max_batch_size=32, threads=1, **TARGETS[name])
    served = graph(ENGINES.get(name, "onnxruntime"))
    serving = serving_document(spec, "feature_extraction", served, 256, {"input_ids": 0}, {})
    fields = [Field("text_input", "TYPE_STRING")], [Field("embedding", "TYPE_FP32", (384,))]
    rows = [{"input_ids": [101, 7592, 102], "attention_mask": [1, 1, 1]}]
    files: dict[str, bytes | Path] = {"1/" + Path(served.path).name: b""}
    if served.engine == "tensorrt":
        files = {f"1/recipe/{file}": b"" for file in ("model.onnx", "recipe.json", "inputs.json", "compile.py")}
    elif served.engine == "openvino":
        files = {"1/model.xml": b"", "1/model.bin": b""}
    assert version_files(served) == {}, "a graph that is nowhere has no files"
    entries = lay_out(spec, serving, "{}", served, files, fields, rows)
    parts = []
    for entry in entries:
        parts.append(f"== {entry.name}: " + " ".join(sorted(entry.files)))
        parts.append(render(entry.config))
    return "\n".join(parts)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for target in TARGETS:
        (FOLDER / f"{target}.txt").write_text(repository(target))
