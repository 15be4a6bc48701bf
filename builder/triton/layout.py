"""From a verified model to the entries of a repository. Pure: no file is read or written here.

NAME/        python: tokenise, run the engine, post-process; dynamic batching on texts
NAME_model/  the engine, where it is a Triton model of its own

Everything is laid out as version 1; `RepositoryEntry.at` makes another version of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from builder.engines import engine
from builder.engines.onnxruntime import BACKEND, MODEL_FILE
from builder.onnx.graph import Graph
from builder.runtime.contract import (
    FILE,
    Alike,
    Batching,
    EncoderServing,
    GenerationServing,
    RequestLimits,
    dump,
)
from builder.runtime.fields import Field
from builder.spec import BuildSpec, Limits, Serving
from builder.triton.placement import Accelerator, InstanceGroup, Shapes, graph_buckets, place
from builder.triton.profiles import Calls

RUNTIME = Path(__file__).parent.parent / "runtime"
TASKS = "encoder/tasks"
# Engines that a front can run itself, by `Graph.engine`.
IN_PROCESS: Mapping[str, Literal["onnxruntime", "openvino"]] = {"onnxruntime": "onnxruntime", "openvino": "openvino"}
SHARED_FILES = ("contract.py", "fields.py", "panics.py", "tensors_check.py", "tokens.py")
EXECUTOR_FILES = {  # by EncoderServing.executor
    "bls": ("encoder/executors/bls.py",),
    **{name: engine(name).EMITTED_FILES for name in IN_PROCESS},
}
# of every encoder: all but the tasks and the executors, of which each has its own
ENCODER = (
    *sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "encoder").glob("*.py")),
    "encoder/tasks/__init__.py",
    "encoder/executors/__init__.py",
)
GENERATION = tuple(sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "generation").rglob("*.py")))
GENERATING = {
    **{name: name for name in (*SHARED_FILES, "sessions.py", "cores.py")},
    "model.py": "generation_model.py",
    **{name: name for name in GENERATION},
}
SHARED = {
    **{name: name for name in ("contract.py", "cores.py", "fields.py", "tensors_check.py")},
    "model.py": "shared_model.py",
    **{name: name for name in sorted(str(file.relative_to(RUNTIME)) for file in (RUNTIME / "shared").rglob("*.py"))},
}
RUNTIME_FILES: Mapping[
    str, Mapping[str, str]
] = {  # kind of model -> file in the version folder -> file in builder/runtime
    **{
        f"encoder, {executor}": {"model.py": "encoder_model.py"}
        | {name: name for name in (*SHARED_FILES, *ENCODER, *files)}
        for executor, files in EXECUTOR_FILES.items()
    },
    "generating": GENERATING,
    "shared": SHARED,
    "tensorrt-llm": {"model.py": "tensorrt_llm_model.py"},
}
SOURCES = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


@dataclass(frozen=True)
class WarmUp:
    """One warm-up request of the engine: a row of real tokens, or of zeros, repeated `batch_size` times."""

    name: str
    batch_size: int
    inputs: Mapping[str, Any]


@dataclass(frozen=True)
class Config:
    """What templates/config.pbtxt.j2 needs, all of it."""

    name: str
    backend: str
    max_batch_size: int
    inputs: Sequence[Field]
    outputs: Sequence[Field]
    groups: Sequence[InstanceGroup]
    serving: Serving
    dynamic_batching: bool
    max_queue_delay_us: int = 0
    default_model_filename: str = ""
    platform: str = ""
    rate_limited: bool = False
    response_cache: bool = False
    graph_level: int = 0
    accelerators: Sequence[Accelerator] = ()
    cuda_graphs: Sequence[Shapes] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    warm_ups: Sequence[WarmUp] = ()
    decoupled: bool = False
    version: int = 1


@dataclass(frozen=True)
class RepositoryEntry:
    """One model of the repository: its configuration and its files, as bytes or as a file to copy."""

    name: str
    config: Config
    files: Mapping[str, bytes | Path]

    def at(self, version: int) -> RepositoryEntry:
        """The same as version `version`."""
        files = {numbered(path, version): self._said(path, content, version) for path, content in self.files.items()}
        return replace(self, config=replace(self.config, version=version), files=files)

    def _said(self, path: str, content: bytes | Path, version: int) -> bytes | Path:
        """The arguments of vLLM and TensorRT-LLM say where in the repository their checkpoint is."""
        if path not in ("1/model.json", "1/model.yaml") or isinstance(content, Path):
            return content
        return content.replace(f"/{self.name}/1/".encode(), f"/{self.name}/{version}/".encode())


def numbered(path: str, version: int, of: int = 1) -> str:
    """The path that a file of version `of` has in version `version`."""
    return re.sub(rf"^(warmup/)?{of}/", rf"\g<1>{version}/", path)


def serving_document(
    spec: BuildSpec,
    module: str,
    graph: Graph,
    max_length: int,
    pad: Mapping[str, int],
    parameters: Mapping[str, Any],
    alike: Alike = None,
    truncation_side: Literal["left", "right"] = "right",
) -> EncoderServing:
    """What serving.json tells the emitted front. Raises SpecError.

    `alike`: what rows that share a call must have in common.
    """
    token_budget = max(spec.serving.token_budget, max_length)
    calls = Calls(spec.max_batch_size, max_length, token_budget)
    buckets = [] if alike == "length" else graph_buckets(spec.gpu, graph, calls)  # they pad
    return EncoderServing(
        task=module,
        executor=IN_PROCESS[graph.engine] if spec.in_process else "bls",
        engine=None if spec.in_process else f"{spec.entry_name}_model",
        max_length=max_length,
        truncate=spec.truncate,
        truncation_side=truncation_side,
        inputs={name: SOURCES.get(name, "task") for name in graph.inputs},
        outputs=graph.outputs,
        pad=pad,
        batching=Batching(token_budget, spec.max_batch_size, spec.serving.call_cost, buckets, alike),
        parameters=parameters,
        limits=request_limits(spec.serving.limits),
    )


def request_limits(limits: Limits) -> RequestLimits:
    """What one request may bring, as serving.json states it."""
    return RequestLimits(**limits.model_dump())


def version_files(graph: Graph) -> dict[str, bytes | Path]:
    """The files of a graph that its engine opens as they are, in version 1."""
    return {f"1/{file.name}": file for file in graph.files}


def lay_out(
    spec: BuildSpec,
    serving: EncoderServing,
    tokenizer: str,
    graph: Graph,
    graph_files: Mapping[str, bytes | Path],
    fields: tuple[Sequence[Field], Sequence[Field]],
    warm_up_rows: Sequence[Mapping[str, Sequence[int]]],
) -> tuple[RepositoryEntry, ...]:
    """The front model with the engine's own files inside or, for BLS, in an entry of their own beside it."""
    options = spec.serving
    front = Config(
        name=spec.entry_name,
        backend="python",
        max_batch_size=spec.max_batch_size,
        inputs=fields[0],
        outputs=fields[1],
        groups=(InstanceGroup(options.front_instances or spec.instances),),
        serving=options,
        dynamic_batching=True,
        max_queue_delay_us=spec.max_queue_delay_us,
        response_cache=options.response_cache,
        rate_limited=spec.in_process,
        parameters={**_front_parameters(serving), **dict(sorted(options.metadata.items()))},
    )
    serving = bucketed(serving, graph)
    if spec.in_process:
        serving = in_process(spec, serving, graph, warm_up_rows if options.warm_up else ())
    else:
        serving = replace(serving, not_on_cpus_with=engine(graph.engine).wrong_cpus(graph))
    files = runtime_files(f"encoder, {serving.executor}")
    files.update({f"1/{TASKS}/{name}": RUNTIME / TASKS / name for name in task_files(serving.task)})
    files[f"1/{FILE}"] = dump(serving).encode()
    files["1/tokenizer.json"] = tokenizer.encode()
    if spec.in_process:
        return (RepositoryEntry(front.name, front, {**files, **graph_files}),)
    return RepositoryEntry(front.name, front, files), _engine_entry(spec, serving, graph, graph_files, warm_up_rows)


def bucketed(serving: EncoderServing, graph: Graph) -> EncoderServing:
    """`serving` with calls padded to a few shapes, where the engine of `graph` wants that."""
    batching = serving.batching
    shapes = engine(graph.engine).buckets(batching.max_rows, serving.max_length, batching.token_budget)
    if not shapes or batching.alike == "length":
        return serving
    return replace(serving, batching=replace(batching, buckets=shapes))


def in_process(
    spec: BuildSpec, serving: EncoderServing, graph: Graph, rows: Sequence[Mapping[str, Sequence[int]]]
) -> EncoderServing:
    """`serving` of a front that runs `graph` itself, and `rows` of it before the first request."""
    room = engine(graph.engine)
    session = room.session(graph, spec.session_threads, spec.serving.spinning)
    warm_up = [{name: row[name] for name in graph.inputs} for row in rows]
    return replace(serving, executor=IN_PROCESS[graph.engine], model=room.MODEL_FILE, session=session, warm_up=warm_up)


def lay_out_generating(
    spec: BuildSpec,
    serving: GenerationServing,
    tokenizer: str,
    graphs: Sequence[Graph],
    fields: tuple[Sequence[Field], Sequence[Field]],
    step_inputs: Sequence[Field] = (),
) -> tuple[RepositoryEntry, ...]:
    """The generating model, with its graphs inside or, for BLS, its only one beside it.

    `fields`: of the front model; `step_inputs`: of the graph that BLS calls, past included.
    """
    on_gpu = spec.target != "cpu" and spec.executor == "in-process"  # where the cache is
    front = Config(
        name=spec.entry_name,
        backend="python",
        max_batch_size=int(spec.serving.batch_dimension),  # the decode loop batches; a request is one prompt
        inputs=fields[0],
        outputs=fields[1],
        groups=(InstanceGroup(1, "KIND_GPU", spec.gpu.devices) if on_gpu else InstanceGroup(1),),
        serving=spec.serving,
        dynamic_batching=False,
        decoupled=True,
        parameters={**_generating_parameters(serving), **dict(sorted(spec.serving.metadata.items()))},
    )
    files = runtime_files("generating")
    files[f"1/{FILE}"] = dump(serving).encode()
    files["1/tokenizer.json"] = tokenizer.encode()
    if spec.executor == "in-process":
        files.update({f"1/{file.name}": file for graph in graphs for file in graph.files})
        return (RepositoryEntry(front.name, front, files),)
    logits = Field("logits", "TYPE_FP32", (-1, serving.vocabulary))
    placement = place(spec, graphs[0], spec.serving.prefill_tokens, serving.arena.length)
    step = Config(
        name=f"{spec.entry_name}_model",
        backend=BACKEND,
        max_batch_size=0,
        inputs=step_inputs,
        outputs=[logits, *(_present(field) for field in step_inputs if field.name.startswith("past_"))],
        groups=placement.groups,
        serving=spec.serving,
        dynamic_batching=False,
        default_model_filename=MODEL_FILE,
        parameters=placement.parameters,
    )
    weights: dict[str, bytes | Path] = {f"1/{file.name}": file for graph in graphs for file in graph.files}
    return RepositoryEntry(front.name, front, files), RepositoryEntry(step.name, step, weights)


def _present(past: Field) -> Field:
    return Field(past.name.replace("past_", "present_"), past.data_type, past.dims)


def runtime_files(kind: str) -> dict[str, bytes | Path]:
    """The emitted Python of a kind of model, in version 1."""
    return {f"1/{target}": RUNTIME / source for target, source in RUNTIME_FILES[kind].items()}


def _front_parameters(serving: EncoderServing) -> dict[str, str]:
    """What its configuration tells of a model: its task, limit, labels and mask."""
    parameters = {"task": serving.task.replace("_", "-"), "max_input_length": str(serving.max_length)}
    if "labels" in serving.parameters:
        parameters["labels"] = json.dumps(list(serving.parameters["labels"]), ensure_ascii=False)
    if "mask" in serving.parameters:
        parameters["mask_token"] = serving.parameters["mask"]
    return parameters


def _generating_parameters(serving: GenerationServing) -> dict[str, str]:
    """The same of a model that generates: its task and limits in tokens, whether it chats, its languages."""
    source, longest = serving.source, serving.arena.length
    limits = {"max_total_tokens": longest} if source is None else {"max_output_length": longest - 1}
    limits["max_input_length"] = longest - 1 if source is None else source.max_length
    parameters = {"task": serving.task, **{name: str(value) for name, value in sorted(limits.items())}}
    if serving.chat is not None:
        parameters["chat"] = "true"
        if serving.chat.tool_parser is not None:
            parameters["tool_parser"] = serving.chat.tool_parser
    if source is not None and (source.languages or source.pairs):
        spoken = source.languages or {code for pair in source.pairs for code in pair.split(" to ")}
        parameters["languages"] = json.dumps(sorted(spoken))
    return parameters


def task_files(module: str) -> tuple[str, ...]:
    """The emitted task and the tasks it builds on, found by its own relative imports."""
    found = [f"{module}.py"]
    for line in (RUNTIME / TASKS / f"{module}.py").read_text("utf-8").splitlines():
        if line.startswith("from .") and not line.startswith("from .."):
            found.extend(task_files(line.split()[1][1:]))
    return tuple(found)


def _engine_entry(
    spec: BuildSpec,
    serving: EncoderServing,
    graph: Graph,
    graph_files: Mapping[str, bytes | Path],
    rows: Sequence[Mapping[str, Sequence[int]]],
) -> RepositoryEntry:
    options = spec.serving
    files = dict(graph_files)
    any_rows = engine(graph.engine).ROWS_ARE_AN_AXIS
    rows_dim = (-1,) if any_rows else ()
    placement = place(spec, graph, serving.batching.token_budget, serving.max_length)
    warm_ups = []
    for index, row in enumerate(rows if options.warm_up else ()):
        inputs = {}
        for name in graph.inputs:
            file = f"text_{index}_{name}"
            files[f"warmup/1/{file}"] = np.asarray(row[name], dtype=np.int64).tobytes()
            inputs[name] = {"length": len(row[name]), "file": file}
        warm_ups.append(WarmUp(f"text_{index}", 1, inputs))
    for index, shapes in enumerate(placement.warm_ups):  # asked for or not: the first call would wait for an engine
        rows_of_it = max(shape[0] for shape in shapes.values())
        zeros = {name: {"length": shape[1], "file": ""} for name, shape in shapes.items()}
        warm_ups.append(WarmUp(f"profile_{index}", rows_of_it, zeros))
    config = Config(
        name=f"{spec.entry_name}_model",
        backend=graph.engine,
        platform=placement.platform,
        max_batch_size=0 if any_rows else spec.max_batch_size,
        inputs=[Field(name, "TYPE_INT64", (*rows_dim, -1)) for name in graph.inputs],
        outputs=[
            Field(n, "TYPE_FP32", (*rows_dim, *dims)) for n, dims in zip(graph.outputs, graph.output_dims, strict=True)
        ],
        groups=placement.groups,
        serving=options,
        dynamic_batching=False,  # rows of one call have one length: the front model has batched them already
        default_model_filename=engine(graph.engine).MODEL_FILE,
        rate_limited=True,
        graph_level=options.optimization_level,
        accelerators=placement.accelerators,
        cuda_graphs=placement.cuda_graphs,
        parameters=placement.parameters,
        warm_ups=warm_ups,
    )
    return RepositoryEntry(config.name, config, files)
