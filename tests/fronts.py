"""The emitted front over PyTorch instead of an exported graph, to test the emitted code without an export."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.building.verify.parity import batching_constraint
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tasks.base import encoder_task
from builder.checkpoints.tokenizer import tokenizer_json
from builder.common.tensors import to_tensors, to_values
from builder.graphs.export.encoder import task_graph
from builder.graphs.export.rows import padding_id, rows_of
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.layout.encoder import serving_document
from builder.runtime.contract import FILE, dump
from builder.runtime.encoder.pipeline import Pipeline


def front_over_pytorch(checkpoint: Checkpoint, spec: BuildSpec, folder: Path) -> Pipeline:
    """Return a Pipeline whose engine is the task's own module."""
    task = encoder_task(checkpoint.task)
    module = task_graph(checkpoint)
    graph = Graph(folder, module.inputs, module.outputs, (), 20, 9, Counter(), 0)
    pad = {"input_ids": padding_id(checkpoint)}
    needed = batching_constraint(module, rows_of(checkpoint), checkpoint.max_length)
    parameters = task.parameters(checkpoint)
    side = checkpoint.tokenizer.truncation_side
    serving = serving_document(spec, task.module, graph, checkpoint.max_length, pad, parameters, needed, side)
    (folder / FILE).write_text(dump(serving))
    (folder / "tokenizer.json").write_text(tokenizer_json(checkpoint.tokenizer))

    for name, contents in task.files(checkpoint).items():
        (folder / name).write_bytes(contents)

    def infer(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(feeds[name]) for name in module.inputs))
        return {name: output.numpy() for name, output in zip(module.outputs, outputs, strict=True)}

    return Pipeline(folder, infer)


def answers(pipeline: Pipeline, checkpoint: Checkpoint, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers to `samples`, all in one batch."""
    inputs, outputs = checkpoint.task.fields(pipeline.serving.parameters)
    result = []
    for answer in pipeline([to_tensors(sample, inputs) for sample in samples]):
        assert isinstance(answer, dict), answer
        result.extend(to_values(answer, outputs))
    return result
