"""TensorRT as an engine."""

from __future__ import annotations

from builder.common.errors import SpecError
from builder.common.releases import version_tuple
from builder.engines.onnxruntime.engine import OnnxRuntime
from builder.engines.placement import InstanceGroup, Placement, graph_buckets
from builder.engines.profiles import Calls, profiles_of
from builder.engines.tensorrt import PLATFORM
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.runtime.contract import Session

OWN_MEMORY_SINCE = "25.05"  # the first branch of tensorrt_backend whose model_state.cc reads it


class TensorRt(OnnxRuntime):
    """On the machine that builds, ONNX Runtime opens the ONNX that a plan is compiled from."""

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        """Place instances on each GPU, each with all profiles. Raises SpecError for profiles that leave a call out."""
        profiles = profiles_of(options.tensorrt.profiles, calls, plan=True)
        return Placement(
            # One group: Triton hands a call to any free instance, and picks the profile within it, the one whose
            # optimum is nearest (tensorrt_backend, GetMostOptimizedProfile). Groups of one profile each would defeat
            # that.
            (InstanceGroup(options.instances, "KIND_GPU", tuple(options.gpu.devices), tuple(range(len(profiles)))),),
            _memory_of_profiles(options.triton),
            PLATFORM,
            cuda_graphs=[dict.fromkeys(graph.inputs, shape) for shape in graph_buckets(options.gpu, graph, calls)],
        )

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session:
        raise SpecError("a TensorRT plan runs in a Triton model of its own: leave --executor out")

    def served_version(self, triton: str, in_process: bool) -> str:
        raise SpecError("a TensorRT plan runs on a GPU, and there is none here to run it in another version")


def _memory_of_profiles(triton: str) -> dict[str, str]:
    """Return the parameter by which the context of each profile takes that profile's memory alone.

    By default each takes that of the largest profile (tensorrt_backend, README.md; pull request 108).
    """
    since = version_tuple(triton) >= version_tuple(OWN_MEMORY_SINCE)
    return {"execution_context_allocation_strategy": "ON_PROFILE_CHANGE"} if since else {}


ENGINE = TensorRt()
