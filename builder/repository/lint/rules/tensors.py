"""Tensors

Inputs and outputs of a configuration, by themselves and against the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2

from builder.engines import graph_engine, stock, tensorrt
from builder.repository.lint.findings import Problem
from builder.repository.lint.graphs import Unreadable, readable, signature_of
from builder.repository.lint.repository import ModelVersion, RepositoryModel
from builder.repository.lint.rule import WARNING, rule

TENSORS = ("input", "output")
SHAPE = "core, src/model_config_utils.cc, ValidateIOShape"
IMAGE = 3  # dims of an image
BATCH_TYPES = (model_config_pb2.TYPE_INT32, model_config_pb2.TYPE_FP32)


@rule(
    "TR201",
    wrong="1/model.onnx that git-lfs left as a pointer",
    right="1/model.onnx with its bytes",
)
def can_be_read(version: ModelVersion) -> Iterator[Problem]:
    """Check that the file of a model is what its name says: an ONNX graph, or OpenVINO's two files.

    A download that was cut, or a pointer of git-lfs, has the right name and is not a graph.
    """
    facts = version.model.engine
    if facts is not None and not facts.runs_checkpoint and version.graph.is_file():
        for part in graph_engine(facts.name).files(version.graph):
            if not part.is_file():
                yield Problem(f"{version.file(part)} is missing", file=version.file(part))
    try:
        signature_of(version)
    except Unreadable as error:
        file = version.file(version.graph)
        yield Problem(f"{file} cannot be read: {error}", "build it again", file=file)


@rule(
    "TR202",
    wrong="""# the graph has input_ids of int64, (batch, length)
input { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] }""",
    right="""input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }""",
    source="onnxruntime_backend, src/onnxruntime.cc, ValidateInputs; openvino_backend, src/openvino.cc, ValidateInputs",
)
def has_the_tensors_of_its_graph(version: ModelVersion) -> Iterator[Problem]:
    """Check that inputs and outputs are those of the graph: names, types, dimensions, and the batch in front of them.

    With max_batch_size above 0 the first dimension of every tensor of the graph is the batch, of any size, and dims
    leave it out; with 0 dims are the whole shape. A plan of TensorRT is compared with the graph that it was compiled
    from.
    """
    signature = readable(version)
    tensors = list(version.model.entries(*TENSORS))
    whole = all(tensor.name and tensor.data_type and tensor.dims for _, tensor in tensors)
    if signature is None or not whole or not tensors:
        return  # TR204 and TR103 report it
    for text in stock.mismatches(version.model.document, signature):
        named = [field for field, tensor in tensors if f" {tensor.name}," in text or f" {tensor.name} as " in text]
        yield Problem(text, field=named[0] if named else "input")


@rule(
    "TR203",
    wrong="""backend: "openvino"
max_batch_size: 8
input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }""",
    right="""backend: "openvino"
max_batch_size: 0
input { name: "input_ids" data_type: TYPE_INT64 dims: [ -1, -1 ] }""",
    source="openvino_backend, src/openvino.cc, ValidateConfigureModel and ProcessRequests",
)
def runs_calls_of_one_row(version: ModelVersion) -> Iterator[Problem]:
    """Check that a model takes calls of fewer rows than max_batch_size.

    Triton's OpenVINO backend sets the graph's batch to max_batch_size, and then refuses every call of another number
    of rows.
    """
    wrong = stock.wrong_batch(version.model.document, 1) if readable(version) is not None else None
    if wrong is not None:
        yield Problem(wrong, field="max_batch_size")


@rule(
    "TR204",
    wrong='input { name: "pixels" dims: [ 3, 224, 224 ] }',
    right='input { name: "pixels" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }',
    source=SHAPE,
)
def tensors_have_name_type_and_dims(model: RepositoryModel) -> Iterator[Problem]:
    """Check that every tensor has a name, a data_type and dims; each size in dims is at least 1, or -1 for any size.

    A scalar has dims: [ 1 ]. Triton refuses a tensor without them, and sizes of 0.
    """
    for field, tensor in model.entries(*TENSORS):
        lacks = [name for name in ("name", "data_type", "dims") if not getattr(tensor, name)]
        if lacks:
            yield Problem(f"the {field} has no {lacks[0]}", f"write its {lacks[0]}", field)
        wrong = [size for size in (*tensor.dims, *tensor.reshape.shape) if size < 1 and size != -1]
        if wrong:
            advice = "write sizes of at least 1, or -1 for any"
            yield Problem(f"{tensor.name} has a size of {wrong[0]}", advice, f"{field}.dims")


@rule(
    "TR205",
    wrong="""input { name: "pixels" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] reshape { shape: [ 224, 224 ] } }""",
    right="""input { name: "pixels" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] reshape { shape: [ 672, 224 ] } }""",
    source=SHAPE,
)
def reshapes_keep_every_element(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a reshape has as many elements as dims, and the same sizes of -1 in the same places.

    Between two sizes of -1 the elements are counted on both sides. An empty reshape is for one element, of a model
    that batches.
    """
    for field, tensor in model.entries(*TENSORS):
        if not tensor.HasField("reshape"):
            continue
        dims, shape = list(tensor.dims), list(tensor.reshape.shape)
        empty_row = not shape and model.config.max_batch_size > 0 and dims == [1] * len(dims)
        if not empty_row and (not shape or _products(dims) != _products(shape)):
            problem = f"{tensor.name} has dims {dims} and is reshaped to {shape}"
            yield Problem(problem, "write a shape of as many elements", f"{field}.reshape")


def _products(sizes: list[int]) -> list[int]:
    """Return the products of the sizes between those of -1."""
    products = [1]
    for size in sizes:
        if size == -1:
            products.append(1)
        else:
            products[-1] *= size
    return products


@rule(
    "TR206",
    WARNING,
    wrong="""input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "text" data_type: TYPE_INT64 dims: [ -1 ] }""",
    right="""input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }""",
    source="core, src/model.cc, Model::Init: what is inserted first stays",
)
def names_of_tensors_are_different(model: RepositoryModel) -> Iterator[Problem]:
    """Check that no two inputs and no two outputs have one name.

    Triton checks requests against the first of them and counts both as required: no request is ever complete.
    """
    for kind in TENSORS:
        seen: set[str] = set()
        for field, tensor in model.entries(kind):
            if tensor.name in seen:
                yield Problem(f"two {kind}s are called {tensor.name!r}", "rename one", field)
            seen.add(tensor.name)


@rule(
    "TR207",
    wrong='input { name: "pixels" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 224, 224 ] }',
    right='input { name: "pixels" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 224, 224 ] }',
    source="core, src/model_config_utils.cc, ValidateModelInput, ValidateModelOutput, ValidateNonLinearFormatIO",
)
def formats_fit(model: RepositoryModel) -> Iterator[Problem]:
    """Check that an image format has three dims, and shape tensors and non-linear formats are for TensorRT alone.

    Triton refuses the others.
    """
    on_tensorrt = model.config.platform == tensorrt.PLATFORM or model.config.backend == tensorrt.BACKEND
    for field, tensor in model.entries(*TENSORS):
        if getattr(tensor, "format", 0) and len(tensor.dims) != IMAGE:
            problem = f"{tensor.name} is an image of {len(tensor.dims)} dims"
            yield Problem(problem, "write three, or leave format out", f"{field}.format")
        if not on_tensorrt and (tensor.is_shape_tensor or tensor.is_non_linear_format_io):
            name = "is_shape_tensor" if tensor.is_shape_tensor else "is_non_linear_format_io"
            yield Problem(f"{tensor.name} has {name}, which is for TensorRT", "leave it out", f"{field}.{name}")


@rule(
    "TR208",
    wrong="""batch_input { kind: BATCH_ITEM_SHAPE target_name: "s" data_type: TYPE_INT64 source_input: "pixels" }""",
    right="""batch_input { kind: BATCH_ITEM_SHAPE target_name: "s" data_type: TYPE_INT32 source_input: "pixels" }""",
    source="core, src/model_config_utils.cc, ValidateBatchIO",
)
def batch_tensors_have_sources(model: RepositoryModel) -> Iterator[Problem]:
    """Check that batch_input and batch_output each have one source, an input; an input of a batch is INT32 or FP32.

    A batch_output is scattered into outputs of the model, each once.
    """
    inputs = {tensor.name for tensor in model.config.input}
    outputs = {tensor.name for tensor in model.config.output}
    for kind in ("batch_input", "batch_output"):
        for field, entry in model.entries(kind):
            if len(entry.source_input) != 1:
                yield Problem(f"the {kind} has {len(entry.source_input)} sources", "write one source_input", field)
            for name in set(entry.source_input) - inputs:
                yield Problem(f"the {kind} has the source {name!r}, which is not an input", "name an input", field)
            if kind == "batch_input" and entry.data_type not in BATCH_TYPES:
                yield Problem("the batch_input is of another type", "write TYPE_INT32 or TYPE_FP32", field)
            targets = list(entry.target_name) if kind == "batch_output" else []
            for name in sorted({name for name in targets if name not in outputs or targets.count(name) > 1}):
                problem = f"the batch_output has the target {name!r}, which is not an output, or twice"
                yield Problem(problem, "name an output once", field)
