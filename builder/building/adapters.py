"""Add a LoRA adapter to a published model: read it, compare its answers with PyTorch's, write it beside the versions.

The served graph runs with the adapter in its stacks; PyTorch runs the checkpoint with the adapter merged into
its matrices.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from builder.building.families.decoder import sample_rows
from builder.building.verify.generation import DecoderAgreement, make_reference, measure, refuse_wrong_probabilities
from builder.building.verify.parity import TOLERANCE, error_at, usual_references
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.linear_layers import LinearLayer
from builder.checkpoints.lora import LoraAdapter, merged, read_lora
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tasks import find_task
from builder.checkpoints.tasks.base import encoder_task
from builder.common.errors import CheckpointError, RepositoryError, VerificationError
from builder.common.machine import working_cores
from builder.engines.decoding import Executors, opened
from builder.engines.onnxruntime import signature
from builder.graphs.export.encoder import task_graph
from builder.graphs.export.rows import rows_of
from builder.graphs.onnx.graph import read_graph
from builder.options import make_spec
from builder.repository.adapters import AboutAdapter, adaptable_version, write_adapter
from builder.repository.report.record import BuildReport, read_report
from builder.runtime.contract import EncoderServing, GenerationServing, Serving
from builder.runtime.encoder.executors import onnxruntime as encoding
from builder.runtime.generation.executors.base import Executor, Geometry
from builder.runtime.lora import LORA_A, LORA_B, LORA_HEAD, LORA_ROWS, Adapter

FP32 = "fp32"  # the variant whose probabilities are PyTorch's


def add_adapter(repository: Path, model: str, name: str, source: str, base: str | None = None) -> AboutAdapter:
    """Add the adapter of the folder or Hub id `source` to `model`, or replace its adapter `name`.

    `base`: the checkpoint that the model was built from; None: the Hub id that its build.json names. If neither is
    at hand, a classifier's adapter is refused, others are compared with nothing, and `verified` of the result is None.
    Raises CheckpointError, RepositoryError, and VerificationError for wrong answers; nothing is written then.
    """
    folder, serving = adaptable_version(repository, model)
    assert serving.model is not None
    layers, heads, max_rank = _adaptable_layers(folder / serving.model)
    if not layers:
        raise RepositoryError(f"{model} takes no adapters: they can change none of its layers")
    report = read_report(repository / model, folder.name)
    adapter = read_lora(source, layers, max_rank, find_task(report.task).unused_weights, heads)
    matrices = matrices_by_input(adapter)
    about = AboutAdapter(adapter.source, adapter.revision, adapter.sha256, adapter.base, adapter.rank)
    checkpoint = _base(report, serving, base, heads)
    parameters: dict[str, Any] = {}
    if heads:
        if checkpoint is None:
            raise CheckpointError(
                f"an adapter of {model}, a classifier, is read with its checkpoint: name that with --base"
            )
        own, parameters = _own_head(checkpoint, adapter, heads)
        matrices |= own
    if checkpoint is not None:
        served = Adapter(name, "", matrices, parameters)
        about = replace(about, verified=f"{checkpoint.source} in PyTorch, with the adapter merged")
        if isinstance(serving, EncoderServing):
            about = replace(about, error=_encoder_error(folder, serving, checkpoint, adapter, served))
        else:
            agreement = _compare(folder / serving.model, serving, checkpoint, adapter, served)
            _refuse_wrong(agreement, report, serving)
            about = replace(about, error=agreement.error, agreement=agreement.mean)
    write_adapter(repository, model, name, matrices, about, parameters)
    return about


def _adaptable_layers(graph: Path) -> tuple[dict[str, LinearLayer], dict[str, LinearLayer], int]:
    """Return the layers of a graph that adapters may change, those of a head, and the highest rank that these take."""
    stacks = {name: tensor.shape for name, tensor in signature(graph).inputs.items()}
    names = [name.removeprefix(LORA_A) for name in stacks if name.startswith(LORA_A)]
    layers = {name: LinearLayer(stacks[f"{LORA_A}{name}"][1], stacks[f"{LORA_B}{name}"][2]) for name in names}
    heads = {
        name.removeprefix(LORA_HEAD): LinearLayer(shape[1] - 1, shape[2])
        for name, shape in stacks.items()
        if name.startswith(LORA_HEAD)
    }
    return layers, heads, min((stacks[f"{LORA_A}{name}"][2] for name in names), default=0)


def matrices_by_input(adapter: LoraAdapter) -> dict[str, np.ndarray]:
    """Return the matrices as the graph's stacks have them, the scale in B."""
    matrices = {}
    for name, layer in adapter.layers.items():
        matrices[f"{LORA_A}{name}"] = np.ascontiguousarray(layer.a.T)
        matrices[f"{LORA_B}{name}"] = np.ascontiguousarray(layer.b.T * np.float32(layer.scale))
    return matrices


def _own_head(
    checkpoint: Checkpoint, adapter: LoraAdapter, heads: Collection[str]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the layers `heads` as the graph's stacks have them, and the parameters of the task with their labels.

    Layers that the adapter lacks are the checkpoint's. Labels without names get those of the checkpoint if it has as
    many, or else LABEL_0 and so on, as in transformers. Raises CheckpointError for a head that is incomplete.
    """
    untrained = [name for name in heads if checkpoint.headless and f"{name}.weight" not in adapter.head]
    if untrained:
        raise CheckpointError(
            f"neither {adapter.source} nor {checkpoint.source} has the weights of {untrained[0]}: train the adapter "
            f"with modules_to_save={json.dumps([untrained[0].split('.')[0]])}"
        )
    parameters = checkpoint.model.state_dict().items()
    values = {name: tensor.numpy() for name, tensor in parameters if name.rpartition(".")[0] in heads}
    values.update(adapter.head)
    matrices, config = {}, deepcopy(checkpoint.config)
    for name in heads:
        weight = values[f"{name}.weight"]
        bias = values.get(f"{name}.bias", np.zeros(len(weight), np.float32))
        if len(bias) != len(weight):
            raise CheckpointError(f"{adapter.source} has {len(weight)} labels, and {len(bias)} in {name}.bias")
        matrices[f"{LORA_HEAD}{name}"] = np.vstack([weight.T, bias])
    config.num_labels = len(bias)
    config.update(adapter.labels)
    own = replace(checkpoint, config=config, head_size=len(bias))
    return matrices, encoder_task(checkpoint.task).parameters(own)


def _base(
    report: BuildReport, serving: Serving, base: str | None, heads: Mapping[str, LinearLayer]
) -> Checkpoint | None:
    """Return the checkpoint that the model was built from; None if `base` does not say where, and it is not on the Hub.

    Raises CheckpointError for another one, and for a `base` that is not there.
    """
    built = report.checkpoint
    if base is None and built.get("revision") is None:  # build.json does not say where a local folder was
        return None
    spec = make_spec(
        model=base or built["source"],
        revision=built.get("revision") if base is None else None,
        task=report.task,
        pooling=built.get("pooling"),
        max_length=serving.max_length if isinstance(serving, EncoderServing) else serving.arena.length,
        adapters=1,
        adapter_labels=[layer.outputs for layer in heads.values()][-1] if heads else None,
    )
    try:
        checkpoint = resolve(spec)
    except CheckpointError:
        if base is not None:
            raise
        return None
    identity = checkpoint.identity()
    if any(identity[name] != built.get(name) for name in ("revision", "weights_sha256")):
        raise CheckpointError(
            f"{spec.model} has other weights than the checkpoint that {report.name} was built from, "
            f"{built.get('source')}; name that one with --base"
        )
    return checkpoint


def _encoder_error(
    folder: Path, serving: EncoderServing, checkpoint: Checkpoint, adapter: LoraAdapter, served: Adapter
) -> float:
    """Return the largest relative error of the served graph, with the adapter in each row, against PyTorch.

    Raises VerificationError if it is too large.
    """
    assert serving.model is not None
    executor, module = encoding.Executor(folder, serving), task_graph(checkpoint)
    assert executor.lora is not None
    (row,) = executor.lora.rows_of([served])

    def infer(feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return executor.infer({**feeds, LORA_ROWS: np.full(len(feeds["input_ids"]), row)})

    with merged(checkpoint.model, adapter):
        references = usual_references(module, rows_of(checkpoint), serving.max_length)
    graph, per_token = read_graph(folder / serving.model), encoder_task(checkpoint.task).per_token
    error = max(error_at(infer, graph, reference, per_token) for reference in references)
    if not error <= TOLERANCE:
        raise VerificationError(
            f"the answers with the adapter are off by {error:.1e} of PyTorch's largest output; at most {TOLERANCE:.0e} "
            "is right. Nothing was added"
        )
    return error


def _compare(
    graph: Path, serving: GenerationServing, checkpoint: Checkpoint, adapter: LoraAdapter, served: Adapter
) -> DecoderAgreement:
    """Compare the served graph with the adapter in each slot with PyTorch's answers to the samples."""
    rows = sample_rows(None, checkpoint)
    with merged(checkpoint.model, adapter):
        reference = make_reference(checkpoint.model, rows)
    executors = with_adapter(opened(read_graph(graph), working_cores()), served)
    return measure(executors, serving.arena.layers, serving.vocabulary, reference, serving.arena.dtype)


def with_adapter(executors: Executors, adapter: Adapter) -> Executors:
    """Return a function that creates executors with `adapter` in each slot."""

    def opened_with(geometry: Geometry) -> Executor:
        executor = executors(geometry)
        assert executor.lora is not None
        executor.lora.rows[:] = executor.lora.activate(adapter, ())
        return executor

    return opened_with


def _refuse_wrong(agreement: DecoderAgreement, report: BuildReport, serving: GenerationServing) -> None:
    """Raise VerificationError unless the answers are as right as the build required of the model's own."""
    if report.chosen == FP32 and serving.arena.dtype == "float32":
        refuse_wrong_probabilities(agreement.error)
    elif not agreement.mean >= report.threshold:  # NaN is wrong too
        raise VerificationError(
            f"{report.chosen} with the adapter has a {report.metric} of {agreement.mean:.4f} against PyTorch "
            f"({report.threshold:.4f} is required). Nothing was added: build the model in a higher --precision"
        )
