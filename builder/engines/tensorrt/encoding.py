"""TensorRT's plans of encoders, and the files from which a plan is compiled elsewhere.

A plan belongs to one GPU and one TensorRT, so a machine without them writes all but the plan: the graph, its profiles,
calls to compare on, and the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from builder.common.progress import Stage
from builder.common.releases import RELEASES
from builder.engines import onnxruntime
from builder.engines.encoding import EncodingEngine, Variant
from builder.engines.gpu import least_capability
from builder.engines.placement import TOKEN_INPUTS
from builder.engines.profiles import Calls, Shape, input_shapes, largest_calls, profiles_of
from builder.engines.tensorrt import BACKEND, refuse_release
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.graphs.onnx.graph import MODEL_FILE, Graph
from builder.options import BuildSpec, Profile
from builder.runtime.contract import EncoderServing
from builder.runtime.recipe import compile as program

SAMPLE_CALLS = 4  # of the samples' calls, from the shortest to the longest
# How far a plan may be from ONNX Runtime on the CPU, of the largest value: kernels round in other places.
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-2, "bf16": 1e-1, "int8-static": 1e-1, "fp8": 2e-1}


class TensorRtEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"tensorrt": "TensorRT"}
    runs_rest_in_half = True  # ONNX Runtime's TensorRT allows one lower precision, which is int8
    variants = tuple(
        Variant(precision, BACKEND, target="tensorrt") for precision in ("fp32", "fp16", "bf16", "int8-static", "fp8")
    )

    def source(self, graph: Graph, target: str, folder: Path) -> Graph:
        return for_tensorrt(graph, folder)

    def files(
        self,
        graph: Graph,
        options: BuildSpec,
        serving: EncoderServing,
        feeds: Sequence[Mapping[str, np.ndarray]],
        folder: Path,
        stage: Stage,
    ) -> Mapping[str, bytes | Path]:
        """Return the recipe from which a GPU compiles the plan.

        Raises SpecError for profiles that leave a call out.
        """
        from polygraphy.comparator import RunResults  # here, so that builds for a CPU do not load it
        from polygraphy.comparator.struct import IterationResult
        from polygraphy.json import save_json

        with stage("recipe"):
            limits = Calls(options.max_batch_size, serving.max_length, serving.batching.token_budget)
            profiles = profiles_of(options.tensorrt.profiles, limits, plan=True)
            run = onnxruntime.infer(graph, options.build_threads)
            step = max(1, len(feeds) // SAMPLE_CALLS)
            shapes = [shape for p in profiles for shape in (p.opt, *largest_calls(p, limits))]
            calls = [{name: feed[name] for name in graph.inputs} for feed in feeds[::step]]
            calls.extend(_enlarged(calls[0], shape) for shape in dict.fromkeys(shapes))
            answers = [IterationResult(dict(run(call)), runner_name="ONNX Runtime") for call in calls]
            inputs, outputs = folder / "inputs.json", folder / "outputs.json"
            save_json(calls, str(inputs))
            RunResults([("ONNX Runtime", answers)]).save(str(outputs))
            recipe = _recipe(options, graph, profiles)
            return {
                **{f"1/{program.FOLDER}/{file.name}": file for file in graph.files},
                f"1/{program.FOLDER}/recipe.json": json.dumps(recipe, indent=1).encode(),
                f"1/{program.FOLDER}/inputs.json": inputs,
                f"1/{program.FOLDER}/outputs.json": outputs,
                f"1/{program.FOLDER}/compile.py": Path(program.__file__),
            }

    def refuse_on_gpu(self, spec: BuildSpec, precision: str) -> None:
        refuse_release(spec.triton)


def _recipe(options: BuildSpec, graph: Graph, profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return the content of recipe.json, which compile.py reads."""
    return {
        "onnx": MODEL_FILE,
        "onnx_sha256": program.sha256(*program.graph_files(graph.path.parent, MODEL_FILE)),
        "triton": options.triton,
        "tensorrt": RELEASES[options.triton].tensorrt,
        "precision": options.precision,
        "least_capability": least_capability(options.target, options.precision, options.triton)[0],
        "tolerance": TOLERANCE[options.precision],
        "profiles": [input_shapes(profile, graph.inputs, TOKEN_INPUTS) for profile in profiles],
        "workspace": None if options.tensorrt.workspace_mb is None else options.tensorrt.workspace_mb << 20,
        "optimization_level": options.tensorrt.optimization_level,
    }


def _enlarged(call: Mapping[str, np.ndarray], shape: Shape) -> dict[str, np.ndarray]:
    """Return a call of `shape` made of the rows of another, their tokens repeated; an axis of the task's own stays.

    A profile is compared where it is tuned and at its end too: kernels differ there from those of a single text.
    """
    rows, length = shape
    repeated = {}
    for name, values in call.items():
        chosen = values[np.arange(rows) % len(values)]
        repeated[name] = chosen[:, np.arange(length) % values.shape[1]] if name in TOKEN_INPUTS else chosen[:, :length]
    return repeated


ENCODING = TensorRtEncoding()
