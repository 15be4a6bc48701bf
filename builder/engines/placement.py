"""Placement of an engine's instances, and the parameters of its backend, as in config.pbtxt.

Fields: triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.common.errors import SpecError
from builder.engines import graph_engine
from builder.engines.profiles import Calls, buckets
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec, Gpu
from builder.runtime.encoder.call_inputs import TOKEN_SOURCES

TOKEN_INPUTS = tuple(TOKEN_SOURCES)

Shapes = Mapping[str, tuple[int, int]]  # by input: (rows, its second axis)


@dataclass(frozen=True)
class InstanceGroup:
    """Group of instances. `profiles`: the numbers of a plan's optimisation profiles that they have."""

    count: int
    kind: str = "KIND_CPU"
    gpus: Sequence[int] = ()
    profiles: Sequence[int] = ()


@dataclass(frozen=True)
class Accelerator:
    """One of ONNX Runtime's execution accelerators for a GPU."""

    name: str
    parameters: Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Placement of one engine.

    `warm_ups`: calls that Triton makes at load, so that the engine prepares every shape before the first request; empty
    if a new shape costs nothing.
    """

    groups: Sequence[InstanceGroup]
    parameters: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    accelerators: Sequence[Accelerator] = ()
    cuda_graphs: Sequence[Shapes] = ()
    warm_ups: Sequence[Shapes] = ()


def place(options: BuildSpec, graph: Graph, token_budget: int, max_length: int) -> Placement:
    """Return how the engine of `graph` runs it on `options.target`. Raises SpecError for options that it lacks."""
    return graph_engine(graph.engine).place(options, graph, Calls(options.max_batch_size, max_length, token_budget))


def on_cpu(options: BuildSpec, parameters: Mapping[str, str]) -> Placement:
    """Return the placement of instances on the CPU, whose backend gets `parameters`.

    Raises SpecError for an option that no backend has a parameter for.
    """
    if not options.serving.spinning:
        raise SpecError(
            "serving.spinning: false is for engines in process; Triton's own backends have no parameter for it: "
            "leave --executor bls out, or use --threads 1, which has no thread that could spin"
        )
    return Placement((InstanceGroup(options.instances),), parameters)


def graph_buckets(gpu: Gpu, graph: Graph, calls: Calls) -> tuple[tuple[int, int], ...]:
    """Return the shapes captured as CUDA graphs, to which the front model pads; none without gpu.cuda_graphs.

    Raises SpecError for an input whose length is not that of the text: its shapes are unknown.
    """
    if not gpu.cuda_graphs:
        return ()
    others = sorted(set(graph.inputs) - set(TOKEN_INPUTS))
    if others:
        raise SpecError(
            f"gpu.cuda_graphs: this task's graph has the input {others[0]}, whose length changes from call to call, "
            "and a captured graph runs on one shape alone; leave gpu.cuda_graphs out"
        )
    return buckets(calls)


def version_files(graph: Graph) -> dict[str, bytes | Path]:
    """Return the files of a graph that its engine opens unchanged, by their path in version 1 of the model."""
    return {f"1/{file.name}": file for file in graph.files}
