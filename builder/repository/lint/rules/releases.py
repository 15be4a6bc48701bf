"""Backends, operators and releases

Models that the backend of a release refuses, and settings that it ignores or computes otherwise than was meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from builder.common.errors import BuilderError, first_line
from builder.common.releases import RELEASES, version_tuple
from builder.engines import onnxruntime, stock
from builder.engines.cuda import without_kernel
from builder.engines.onnxruntime import older
from builder.graphs.onnx.graph import check_release, read_graph
from builder.repository.lint.findings import Edit, Problem
from builder.repository.lint.graphs import readable
from builder.repository.lint.repository import ModelVersion, RepositoryModel
from builder.repository.lint.rule import WARNING, rule
from builder.runtime.contract import GenerationServing


@rule(
    "TR601",
    wrong="a graph of IR version 11, for Triton 24.10",
    right="the same graph, built with --triton 24.10",
    source="builder/common/releases.toml, which says how each limit was measured",
)
def runs_in_its_release(version: ModelVersion) -> Iterator[Problem]:
    """Check that the release's ONNX Runtime reads the graph and computes what was verified.

    Each Triton release carries one ONNX Runtime, which reads graphs up to an opset and an IR version. Some operators
    also changed their meaning: attention windows of GroupQueryAttention count one more key before 1.24, and up to
    1.19.2 several new tokens after a past are wrong.
    """
    served = version.serving
    if version.model.config.backend == onnxruntime.BACKEND and readable(version) is not None:
        yield from _refused(version, version.graph, in_process=False)
    elif served is not None and served.model is not None:
        is_onnx = served.model.endswith(".onnx")
        if isinstance(served, GenerationServing):  # OpenVINO opens .onnx too, with operators that it translates
            is_onnx = served.session.engine == onnxruntime.BACKEND
        if is_onnx:
            yield from _refused(version, version.path / served.model, in_process=True)


def _refused(version: ModelVersion, graph: Path, in_process: bool) -> Iterator[Problem]:
    """Yield why the ONNX Runtime that is to run a graph would refuse it, or compute something else."""
    release = version.model.release
    if release is None or not graph.is_file():
        return
    file = version.file(graph)
    try:
        read = read_graph(graph)
        check_release(read, release, in_process)
        if read.arithmetic == "bf16":
            without_kernel(read.operators, "bf16", release, in_process)
    except BuilderError as error:
        yield Problem(str(error), file=file)
    except (DecodeError, OSError, ValueError) as error:
        advice = "copy the file again, or build it again"
        yield Problem(f"{file} cannot be read: {first_line(error)}", advice, file=file)


@rule(
    "TR602",
    wrong='parameters { key: "PERFORMANCE_HINT" value { string_value: "FAST" } }',
    right='parameters { key: "PERFORMANCE_HINT" value { string_value: "LATENCY" } }',
    source="builder/engines/*/backend.toml, which names the file of each backend",
)
def has_values_that_its_backend_takes(model: RepositoryModel) -> Iterator[Problem]:
    """Check that parameters, accelerators and kinds of instances are those that the backend of the release takes.

    A backend reads its parameters when it loads the model, and refuses values that it does not know.
    """
    for reason in stock.refusals(model.document, model.release):
        parameters = [f"parameters[{name}]" for name in model.config.parameters if f"parameter {name} " in reason]
        field = "optimization" if "accelerator" in reason else "instance_group"
        yield Problem(reason, field=parameters[0] if parameters else field)


@rule(
    "TR603",
    WARNING,
    wrong='parameters { key: "session.intra_op.allow_spinning" value { string_value: "0" } }',
    right='parameters { key: "intra_op_thread_count" value { string_value: "1" } }',
    source="builder/engines/*/backend.toml, which names the file of each backend",
)
def has_no_parameters_without_effect(model: RepositoryModel) -> Iterator[Problem]:
    """Check that every parameter is one that the backend of the release reads.

    A backend silently ignores other parameters: a misspelt number of threads leaves the default, which is every core of
    the machine.
    """
    if model.config.backend not in stock.STOCK_BACKENDS:
        return  # any other backend may read any parameter
    for name in sorted(stock.without_effect(model.document, model.release)):
        problem = f"the parameter {name} has no effect: Triton's {model.config.backend} backend does not read it"
        field = f"parameters[{name}]"
        yield Problem(problem, "leave it out", field, fix=Edit(field))


@rule(
    "TR604",
    wrong="""classifier/
  1/model.onnx          # its weights are in model.onnx.data, which was left out of a copy""",
    right="""classifier/
  1/model.onnx
  1/model.onnx.data""",
    source="ONNX, docs/ExternalData.md",
)
def has_its_external_weights(version: ModelVersion) -> Iterator[Problem]:
    """Check that the files that an ONNX graph keeps its weights in are beside it, and as long as the graph says.

    ONNX Runtime opens them when it loads the graph, and takes no path that leads out of its folder.
    """
    if version.model.config.backend != onnxruntime.BACKEND or readable(version) is None:
        return
    folder, graph = version.graph.parent, version.file(version.graph)
    for name, needed in onnxruntime.external_files(version.graph).items():
        path = folder / name
        if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
            problem = f"the weights of {graph} are in {name}, which is not beside it"
            yield Problem(problem, "add the file", file=graph)
        elif path.stat().st_size < needed:
            problem = f"{name} has {path.stat().st_size} bytes, and {graph} reads {needed} of it"
            yield Problem(problem, "copy the file again", file=graph)


def _runtime_of_graph(version: ModelVersion) -> str | None:
    """Return the ONNX Runtime of the release that opens a version's graph; None if unknown, or for no such graph."""
    release = version.model.release
    if version.model.config.backend != onnxruntime.BACKEND or release is None or readable(version) is None:
        return None
    return RELEASES[release].onnxruntime


@rule(
    "TR605",
    WARNING,
    wrong="GroupQueryAttention with local_window_size 128, exported with ONNX Runtime 1.24 or later, for Triton 24.10",
    right="the same graph with local_window_size 127",
    source="microsoft/onnxruntime, pull request 25927; measured on 1.18.0 to 1.31.1",
)
def windows_mean_what_they_say(version: ModelVersion) -> Iterator[Problem]:
    """Check that an attention window counts as many keys as it says.

    GroupQueryAttention with local_window_size W attends W + 1 keys before ONNX Runtime 1.24, and W from then on. A
    graph that was verified on one side of 1.24 answers a little differently on the other, without a warning.
    `build-repo` writes into a graph which side it is for; for other graphs it is unknown.
    """
    carried = _runtime_of_graph(version)
    is_older = carried is not None and version_tuple(carried) < version_tuple(older.CHANGED)
    if is_older and older.unmarked_windows(version.graph):
        on = f"ONNX Runtime {carried} of Triton {version.model.release}"
        problem = f"its attention windows count one key more on {on} than from {older.CHANGED} on"
        advice = "compare its answers on that release, or take one less"
        yield Problem(problem, advice, file=version.file(version.graph))


@rule(
    "TR606",
    WARNING,
    wrong="Clip in fp16 with a min and no max, for Triton 24.10",
    right="Clip with both; 65504 is the largest fp16",
    source="microsoft/onnxruntime, issue 21957",
)
def clips_in_fp16_have_both_bounds(version: ModelVersion) -> Iterator[Problem]:
    """Check that a Clip of fp16 has both of its bounds.

    ONNX Runtime 1.19, which Triton 24.09 to 24.11 carry, answers 0 if max is left out.
    """
    carried = _runtime_of_graph(version)
    if carried is not None and carried.startswith("1.19.") and onnxruntime.open_clips(version.graph):
        problem = f"a Clip of fp16 without max is 0 on the ONNX Runtime of Triton {version.model.release}"
        yield Problem(problem, "write both bounds", file=version.file(version.graph))


@rule(
    "TR607",
    wrong="model_metrics { }   # for Triton 24.10",
    right="model_metrics { }   # for Triton 24.11 or later",
    source="common, protobuf/model_config.proto in the branches r24.04 to r26.07",
)
def has_fields_that_its_release_knows(model: RepositoryModel) -> Iterator[Problem]:
    """Check that every field of a configuration is one that the release knows.

    Triton parses a configuration with the fields of its own release, and refuses others.
    """
    for path, since in FIELDS.items():
        if model.release is not None and version_tuple(model.release) < version_tuple(since):
            fields = [field for field in model.spans if re.fullmatch(path, field)]
            if fields:
                name = fields[0].split(".")[-1]
                yield Problem(f"Triton {model.release} does not know the field {name}", f"it is in {since}", fields[0])


FIELDS = {  # by field, the first release that knows it
    r"(input|output)(\[\d+\])?\.is_non_linear_format_io": "24.08",
    r"model_metrics": "24.11",
    r"ensemble_scheduling\.max_inflight_requests": "25.11",
}
