"""Where an engine's instances run and what its backend is told: by target and engine, pure functions of the spec.

CUDA and TensorRT options: triton-inference-server/onnxruntime_backend and tensorrt_backend, README.md; fields:
triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from builder.engines import engine, onnxruntime, tensorrt
from builder.engines.cuda import NUMBERS, provider_options
from builder.errors import SpecError
from builder.export.graph import Graph
from builder.repository.profiles import Calls, default_profiles, groups, input_shapes, uncovered
from builder.spec import BuildSpec, Profile

OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
PRECISION_MODES = {"fp16": "FP16", "int8-static": "INT8"}  # what the graph's own types need to be allowed

Shapes = Mapping[str, tuple[int, int]]  # by input: (rows, its second axis)


@dataclass(frozen=True)
class InstanceGroup:
    """`profiles`: the numbers of a plan's optimisation profiles that these instances have."""

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
    """`warm_ups`: calls after which no shape needs work at run time; empty where every shape is alike."""

    groups: Sequence[InstanceGroup]
    parameters: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    accelerators: Sequence[Accelerator] = ()
    cuda_graphs: Sequence[Shapes] = ()
    warm_ups: Sequence[Shapes] = ()


def place(spec: BuildSpec, graph: Graph, token_budget: int, max_length: int) -> Placement:
    """How `graph` is to run on `spec.target`. Raises SpecError for profiles that leave a call out."""
    devices = tuple(spec.gpu.devices)
    if spec.target == "cpu":
        parameters = engine(graph.engine).parameters(graph, spec.threads_per_instance, spec.serving.spinning)
        return Placement((InstanceGroup(spec.instances),), parameters)
    on_gpu = (InstanceGroup(spec.instances, "KIND_GPU", devices),)
    if spec.target == "cuda":
        return Placement(on_gpu, _cuda_parameters(spec))
    profiles = profiles_of(spec, token_budget, max_length)
    shapes = [input_shapes(profile, graph.inputs, OF_TOKENS) for profile in profiles]
    tuned = [{name: sides["opt"] for name, sides in inputs.items()} for inputs in shapes]
    if graph.engine == onnxruntime.BACKEND:
        accelerator = Accelerator("tensorrt", _accelerator_parameters(spec, graph, shapes))
        return Placement(on_gpu, _cuda_parameters(spec), accelerators=(accelerator,), warm_ups=tuned)
    calls = Calls(spec.max_batch_size, max_length, token_budget)
    return Placement(
        tuple(InstanceGroup(spec.instances, "KIND_GPU", devices, numbers) for numbers in groups(profiles, calls)),
        platform=tensorrt.PLATFORM,
        cuda_graphs=tuned if spec.gpu.cuda_graphs else (),
    )


def profiles_of(spec: BuildSpec, token_budget: int, max_length: int) -> tuple[Profile, ...]:
    """The spec's profiles, or the default ones. Raises SpecError where a call would fit none."""
    calls = Calls(spec.max_batch_size, max_length, token_budget)
    profiles = spec.tensorrt.profiles or default_profiles(calls)
    missed = uncovered(profiles, calls)
    if missed is not None:
        raise SpecError(
            f"no profile of tensorrt.profiles takes {missed[0]} rows of {missed[1]} tokens; together they must take "
            f"all calls up to {calls.rows} rows, {calls.length} tokens a row and {calls.token_budget} tokens a call "
            "(--max-batch-size, --max-length, serving.token_budget)"
        )
    return profiles


def _cuda_parameters(spec: BuildSpec) -> dict[str, str]:
    """What Triton's ONNX Runtime backend reads where an instance is on a GPU."""
    named = provider_options(spec.gpu)
    parameters = {name: numbers[named[name]] for name, numbers in NUMBERS.items()}
    parameters["intra_op_thread_count"] = "1"  # what is left for the CPU is shapes
    return {**parameters, **{name: value for name, value in named.items() if name not in NUMBERS}}


def _accelerator_parameters(
    spec: BuildSpec, graph: Graph, shapes: Sequence[Mapping[str, Mapping[str, tuple[int, int]]]]
) -> dict[str, str]:
    """ONNX Runtime's TensorRT: explicit profiles, and engines and timings kept between starts."""

    def stated(side: str) -> str:
        return ",".join(
            f"{name}:{'x'.join(map(str, sides[side]))}" for inputs in shapes for name, sides in inputs.items()
        )

    folder = f"{spec.tensorrt.engine_folder.rstrip('/')}/{spec.entry_name}_model"
    parameters = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
        "trt_builder_optimization_level": str(spec.tensorrt.optimization_level),
        **{f"trt_profile_{side}_shapes": stated(side) for side in ("min", "opt", "max")},
    }
    if spec.precision in PRECISION_MODES:
        parameters["precision_mode"] = PRECISION_MODES[spec.precision]
    if spec.tensorrt.workspace_mb is not None:
        parameters["max_workspace_size_bytes"] = str(spec.tensorrt.workspace_mb << 20)
    return parameters
