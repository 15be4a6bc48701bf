"""Lay out a verified encoder as the entries of a repository. Pure: reads and writes no file.

NAME/        python: tokenise, run the engine, post-process; dynamic batching on texts
NAME_model/  the engine, where it is a Triton model of its own
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from builder.common.releases import SENDERS_SINCE, version_tuple
from builder.engines import graph_engine
from builder.engines.placement import InstanceGroup, graph_buckets, place
from builder.engines.profiles import Calls
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec, RequestLimitOptions
from builder.repository.config.entries import Config, RepositoryEntry, WarmUp
from builder.repository.layout.emitted import encoder_files
from builder.runtime.contract import FILE, Alike, Batching, EncoderServing, RequestLimits, dump
from builder.runtime.encoder.call_inputs import sources
from builder.runtime.encoder.scores import CLASS_SCORES
from builder.runtime.encoder.task import HEADLESS
from builder.runtime.fields import Field

LABELS = "labels.txt"  # the names of the classes of CLASS_SCORES


def serving_document(
    spec: BuildSpec,
    module: str,
    graph: Graph,
    max_length: int,
    pad: Mapping[str, int],
    parameters: Mapping[str, Any],
    alike: Alike = None,
    truncation_side: Literal["left", "right"] = "right",
    shares_prefixes: bool = False,
) -> EncoderServing:
    """Return the settings, for serving.json, of the emitted front. Raises SpecError.

    `alike`: the property that rows of one call must share; `shares_prefixes`: True if `graph` computes equal
    beginnings of rows once.
    """
    token_budget = max(spec.serving.token_budget, max_length)
    calls = Calls(spec.max_batch_size, max_length, token_budget)
    buckets = [] if alike == "length" else graph_buckets(spec.gpu, graph, calls)  # bucketing pads
    return EncoderServing(
        task=module,
        executor=graph.engine if spec.in_process else "bls",
        engine=None if spec.in_process else spec.engine_name,
        max_length=max_length,
        truncate=spec.truncate,
        truncation_side=truncation_side,
        inputs=sources(graph.token_inputs),
        outputs=graph.outputs,
        pad=pad,
        batching=Batching(token_budget, spec.max_batch_size, spec.serving.call_cost, buckets, alike, shares_prefixes),
        parameters=parameters,
        limits=request_limits(spec.serving.limits),
    )


def request_limits(limits: RequestLimitOptions) -> RequestLimits:
    """Return the limits of one request, for serving.json."""
    return RequestLimits(**limits.model_dump())


def lay_out(
    options: BuildSpec,
    serving: EncoderServing,
    tokenizer: str,
    graph: Graph,
    graph_files: Mapping[str, bytes | Path],
    fields: tuple[Sequence[Field], Sequence[Field]],
    warm_up_rows: Sequence[Mapping[str, Sequence[int]]],
    task_files: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[RepositoryEntry, ...]:
    """Return the front model with the engine's own files inside or, for BLS, in an entry of their own beside it."""
    limits = queue_limits(options)
    front = Config(
        name=options.entry_name,
        backend="python",
        max_batch_size=options.max_batch_size,
        inputs=fields[0],
        outputs=fields[1],
        groups=(InstanceGroup(options.serving.front_instances or options.instances),),
        serving=options.serving,
        dynamic_batching=True,
        max_queue_delay_us=options.max_queue_delay_us,
        queue_size=0 if limits.by_front else limits.size,
        queue_timeout_us=0 if limits.by_front else limits.timeout_us,
        response_cache=options.serving.response_cache,
        rate_limited=options.in_process,
        parameters={**_front_parameters(serving), **dict(sorted(options.serving.metadata.items()))},
        label_files={CLASS_SCORES: LABELS} if options.serving.dynamo else {},
    )
    serving = bucketed(serving, graph)
    if limits.by_front:
        serving = replace(serving, queue=limits.size, queue_timeout_ms=options.serving.queue.waiting_ms)
    if options.in_process:
        serving = in_process(options, serving, graph, warm_up_rows if options.serving.warm_up else ())
    else:
        serving = replace(serving, not_on_cpus_with=graph_engine(graph.engine).wrong_cpus(graph))
    files: dict[str, bytes | Path] = {**encoder_files(serving)}
    files[f"1/{FILE}"] = dump(serving).encode()
    files["1/tokenizer.json"] = tokenizer.encode()
    files.update({f"1/{name}": contents for name, contents in task_files.items()})
    if options.in_process:
        return (RepositoryEntry(front.name, front, {**files, **graph_files}),)
    return RepositoryEntry(front.name, front, files), _engine_entry(options, serving, graph, graph_files, warm_up_rows)


@dataclass(frozen=True)
class QueueLimits:
    """Limits of the requests that wait for an encoder; 0: none. `by_front`: the front keeps them, instead of Triton."""

    by_front: bool
    size: int
    timeout_us: int


def queue_limits(options: BuildSpec) -> QueueLimits:
    """Return the limits of the queue, and whether the front or Triton's batcher keeps them.

    The front keeps them if it can and the batcher need not. If it cannot, the batcher keeps those that the options
    name. It cannot if it has to answer every request before execute() returns: the Python backend of the release has no
    other way, or the front needs resources that Triton's rate limiter takes back then.
    """
    queue = options.serving.queue
    is_rate_limited = options.in_process and bool(options.serving.rate_limiter)
    if options.serving.batcher_keeps_limits:
        return QueueLimits(False, queue.size, queue.waiting_us)
    if is_rate_limited or version_tuple(options.triton) < version_tuple(SENDERS_SINCE):
        return QueueLimits(False, queue.max_size or 0, queue.timeout_us or 0)
    return QueueLimits(True, queue.size, queue.waiting_us)


def bucketed(serving: EncoderServing, graph: Graph) -> EncoderServing:
    """Return `serving` with calls padded to a few shapes, if the engine of `graph` needs that."""
    batching = serving.batching
    shapes = graph_engine(graph.engine).buckets(batching.max_rows, serving.max_length, batching.padded_budget)
    if not shapes or batching.alike == "length":
        return serving
    return replace(serving, batching=replace(batching, buckets=shapes))


def in_process(
    options: BuildSpec, serving: EncoderServing, graph: Graph, rows: Sequence[Mapping[str, Sequence[int]]]
) -> EncoderServing:
    """Return `serving` of a front that runs `graph` itself, and `rows` of it before the first request."""
    engine = graph_engine(graph.engine)
    session = engine.session(graph, options.session_threads, options.serving.spinning)
    warm_up = [{name: row[name] for name in graph.token_inputs} for row in rows]
    return replace(serving, executor=graph.engine, model=engine.facts.model_file, session=session, warm_up=warm_up)


def _front_parameters(serving: EncoderServing) -> dict[str, str]:
    """Return the parameters that tell clients of a model: task, limit, labels or none, mask, size, prompts, cuts."""
    parameters = {"task": serving.task.replace("_", "-"), "max_input_length": str(serving.max_length)}
    if serving.parameters.get(HEADLESS):
        parameters[HEADLESS] = "true"
    elif "labels" in serving.parameters:
        parameters["labels"] = json.dumps(list(serving.parameters["labels"]), ensure_ascii=False)
    if "mask" in serving.parameters:
        parameters["mask_token"] = serving.parameters["mask"]
    if serving.parameters.get("pooled"):
        parameters["embedding_size"] = str(serving.parameters["size"])
    if serving.parameters.get("late_chunking"):
        parameters["late_chunking"] = "true"
    if serving.parameters.get("prompts"):
        parameters["prompts"] = json.dumps(sorted(serving.parameters["prompts"]), ensure_ascii=False)
    if serving.truncation_side != "right":
        parameters["truncation_side"] = serving.truncation_side
    return parameters


def _engine_entry(
    options: BuildSpec,
    serving: EncoderServing,
    graph: Graph,
    graph_files: Mapping[str, bytes | Path],
    rows: Sequence[Mapping[str, Sequence[int]]],
) -> RepositoryEntry:
    files = dict(graph_files)
    any_rows = graph_engine(graph.engine).rows_are_an_axis
    rows_dim = (-1,) if any_rows else ()
    placement = place(options, graph, serving.batching.token_budget, serving.max_length)
    warm_ups = []
    for index, row in enumerate(rows if options.serving.warm_up else ()):
        inputs = {name: {"length": len(row[name]), "file": f"text_{index}_{name}"} for name in graph.inputs}
        warm_ups.append(WarmUp(f"text_{index}", 1, inputs))
        for name in graph.inputs:
            files[f"warmup/1/text_{index}_{name}"] = np.asarray(row[name], dtype=np.int64).tobytes()
    for index, shapes in enumerate(placement.warm_ups):  # else a client's first call waits while the engine prepares
        zeros = {name: {"length": shape[1], "file": ""} for name, shape in shapes.items()}
        warm_ups.append(WarmUp(f"profile_{index}", max(shape[0] for shape in shapes.values()), zeros))
    config = Config(
        name=options.engine_name,
        backend=graph.engine,
        platform=placement.platform,
        max_batch_size=0 if any_rows else options.max_batch_size,
        inputs=[Field(name, "TYPE_INT64", (*rows_dim, -1)) for name in graph.inputs],
        outputs=[
            Field(n, "TYPE_FP32", (*rows_dim, *dims)) for n, dims in zip(graph.outputs, graph.output_dims, strict=True)
        ],
        groups=placement.groups,
        serving=options.serving,
        dynamic_batching=False,  # rows of one call have one length: the front model has already batched them
        default_model_filename=graph_engine(graph.engine).facts.model_file,
        rate_limited=True,
        graph_level=options.serving.optimization_level,
        accelerators=placement.accelerators,
        cuda_graphs=placement.cuda_graphs,
        parameters=placement.parameters,
        warm_ups=warm_ups,
    )
    return RepositoryEntry(config.name, config, files)
