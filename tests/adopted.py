"""Models as other tools write them into a Triton repository, for tests of graphs that are adopted."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

TENSORS = """\
input {
  name: "input_input_ids"
  data_type: TYPE_INT64
  dims: -1
  dims: -1
}
input {
  name: "input_attention_mask"
  data_type: TYPE_INT64
  dims: -1
  dims: -1
}
output {
  name: "output_logits"
  data_type: TYPE_FP32
  dims: -1
  dims: 3
}
"""


def write_aitune(source: Path, repository: Path, name: str, weights: Sequence[Path] = ()) -> Path:
    """Return the folder of a model as `aitune.triton.publish()` writes it, for ONNX Runtime with TensorRT, unbatched.

    That module is in aitune's repository (read at commit 15fe25ae, model_repository.py, and 0bb4116c, config), but not
    in the wheel of aitune 0.6.0. A graph that has files of weights lies in a folder named model.onnx, with them.
    """
    model = repository / name
    version = model / "1"
    target = version / "model.onnx" / "model.onnx" if weights else version / "model.onnx"
    target.parent.mkdir(parents=True)
    shutil.copyfile(source, target)
    for file in weights:
        shutil.copyfile(file, target.parent / file.name)
    config = f'name: "{name}"\nplatform: "onnxruntime_onnx"\n{TENSORS}optimization {{\n  execution_accelerators {{\n'
    config += '    gpu_execution_accelerator {\n      name: "tensorrt"\n    }\n  }\n}\nmax_batch_size: 0\n'
    (model / "config.pbtxt").write_text(config)
    for search in ("fast", "manual"):  # of newer commits
        (model / "model_analyzer").mkdir(exist_ok=True)
        (model / "model_analyzer" / f"{search}.yaml").write_text("run_config_search_disable: true\n")
    return model


def write_navigator(source: Path, repository: Path, name: str) -> Path:
    """Return the folder of a model as Model Navigator's `add_model()` writes it with dynamic batching.

    Read at commit 04fc887c (model_navigator/triton/model_repository.py and model_config_generator.py).
    """
    model = repository / name
    (model / "1").mkdir(parents=True)
    shutil.copyfile(source, model / "1" / "model.onnx")
    tensors = TENSORS.replace("  dims: -1\n  dims", "  dims").replace('"input_', '"').replace('"output_', '"')
    config = f'name: "{name}"\nmax_batch_size: 16\n{tensors}instance_group {{\n  count: 1\n  kind: KIND_CPU\n}}\n'
    (model / "config.pbtxt").write_text(f'{config}dynamic_batching {{\n}}\nbackend: "onnxruntime"\n')
    return model
