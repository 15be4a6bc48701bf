"""Where an engine's instances run and what its backend is told: by target and engine, from spec and graph.

CUDA and TensorRT options: triton-inference-server/onnxruntime_backend and tensorrt_backend, README.md; fields:
triton-inference-server/common, protobuf/model_config.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from builder.engines import engine, onnxruntime, tensorrt
from builder.engines.cuda import NUMBERS, attention_kernels, provider_options
from builder.errors import SpecError
from builder.onnx.graph import Graph
from builder.runtime.recipe.compile import sha256
from builder.spec import Gpu, LayoutOptions, Profile
from builder.triton.profiles import Calls, buckets, covering_profile, default_profiles, input_shapes, uncovered
from builder.triton.releases import version_tuple

OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")
CUDA_OPTIONS_SINCE = "24.06"
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
    """`warm_ups`: calls that Triton makes at load, so that the engine prepares every shape before the first request;
    empty where a new shape costs nothing.
    """

    groups: Sequence[InstanceGroup]
    parameters: Mapping[str, str] = field(default_factory=dict)
    platform: str = ""
    accelerators: Sequence[Accelerator] = ()
    cuda_graphs: Sequence[Shapes] = ()
    warm_ups: Sequence[Shapes] = ()


def place(options: LayoutOptions, graph: Graph, token_budget: int, max_length: int) -> Placement:
    """How `graph` is to run on `options.target`. Raises SpecError for what it cannot be told."""
    devices = tuple(options.gpu.devices)
    if options.target == "cpu":
        if not options.serving.spinning:
            raise SpecError(
                "serving.spinning: false is for engines in process; Triton's own backends have no parameter for it: "
                "leave --executor bls out, or use --threads 1, which has no thread that could spin"
            )
        parameters = engine(graph.engine).parameters(graph, options.threads, options.instances)
        return Placement((InstanceGroup(options.instances),), parameters)
    on_gpu = (InstanceGroup(options.instances, "KIND_GPU", devices),)
    if options.target == "cuda":
        return Placement(on_gpu, _cuda_parameters(options.gpu), accelerators=_cuda_accelerator(options))
    calls = Calls(options.max_batch_size, max_length, token_budget)
    profiles = profiles_of(options.tensorrt.profiles, calls, options.makes_plan)
    if graph.engine == onnxruntime.BACKEND:
        shapes = input_shapes(profiles[0], graph.inputs, OF_TOKENS)
        accelerator = Accelerator("tensorrt", _accelerator_parameters(options, graph, shapes))
        tuned = {name: sides["opt"] for name, sides in shapes.items()}
        accelerators = (accelerator, *_cuda_accelerator(options))
        return Placement(on_gpu, _cuda_parameters(options.gpu), accelerators=accelerators, warm_ups=(tuned,))
    return Placement(
        # One group: Triton hands a call to any free instance, and picks the profile within it, the one whose optimum
        # is nearest (tensorrt_backend, GetMostOptimizedProfile). Groups of one profile each would defeat that.
        (InstanceGroup(options.instances, "KIND_GPU", devices, tuple(range(len(profiles)))),),
        platform=tensorrt.PLATFORM,
        cuda_graphs=[dict.fromkeys(graph.inputs, shape) for shape in graph_buckets(options.gpu, graph, calls)],
    )


def graph_buckets(gpu: Gpu, graph: Graph, calls: Calls) -> tuple[tuple[int, int], ...]:
    """The shapes captured as CUDA graphs, to which the front model pads; none without gpu.cuda_graphs.

    Raises SpecError for an input whose length is not that of the text: no shape of it is known.
    """
    if not gpu.cuda_graphs:
        return ()
    others = sorted(set(graph.inputs) - set(OF_TOKENS))
    if others:
        raise SpecError(
            f"gpu.cuda_graphs: this task's graph has the input {others[0]}, whose length changes from call to call, "
            "and a captured graph runs on one shape alone; leave gpu.cuda_graphs out"
        )
    return buckets(calls)


def profiles_of(profiles: tuple[Profile, ...], calls: Calls, plan: bool) -> tuple[Profile, ...]:
    """The `profiles` that were asked for, or the default ones. Raises SpecError where one of `calls` would fit none.

    ONNX Runtime's TensorRT, which is not a `plan`, runs profile 0 alone, so it has one
    (tensorrt_execution_provider.cc).
    """
    if not plan and len(profiles) > 1:
        raise SpecError(
            f"ONNX Runtime's TensorRT runs the first profile alone, and tensorrt.profiles has {len(profiles)}: give "
            "one that takes every call, or leave --engine out for a plan"
        )
    if not profiles:
        profiles = default_profiles(calls) if plan else (covering_profile(calls),)
    missed = uncovered(profiles, calls)
    if missed is not None:
        raise SpecError(
            f"no profile of tensorrt.profiles takes {missed[0]} rows of {missed[1]} tokens; together they must take "
            f"all calls up to {calls.rows} rows, {calls.length} tokens a row and {calls.token_budget} tokens a call "
            "(--max-batch-size, --max-length, serving.token_budget)"
        )
    return profiles


def _cuda_parameters(gpu: Gpu) -> dict[str, str]:
    """What Triton's ONNX Runtime backend reads where an instance is on a GPU."""
    named = provider_options(gpu)
    parameters = {name: numbers[named[name]] for name, numbers in NUMBERS.items()}
    parameters["intra_op_thread_count"] = "1"  # what is left for the CPU is shapes
    passed = {name: value for name, value in named.items() if name not in (*NUMBERS, "use_tf32")}
    return {**parameters, **passed}


def _cuda_accelerator(options: LayoutOptions) -> tuple[Accelerator, ...]:
    """Options of CUDA's own: fp32 is multiplied as fp32, which is what was compared, not as TF32. Raises SpecError.

    Triton's backend passes options of CUDA on since 24.06 (onnxruntime_backend, pull request 256).
    """
    if version_tuple(options.triton) >= version_tuple(CUDA_OPTIONS_SINCE):
        kernels = attention_kernels(options.gpu.card, options.precision, options.triton)
        return (Accelerator("cuda", {"use_tf32": provider_options(options.gpu)["use_tf32"], **kernels}),)
    if options.precision != "fp32":
        return ()
    raise SpecError(
        f"the ONNX Runtime backend of Triton {options.triton} multiplies fp32 as TF32 on a GPU and takes no option "
        f"against it: use --precision fp16, or --triton {CUDA_OPTIONS_SINCE} or later"
    )


def _accelerator_parameters(
    options: LayoutOptions, graph: Graph, shapes: Mapping[str, Mapping[str, tuple[int, int]]]
) -> dict[str, str]:
    """ONNX Runtime's TensorRT: an explicit profile, and engines and timings kept between starts.

    It names the engines that it keeps by the model's name and tensors, not by its weights: the graph's hash in the path
    keeps a retrained model from running on the engine of the one before. It creates one folder, not those above it.
    """

    def stated(side: str) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, sides[side]))}" for name, sides in shapes.items())

    folder = f"{options.tensorrt.engine_folder.rstrip('/')}/{options.engine_name}-{sha256(*graph.files)[:16]}"
    parameters = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
        "trt_builder_optimization_level": str(options.tensorrt.optimization_level),
        **{f"trt_profile_{side}_shapes": stated(side) for side in ("min", "opt", "max")},
    }
    if options.precision in PRECISION_MODES:
        parameters["precision_mode"] = PRECISION_MODES[options.precision]
    if options.tensorrt.workspace_mb is not None:
        parameters["max_workspace_size_bytes"] = str(options.tensorrt.workspace_mb << 20)
    return parameters
