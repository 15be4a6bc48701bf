"""ONNX Runtime's models in config.pbtxt: on the CPU, on a GPU by CUDA, and on a GPU by its own TensorRT.

Options: triton-inference-server/onnxruntime_backend, README.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from builder.engines.cuda import placement as cuda
from builder.engines.onnxruntime import parameters
from builder.engines.placement import TOKEN_INPUTS, Accelerator, InstanceGroup, Placement, on_cpu
from builder.engines.profiles import Calls, input_shapes
from builder.engines.tensorrt.placement import profiles_of
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.runtime.recipe.compile import sha256

PRECISION_MODES = {"fp16": "FP16", "int8-static": "INT8"}  # the modes that the graph's own types need


def place(options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
    """Place instances on `options.target`. Raises SpecError for an option that the backend cannot take."""
    if options.target == "cpu":
        return on_cpu(options, parameters(graph, options.threads_per_instance, options.instances))
    groups = (InstanceGroup(options.instances, "KIND_GPU", tuple(options.gpu.devices)),)
    settings, accelerators = cuda.parameters(options.gpu), cuda.accelerators
    if options.target == "cuda":
        return Placement(groups, settings, accelerators=accelerators(options))
    (profile,) = profiles_of(options.tensorrt.profiles, calls, plan=False)
    shapes = input_shapes(profile, graph.inputs, TOKEN_INPUTS)
    accelerator = Accelerator("tensorrt", _tensorrt_parameters(options, graph, shapes))
    tuned = {name: sides["opt"] for name, sides in shapes.items()}
    return Placement(groups, settings, accelerators=(accelerator, *accelerators(options)), warm_ups=(tuned,))


def _tensorrt_parameters(
    options: BuildSpec, graph: Graph, shapes: Mapping[str, Mapping[str, tuple[int, int]]]
) -> dict[str, str]:
    """Return parameters of ONNX Runtime's TensorRT: an explicit profile, and engines and timings kept between starts.

    It names the engines that it keeps by the model's name and tensors, not by its weights: the graph's hash in the path
    keeps a retrained model from running on the engine of the one before. It creates one folder, not those above it.
    """

    def listed(side: str) -> str:
        return ",".join(f"{name}:{'x'.join(map(str, sides[side]))}" for name, sides in shapes.items())

    folder = f"{options.tensorrt.engine_folder.rstrip('/')}/{options.engine_name}-{sha256(*graph.files)[:16]}"
    parameters = {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
        "trt_builder_optimization_level": str(options.tensorrt.optimization_level),
        **{f"trt_profile_{side}_shapes": listed(side) for side in ("min", "opt", "max")},
    }
    if options.precision in PRECISION_MODES:
        parameters["precision_mode"] = PRECISION_MODES[options.precision]
    if options.tensorrt.workspace_mb is not None:
        parameters["max_workspace_size_bytes"] = str(options.tensorrt.workspace_mb << 20)
    return parameters
