"""Warm-ups and sequences

Calls that Triton makes when it loads a model, and the tensors that it adds to requests of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.repository.lint.findings import Problem
from builder.repository.lint.repository import RepositoryModel
from builder.repository.lint.rule import WARNING, rule
from builder.repository.sharing.hosting import has_shape

GENERATE = "core, src/backend_model_instance.cc, GenerateWarmupData; src/infer_request.cc, Normalize"
FOLDER = "warmup"
STRING = model_config_pb2.TYPE_STRING
SIZES = {
    model_config_pb2.DataType.Value(f"TYPE_{name}"): size
    for names, size in (
        (("BOOL", "UINT8", "INT8"), 1),
        (("UINT16", "INT16", "FP16", "BF16"), 2),
        (("UINT32", "INT32", "FP32"), 4),
        (("UINT64", "INT64", "FP64"), 8),
    )
    for name in names
}


def _inputs(model: RepositoryModel) -> Iterator[tuple[str, str, Any]]:
    """Yield the inputs of every warm-up that Triton runs: field, name and Input."""
    for field, warm_up in model.entries("model_warmup"):
        if warm_up.batch_size and not model.is_ensemble:
            for name in sorted(warm_up.inputs):
                yield f"{field}.inputs[{name}]", name, warm_up.inputs[name]


@rule(
    "TR351",
    WARNING,
    wrong="""model_warmup {
  name: "short"
  inputs { key: "text" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
}""",
    right="""model_warmup {
  name: "short" batch_size: 1
  inputs { key: "text" value { data_type: TYPE_STRING dims: [ 1 ] zero_data: true } }
}""",
    source="core, src/backend_model_instance.cc, GenerateWarmupData",
)
def warm_ups_are_made(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a warm-up has a batch_size of 1 or more, with max_batch_size 0 too.

    Triton skips one of batch_size 0, the value of a field that is left out, and the first request pays.
    """
    for field, warm_up in model.entries("model_warmup"):
        if not warm_up.batch_size:
            problem = f"the warm-up {warm_up.name!r} is skipped: its batch_size is 0"
            yield Problem(problem, "write batch_size: 1", field)


@rule(
    "TR352",
    wrong="""# and there is no warmup/ids
inputs { key: "ids" value { data_type: TYPE_INT64 dims: [ 16 ] input_data_file: "ids" } }""",
    right="""# and warmup/ids has 128 bytes
inputs { key: "ids" value { data_type: TYPE_INT64 dims: [ 16 ] input_data_file: "ids" } }""",
    source=GENERATE,
)
def warm_ups_have_their_data(model: RepositoryModel) -> Iterator[Problem]:
    """Check that each input of a warm-up says where its data is from, and a file in warmup/ is as long as its shape.

    The data is zero_data, random_data, or the name of a file. Triton refuses the model otherwise.
    """
    for field, name, tensor in _inputs(model):
        if tensor.WhichOneof("input_data_type") is None:
            yield Problem(f"the warm-up does not say what {name} is", "write zero_data: true", field)
        if not tensor.input_data_file:
            continue
        file = f"{FOLDER}/{tensor.input_data_file}"
        size = (model.path / file).stat().st_size if (model.path / file).is_file() else None
        needed = prod(tensor.dims) * SIZES.get(tensor.data_type, 0)
        if size is None:
            yield Problem(f"{file} is missing", "add it, or write zero_data: true", field)
        elif tensor.data_type != STRING and size < needed:
            problem = f"{file} has {size} bytes, and {name} needs {needed}"
            yield Problem(problem, "write a file as long as the shape says", field)


@rule(
    "TR353",
    wrong="""input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }
model_warmup { batch_size: 1 inputs { key: "ids" value { data_type: TYPE_INT32 dims: [ -1 ] zero_data: true } } }""",
    right="""input { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] }
model_warmup { batch_size: 1 inputs { key: "ids" value { data_type: TYPE_INT64 dims: [ 16 ] zero_data: true } } }""",
    source=GENERATE,
)
def warm_ups_are_requests(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a warm-up is a request that the model takes: every required input, with its type and a shape of it.

    Sizes are numbers, not -1, and without the batch. Triton refuses the model when a warm-up fails.
    """
    declared = {tensor.name: tensor for tensor in model.config.input}
    required = {name for name, tensor in declared.items() if not tensor.optional}
    for field, warm_up in model.entries("model_warmup"):
        missing = sorted(required - set(warm_up.inputs)) if warm_up.batch_size and not model.is_ensemble else []
        if missing:
            problem = f"the warm-up {warm_up.name!r} has no {missing[0]}, which is required"
            yield Problem(problem, "add the input", field)
    for field, name, entry in _inputs(model):
        dims, tensor = list(entry.dims), declared.get(name)
        if -1 in dims:
            yield Problem(f"the warm-up of {name} has a size of -1", "write a number", field)
        elif tensor is not None and tensor.data_type != entry.data_type:
            types = [model_config_pb2.DataType.Name(kind) for kind in (entry.data_type, tensor.data_type)]
            yield Problem(f"the warm-up of {name} is {types[0]} and the input {types[1]}", f"write {types[1]}", field)
        elif tensor is not None and not has_shape(dims, tensor.dims):
            problem = f"the warm-up of {name} has dims {dims} and the input {list(tensor.dims)}"
            yield Problem(problem, "write the sizes of one request, without the batch", field)


@rule(
    "TR354",
    WARNING,
    wrong='inputs { key: "input_idz" value { data_type: TYPE_INT64 dims: [ 16 ] zero_data: true } }',
    right='inputs { key: "input_ids" value { data_type: TYPE_INT64 dims: [ 16 ] zero_data: true } }',
    source=GENERATE,
)
def warm_ups_name_inputs(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a warm-up gives inputs of the model, or tensors that control its sequences.

    Triton passes any other name on to the backend, which ignores it.
    """
    config, sequence = model.config, model.config.sequence_batching
    known = {tensor.name for tensor in (*config.input, *sequence.control_input)}
    known |= {state.input_name for state in sequence.state}
    for field, name, _ in _inputs(model):
        if known and name not in known:
            yield Problem(f"the warm-up gives {name}, which is not an input", "leave it out", field)


@rule(
    "TR355",
    wrong="""max_batch_size: 8
model_warmup { name: "full" batch_size: 16 }""",
    right="""max_batch_size: 8
model_warmup { name: "full" batch_size: 8 }""",
    source="python_backend, src/python_be.cc; onnxruntime_backend, src/onnxruntime.cc, ProcessRequests",
)
def warm_ups_are_batches(model: RepositoryModel) -> Iterator[Problem]:
    """Check that a warm-up has at most max_batch_size rows.

    Triton hands all of them to the backend at once; with more rows the backend refuses the call, and Triton the model.
    """
    limit = model.config.max_batch_size
    for field, warm_up in model.entries("model_warmup"):
        if 0 < limit < warm_up.batch_size and not model.is_ensemble:
            problem = f"the warm-up {warm_up.name!r} has {warm_up.batch_size} rows and max_batch_size is {limit}"
            yield Problem(problem, f"write batch_size: {limit}", f"{field}.batch_size")


@rule(
    "TR361",
    wrong='control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 1 ] } }',
    right='control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }',
    source="core, src/model_config_utils.cc, GetBooleanSequenceControlProperties and GetTypedSequenceControlProperties",
)
def controls_of_sequences_are_whole(model: RepositoryModel) -> Iterator[Problem]:
    """Check that each control of a sequence has a name of its own, occurs once, and has the values of its kind.

    Start, end and ready have two values of a type. The correlation id has a data_type instead: a 32- or 64-bit integer,
    or TYPE_STRING. Triton refuses others.
    """
    seen_names: set[str] = set()
    seen_kinds: set[int] = set()
    for field, tensor in model.entries("sequence_batching.control_input"):
        if not tensor.name:
            yield Problem("a control of the sequence has no name", "write one", field)
        if tensor.name in seen_names:
            yield Problem(f"two controls of the sequence are called {tensor.name!r}", "rename one", field)
        seen_names.add(tensor.name)
        for control in tensor.control:
            kind = CONTROL.Kind.Name(control.kind)
            if control.kind in seen_kinds:
                yield Problem(f"two tensors are {kind}", "leave one out", field)
            seen_kinds.add(control.kind)
            wrong = _wrong_control(control)
            if wrong is not None:
                yield Problem(f"{kind} {wrong[0]}", wrong[1], field)


CONTROL = model_config_pb2.ModelSequenceBatching.Control
PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")
IDS = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def _wrong_control(control: Any) -> tuple[str, str] | None:
    """Return what is wrong with one control, and what to write."""
    lengths = {name: len(getattr(control, name)) for name in PAIRS}
    pairs = {name: length for name, length in lengths.items() if length}
    if control.kind == CONTROL.CONTROL_SEQUENCE_CORRID:
        if pairs:
            return f"has {next(iter(pairs))}", "write its data_type alone"
        name = model_config_pb2.DataType.Name(control.data_type)
        return None if name in IDS else (f"is {name}", f"write one of {', '.join(IDS)}")
    if len(pairs) != 1:
        return f"has {len(pairs)} of {', '.join(PAIRS[:-1])} and {PAIRS[-1]}", "write one of them"
    return None if set(pairs.values()) == {2} else ("has not two values", "write those of false and of true")


@rule(
    "TR362",
    wrong="sequence_batching { direct { minimum_slot_utilization: 50 } }",
    right="sequence_batching { direct { minimum_slot_utilization: 0.5 } }",
    source="core, src/model_config_utils.cc, ValidateModelConfig; src/sequence_batch_scheduler",
)
def states_of_sequences_are_whole(model: RepositoryModel) -> Iterator[Problem]:
    """Check that minimum_slot_utilization is from 0 to 1, and that initial states have a name and fit their state.

    A state has one initial state at most, with numbers for every size.
    """
    batching = model.config.sequence_batching
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        field = "sequence_batching.direct.minimum_slot_utilization"
        yield Problem(f"it is {batching.direct.minimum_slot_utilization:g}", "write a number from 0 to 1", field)
    for field, state in model.entries("sequence_batching.state"):
        if len(state.initial_state) > 1:
            yield Problem(f"{state.input_name} has {len(state.initial_state)} initial states", "write one", field)
        for initial in state.initial_state:
            if not initial.name:
                yield Problem(f"the initial state of {state.input_name} has no name", "write one", field)
            elif initial.data_type != state.data_type or not has_shape(initial.dims, state.dims):
                problem = f"the initial state of {state.input_name} has another type or shape than the state"
                yield Problem(problem, "write the same, with numbers for every size", field)
            elif -1 in initial.dims:
                yield Problem(f"the initial state of {state.input_name} has a size of -1", "write a number", field)
