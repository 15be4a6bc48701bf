"""Plans in config.pbtxt, and the profiles that TensorRT compiles for the calls of a front."""

from __future__ import annotations

from builder.common.errors import SpecError
from builder.engines.placement import InstanceGroup, Placement, graph_buckets
from builder.engines.profiles import Calls, covering_profile, default_profiles, uncovered
from builder.engines.tensorrt import PLATFORM
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec, Profile


def place(options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
    """Place instances on each GPU, each with all profiles. Raises SpecError for profiles that leave a call out."""
    profiles = profiles_of(options.tensorrt.profiles, calls, plan=True)
    return Placement(
        # One group: Triton hands a call to any free instance, and picks the profile within it, the one whose optimum
        # is nearest (tensorrt_backend, GetMostOptimizedProfile). Groups of one profile each would defeat that.
        (InstanceGroup(options.instances, "KIND_GPU", tuple(options.gpu.devices), tuple(range(len(profiles)))),),
        platform=PLATFORM,
        cuda_graphs=[dict.fromkeys(graph.inputs, shape) for shape in graph_buckets(options.gpu, graph, calls)],
    )


def profiles_of(profiles: tuple[Profile, ...], calls: Calls, plan: bool) -> tuple[Profile, ...]:
    """Return the requested `profiles`, or the default ones. Raises SpecError if one of `calls` would fit none.

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
