"""Lay out a verified model that generates as the entries of a repository. Pure: reads and writes no file.

NAME/        python: the decode loop, decoupled, with its graphs where it runs them itself
NAME_model/  its only graph, where the steps run through BLS
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from builder.engines import graph_engine
from builder.engines.placement import InstanceGroup, place, version_files
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.layout.emitted import generation_files
from builder.runtime.contract import FILE, GenerationServing, dump
from builder.runtime.fields import Field
from builder.runtime.generation.executors.base import MAX_CANDIDATES, TOP_LOGITS, TOP_TOKENS


def lay_out_generating(
    options: BuildSpec,
    serving: GenerationServing,
    tokenizer: str,
    graphs: Sequence[Graph],
    fields: tuple[Sequence[Field], Sequence[Field]],
    step_inputs: Sequence[Field] = (),
) -> tuple[RepositoryEntry, ...]:
    """Return the generating model, with its graphs inside or, for BLS, its only one beside it.

    `fields`: of the front model; `step_inputs`: of the graph that BLS calls, past included.
    """
    on_gpu = options.target != "cpu" and options.executor == "in-process"  # where the cache is
    front = Config(
        name=options.entry_name,
        backend="python",
        max_batch_size=int(options.serving.batch_dimension),  # the decode loop batches; a request is one prompt
        inputs=fields[0],
        outputs=fields[1],
        groups=(InstanceGroup(1, "KIND_GPU", options.gpu.devices) if on_gpu else InstanceGroup(1),),
        serving=options.serving,
        dynamic_batching=True,  # a queue, no batches: docs/explanation/failures.md, "Bursts of requests"
        decoupled=True,
        parameters={**_generating_parameters(serving), **dict(sorted(options.serving.metadata.items()))},
    )
    files: dict[str, bytes | Path] = {**generation_files(serving)}
    files[f"1/{FILE}"] = dump(serving).encode()
    files["1/tokenizer.json"] = tokenizer.encode()
    weights = {name: file for graph in graphs for name, file in version_files(graph).items()}
    if options.executor == "in-process":
        return (RepositoryEntry(front.name, front, {**files, **weights}),)
    step = _step(options, serving, graphs[0], step_inputs)
    return RepositoryEntry(front.name, front, files), RepositoryEntry(step.name, step, weights)


def _step(options: BuildSpec, serving: GenerationServing, graph: Graph, inputs: Sequence[Field]) -> Config:
    """Return the configuration of the model that BLS calls for each step."""
    candidates = (-1, min(MAX_CANDIDATES, serving.vocabulary))
    logits = (
        Field("logits", "TYPE_FP32", (-1, serving.vocabulary)),
        Field(TOP_LOGITS, "TYPE_FP32", candidates),
        Field(TOP_TOKENS, "TYPE_INT64", candidates),
    )
    presents = [
        Field(field.name.replace("past_", "present_"), field.data_type, field.dims)
        for field in inputs
        if field.name.startswith("past_")
    ]
    placement = place(options, graph, options.prefill_tokens, serving.arena.length)
    return Config(
        name=options.engine_name,
        backend=graph.engine,
        max_batch_size=0,
        inputs=inputs,
        outputs=[*(field for field in logits if field.name in graph.outputs), *presents],
        groups=placement.groups,
        serving=options.serving,
        dynamic_batching=False,
        default_model_filename=graph_engine(graph.engine).facts.model_file,
        parameters=placement.parameters,
    )


def _generating_parameters(serving: GenerationServing) -> dict[str, str]:
    """Return the parameters that tell clients of a model: task, limits in tokens, chat format and languages."""
    source, longest = serving.source, serving.arena.length
    limits = {"max_total_tokens": longest} if source is None else {"max_output_length": longest - 1}
    limits["max_input_length"] = longest - 1 if source is None else source.max_length
    parameters = {"task": serving.task, **{name: str(value) for name, value in sorted(limits.items())}}
    if serving.chat is not None:
        parameters["chat"] = "true"
        if serving.chat.tool_parser is not None:
            parameters["tool_parser"] = serving.chat.tool_parser
        if serving.chat.thinking is not None:
            parameters["thinking"] = json.dumps(asdict(serving.chat.thinking))
        if serving.chat.part_roles:
            parameters["message_parts"] = json.dumps(list(serving.chat.part_roles))
    if source is not None and (source.languages or source.pairs):
        spoken = source.languages or {code for pair in source.pairs for code in pair.split(" to ")}
        parameters["languages"] = json.dumps(sorted(spoken))
    return parameters
