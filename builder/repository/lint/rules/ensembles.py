"""Ensembles

Tensors that flow from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.repository.lint.findings import Edit, Problem
from builder.repository.lint.repository import ENSEMBLE, RepositoryModel
from builder.repository.lint.rule import rule

SCHEDULING = "core, src/model_config_utils.cc, ValidateEnsembleSchedulingConfig"
MAPPING = "core, src/ensemble_scheduler/ensemble_utils.cc, ValidateTensorMapping"
STEP = "ensemble_scheduling.step"


def _called(model: RepositoryModel) -> Iterator[tuple[str, Any, RepositoryModel]]:
    """Yield the steps whose model is in the repository."""
    for field, step in model.entries(STEP):
        target = model.repository.by_name.get(step.model_name)
        if target is not None:
            yield field, step, target


@rule(
    "TR551",
    wrong="""backend: "ensemble"
ensemble_scheduling { step { model_name: "tokenizer" } }""",
    right="""platform: "ensemble"
ensemble_scheduling { step { model_name: "tokenizer" } }""",
    source=SCHEDULING,
)
def an_ensemble_is_one(model: RepositoryModel) -> Iterator[Problem]:
    """Check that an ensemble has platform: "ensemble", no backend, and ensemble_scheduling with steps.

    Triton refuses a model that has only one of them.
    """
    config = model.config
    if not model.is_ensemble:
        if config.backend == ENSEMBLE:
            yield Problem("its backend is 'ensemble'", 'write platform: "ensemble" instead', "backend")
        return
    if config.platform != ENSEMBLE:
        yield Problem("ensemble_scheduling without the platform", 'write platform: "ensemble"', "ensemble_scheduling")
    if config.backend:
        yield Problem(f"an ensemble with the backend {config.backend!r}", "leave backend out", "backend")
    if not config.ensemble_scheduling.step:
        yield Problem("an ensemble without steps", "write its steps", "ensemble_scheduling")


@rule(
    "TR552",
    wrong="""platform: "ensemble"
instance_group { count: 2 }""",
    right='platform: "ensemble"',
    source=SCHEDULING,
)
def an_ensemble_runs_nothing_itself(model: RepositoryModel) -> Iterator[Problem]:
    """Check that an ensemble has no instance_group, no optimization and no model_warmup.

    They belong to its steps. Triton refuses an ensemble with them.
    """
    for name in ("instance_group", "optimization", "model_warmup"):
        value = getattr(model.config, name)
        if model.is_ensemble and (model.config.HasField(name) if name == "optimization" else len(value)):
            yield Problem(f"an ensemble with {name}", "leave it out: its steps have it", name, fix=Edit(name))


@rule(
    "TR553",
    wrong="""step {
  model_name: "classifier"
  input_map { key: "input_ids" value: "idz" }       # nothing writes idz
  output_map { key: "scores" value: "scores" }
}""",
    right="""step {
  model_name: "classifier"
  input_map { key: "input_ids" value: "ids" }       # an output of the step before
  output_map { key: "scores" value: "scores" }
}""",
    source="core, src/model_config_utils.cc, BuildEnsembleGraph and ValidateEnsembleSchedulingConfig",
)
def tensors_of_an_ensemble_are_connected(model: RepositoryModel) -> Iterator[Problem]:
    """Check that every tensor of an ensemble is written once, before it is read, and is read or is an output.

    Each step names its model and maps inputs and outputs. A circle of steps never starts, and Triton refuses a tensor
    that no step reads, like one that no step writes.
    """
    steps = list(model.entries(STEP))
    for field, step in steps:
        lacks = [name for name in ("model_name", "input_map", "output_map") if not getattr(step, name)]
        if lacks:
            yield Problem(f"the step {step.model_name or field} has no {lacks[0]}", f"write its {lacks[0]}", field)
            return
    if steps:
        yield from _unconnected(model, steps)


def _unconnected(model: RepositoryModel, steps: Sequence[tuple[str, Any]]) -> Iterator[Problem]:
    written: set[str] = set()
    for field, step in steps:
        for tensor in sorted(step.output_map.values()):
            if tensor in written:
                yield Problem(f"{tensor} is written twice", "give one of them another name", field)
            written.add(tensor)
    read = {tensor for _, step in steps for tensor in step.input_map.values()}
    outputs = {tensor.name for tensor in model.config.output}
    ready = _ready({tensor.name for tensor in model.config.input}, steps)
    for kind, verb in (("input", "reads"), ("output", "writes")):
        for field, tensor in model.entries(kind):
            if tensor.name not in read | written:
                yield Problem(f"no step {verb} the {kind} {tensor.name}", "leave it out, or map it", field)
    for name in sorted((read | written) - ready):
        where = next(field for field, step in steps if name in (*step.input_map.values(), *step.output_map.values()))
        yield Problem(f"{name} is never written", "map an output of an earlier step to it", where)
    for name in sorted((written & ready) - read - outputs):
        where = next(field for field, step in steps if name in step.output_map.values())
        yield Problem(f"nothing reads {name}", "leave it out of output_map, or make it an output", where)


def _ready(tensors: set[str], steps: Sequence[tuple[str, Any]]) -> set[str]:
    """Return the tensors that can be computed from `tensors`."""
    ready = set(tensors)
    for _ in steps:  # at the latest, the last step runs after all others
        for _, step in steps:
            if set(step.input_map.values()) <= ready:
                ready |= set(step.output_map.values())
    return ready


@rule(
    "TR554",
    wrong='step { model_name: "tokenizer" }   # and the model is called tokenizer',
    right='step { model_name: "tokenizer" }',
    source="core, src/model_repository_manager/model_repository_manager.cc, DependencyGraph",
)
def steps_are_models(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the model of each step is in the repository, with the version that the step names.

    An ensemble does not load before all of its steps have.
    """
    for field, step in model.entries(STEP):
        target = model.repository.by_name.get(step.model_name)
        if not step.model_name:
            continue  # TR553 reports it
        if target is None:
            problem = f"the step {step.model_name} is not in the repository"
            yield Problem(problem, "add the model, or name another", f"{field}.model_name")
        elif step.model_version > 0 and step.model_version not in target.served_numbers:
            problem = f"the step {step.model_name} asks for version {step.model_version}, which is not served"
            yield Problem(problem, "write model_version: -1 for the latest", f"{field}.model_version")


@rule(
    "TR555",
    wrong="""# ensemble "a" has a step "b", and ensemble "b" a step "a\"""",
    right="""# ensemble "a" has a step "b", and "b" has none that leads back""",
    source="core, src/model_repository_manager/model_repository_manager.cc, CircularDependencyCheck",
)
def ensembles_do_not_call_each_other(model: RepositoryModel) -> Iterator[Problem]:
    """Check that no ensemble is a step of itself, or of its own steps.

    Each would wait for the other to load.
    """
    if model.name in _reached(model, set()):
        yield Problem("the ensemble is a step of its own steps", "take one of the steps out", "ensemble_scheduling")


def _reached(model: RepositoryModel, seen: set[str]) -> set[str]:
    """Add to `seen` the models that `model` calls, directly or through others, and return it."""
    for _, _, target in _called(model):
        if target.name not in seen:
            seen.add(target.name)
            _reached(target, seen)
    return seen


@rule(
    "TR556",
    wrong='input_map { key: "ids" value: "tokens" }         # the model calls it input_ids',
    right='input_map { key: "input_ids" value: "tokens" }',
    source=MAPPING,
)
def steps_map_tensors_of_their_models(model: RepositoryModel) -> Iterator[Problem]:
    """Check that keys of input_map and output_map are tensors of the step's model, and every required input is mapped.

    Triton compares them when the ensemble loads. A model whose configuration declares no tensors is skipped.
    """
    for field, step, target in _called(model):
        inputs = {tensor.name: tensor.optional for tensor in target.config.input}
        outputs = sorted({tensor.name for tensor in target.config.output})
        if not inputs or not outputs:
            continue
        for kind, mapping, known in (("input", step.input_map, list(inputs)), ("output", step.output_map, outputs)):
            for name in sorted(set(mapping) - set(known)):
                problem = f"{target.name} has no {kind} {name}; it has {', '.join(known)}"
                yield Problem(problem, "map one of them", f"{field}.{kind}_map[{name}]")
        for name, optional in inputs.items():
            if not optional and name not in step.input_map:
                yield Problem(f"the input {name} of {target.name} is not mapped", "map it", field)


@dataclass(frozen=True)
class _Tensor:
    """Tensor of an ensemble as one model declares it."""

    owner: str
    data_type: int
    dims: tuple[int, ...]
    batched: bool

    def differs(self, other: _Tensor) -> str | None:
        """Return how two declarations differ (ValidateTensorConsistency): -1 fits any size, with or without batch."""
        if self.data_type != other.data_type:
            types = [model_config_pb2.DataType.Name(kind) for kind in (self.data_type, other.data_type)]
            return f"{types[0]} in {self.owner} and {types[1]} in {other.owner}"
        if _alike(self.dims, other.dims) or _alike(self.whole, other.whole):
            return None
        return f"{list(self.whole)} in {self.owner} and {list(other.whole)} in {other.owner}"

    @property
    def whole(self) -> tuple[int, ...]:
        return (-1, *self.dims) if self.batched else self.dims


def _alike(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(None not in pair and (-1 in pair or pair[0] == pair[1]) for pair in zip_longest(one, other))


@rule(
    "TR557",
    wrong="""# the tokenizer's output input_ids is TYPE_INT64, the classifier's input TYPE_INT32
output_map { key: "input_ids" value: "ids" }
input_map { key: "input_ids" value: "ids" }""",
    right="""# both are TYPE_INT64
output_map { key: "input_ids" value: "ids" }
input_map { key: "input_ids" value: "ids" }""",
    source="core, src/ensemble_scheduler/ensemble_utils.cc, ValidateTensorConsistency",
)
def tensors_of_an_ensemble_have_one_type_and_shape(model: RepositoryModel) -> Iterator[Problem]:
    """Check that all steps that write or read a tensor of an ensemble declare one type and shape of it.

    A size of -1 fits any, and the batch is counted for models that batch.
    """
    tensors: dict[str, _Tensor] = {}
    for entry in (*model.config.input, *model.config.output) if model.config.ensemble_scheduling.step else ():
        dims = entry.reshape.shape if entry.HasField("reshape") else entry.dims
        batched = model.config.max_batch_size > 0
        tensors[entry.name] = _Tensor(f"{model.name} itself", entry.data_type, tuple(dims), batched)
    for field, step, target in _called(model):
        inputs = [("input_map", step.input_map, entry) for entry in target.config.input]
        outputs = [("output_map", step.output_map, entry) for entry in target.config.output]
        for kind, mapping, entry in (*inputs, *outputs):
            if entry.name not in mapping:
                continue
            tensor = _Tensor(target.name, entry.data_type, tuple(entry.dims), target.config.max_batch_size > 0)
            different = tensors.setdefault(mapping[entry.name], tensor).differs(tensor)
            if different is not None:
                problem = f"{mapping[entry.name]} is {different}"
                yield Problem(problem, "let both declare the same", f"{field}.{kind}[{entry.name}]")


@rule(
    "TR558",
    wrong="max_batch_size: 16   # of an ensemble with a step of max_batch_size: 8",
    right="max_batch_size: 8",
    source="core, src/ensemble_scheduler/ensemble_utils.cc, ValidateEnsembleConfig",
)
def an_ensemble_batches_as_its_steps(model: RepositoryModel) -> Iterator[Problem]:
    """Check that the max_batch_size of an ensemble is at most that of each step that batches.

    A batch goes from step to step as it is.
    """
    for field, step, target in _called(model):
        limit = target.config.max_batch_size
        if 0 < limit < model.config.max_batch_size:
            yield Problem(
                f"it takes {model.config.max_batch_size} rows and its step {step.model_name} {limit}",
                f"write max_batch_size: {limit}",
                "max_batch_size" if model.spans.get("max_batch_size") else field,
            )


@rule(
    "TR559",
    wrong="""platform: "ensemble"
response_cache { enable: true }     # and a step is decoupled""",
    right='platform: "ensemble"',
    source="core, src/ensemble_scheduler/ensemble_utils.cc, ValidateEnsembleConfig: the ensemble becomes decoupled",
)
def an_ensemble_that_streams_has_no_cache(model: RepositoryModel) -> Iterator[Problem]:
    """Check that an ensemble with a decoupled step has no response cache.

    The ensemble becomes decoupled itself, and Triton refuses it when its steps have loaded.
    """
    streams = [target.name for _, _, target in _called(model) if target.config.model_transaction_policy.decoupled]
    if streams and model.config.response_cache.enable:
        problem = f"response_cache on an ensemble whose step {streams[0]} is decoupled"
        yield Problem(problem, "leave response_cache out", "response_cache")
