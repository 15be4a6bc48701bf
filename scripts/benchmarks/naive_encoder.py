"""An encoder as tutorials deploy it: transformers' tokeniser and an unfused graph, joined by an ensemble."""

from __future__ import annotations

import shutil
from pathlib import Path

from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks.base import encoder_task
from builder.common.machine import available_cores
from builder.graphs.export.attention import UNFUSED
from builder.graphs.export.encoder import export_module
from builder.graphs.export.rows import rows_of
from builder.options import make_spec


def naive_repository(folder: Path, repository: Path, real: bool) -> Path:
    """Write a tokeniser, an fp32 ONNX graph of small operators and an ensemble, all with max_batch_size 0."""
    spec = make_spec(model=str(folder), task="feature-extraction", name="encoder", pooling=None if real else "mean")
    checkpoint = resolve(spec)
    names = [
        n for n in checkpoint.tokenizer.model_input_names if n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    if checkpoint.config.model_type == "distilbert":
        names = [n for n in names if n != "token_type_ids"]
        checkpoint.tokenizer.model_input_names = names
    module = encoder_task(checkpoint.task).graph(checkpoint, tuple(names))
    module.model.set_attn_implementation(UNFUSED)
    engine = repository / "encoder_model" / "1"
    front = repository / "encoder_tokenize" / "1"
    for path in (engine, front, repository / "encoder" / "1"):
        path.mkdir(parents=True)
    export_module(module, rows_of(checkpoint), engine / "model.onnx")
    size = checkpoint.config.hidden_size
    checkpoint.tokenizer.save_pretrained(front)
    shutil.copy(Path(__file__).with_name("naive_tokenizer.py"), front / "model.py")
    tokens = "".join(f'{{kind}} {{{{ name: "{n}" data_type: TYPE_INT64 dims: [ -1, -1 ] }}}}\n' for n in names)
    threads = f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{available_cores()}" }} }}'
    output = f'output {{ name: "features" data_type: TYPE_FP32 dims: [ -1, {size} ] }}'
    text = 'input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }'
    group = "max_batch_size: 0\ninstance_group { count: 1 kind: KIND_CPU }"
    (engine.parent / "config.pbtxt").write_text(
        f'backend: "onnxruntime"\n{group}\n{tokens.format(kind="input")}{output}\n{threads}\n'
    )
    (front.parent / "config.pbtxt").write_text(f'backend: "python"\n{group}\n{text}\n{tokens.format(kind="output")}')
    maps = {
        kind: "".join(f'{kind} {{ key: "{n}" value: "{n}" }} ' for n in names) for kind in ("input_map", "output_map")
    }
    (repository / "encoder" / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 0\n{text}\n{output}\nensemble_scheduling {{\n'
        f'step {{ model_name: "encoder_tokenize" model_version: -1 input_map {{ key: "TEXT" value: "TEXT" }} '
        f"{maps['output_map']} }}\n"
        f'step {{ model_name: "encoder_model" model_version: -1 {maps["input_map"]} '
        'output_map { key: "features" value: "features" } }\n}\n'
    )
    return repository
