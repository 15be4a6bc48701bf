"""Describe a model that clients can use, from its ModelConfig or the hosted.json of a shared front."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.common.tensors import WIRE_TYPES
from builder.runtime.adapter_files import ADAPTER
from builder.runtime.fields import Field
from builder.serving.gateway.errors import bad_field

CANDIDATE_OF = "candidate_of"  # parameter by which build-repo promote marks a candidate
ADAPTER_MARK = ":"  # between a model's name, which has none, and that of its adapter
MODEL_INPUT = Field("model", "TYPE_STRING")  # input that tells a shared front which model a request is for


@dataclass(frozen=True)
class ServedModel:
    """Inputs and outputs of a front model. `batch`: rows of one request, 0 without a batch dimension."""

    name: str
    version: str
    task: str
    inputs: Mapping[str, Field]
    outputs: Mapping[str, Field]
    batch: int
    is_decoupled: bool
    parameters: Mapping[str, str]
    front: str | None = None  # shared front that answers for it, if Triton does not know the model itself
    adapter: str = ""  # LoRA adapter that a client named with it

    @property
    def label(self) -> str:
        """Name by which clients request it."""
        return f"{self.name}{ADAPTER_MARK}{self.adapter}" if self.adapter else self.name

    @property
    def interface(self) -> ServedModel:
        """The model without its version and its measurements: what a request to it and its answer look like."""
        parameters = {name: value for name, value in self.parameters.items() if name != "report"}
        return replace(self, version="", parameters=parameters)

    @property
    def max_input_length(self) -> int | None:
        """Maximum number of tokens of one text; None if the model does not declare it."""
        return self._number("max_input_length")

    @property
    def max_total_tokens(self) -> int | None:
        """Maximum number of tokens of a prompt and its answer together; None if the model does not state it."""
        return self._number("max_total_tokens")

    @cached_property
    def labels(self) -> list[str]:
        """Labels of a classifier, in the order of its outputs; empty for other models and for adapters."""
        if self.adapter:  # it may have labels of its own, which only its answers name
            return []
        labels = json.loads(self.parameters.get("labels", "[]"))
        return [str(label) for label in labels]

    @cached_property
    def languages(self) -> list[str]:
        """Languages of a translator; empty for other models."""
        return [str(code) for code in json.loads(self.parameters.get("languages", "[]"))]

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """Measurements of its build (builder/repository/report/record.py); None if the model has no report."""
        try:
            report = json.loads(self.parameters["report"])
        except (KeyError, ValueError, RecursionError):
            return None
        return report if isinstance(report, dict) else None

    @property
    def has_chat_template(self) -> bool:
        return self.parameters.get("chat") == "true"

    @cached_property
    def part_roles(self) -> list[str]:
        """Roles whose messages may have parts for the chat template to read."""
        return [str(role) for role in json.loads(self.parameters.get("message_parts", "[]"))]

    @cached_property
    def prompts(self) -> list[str]:
        """Names of an embedder's prompts."""
        return [str(name) for name in json.loads(self.parameters.get("prompts", "[]"))]

    @property
    def is_embedder(self) -> bool:
        """True if the model answers one vector per text."""
        output = self.outputs.get("embedding")
        return output is not None and len(output.dims) == 1

    @property
    def has_late_chunking(self) -> bool:
        """True if the model reads the texts of a request as one document on request."""
        return self.parameters.get("late_chunking") == "true"

    @property
    def is_shared_front(self) -> bool:
        """True if the model only answers for other models, which clients name."""
        return self.parameters.get("shared") == "true"

    def with_adapter(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs of a request with the adapter that the client named with the model, if it did.

        Raises ApiError if they name another one.
        """
        if not self.adapter:
            return dict(inputs)
        if inputs.get(ADAPTER.name, self.adapter) not in (self.adapter, [self.adapter]):
            raise bad_field(ADAPTER.name, f"model and {ADAPTER.name} name two adapters; leave {ADAPTER.name} out")
        return {**inputs, ADAPTER.name: self.adapter}

    def refuse_unknown_inputs(self, names: Iterable[str]) -> None:
        """Raise ApiError for a name that is not one of the model's inputs."""
        for name in names:
            if name not in self.inputs:
                raise bad_field(name, f"{self.name} does not support {name}; leave it out")

    def refuse_truncation_side(self, name: str, side: str) -> None:
        """Raise ApiError for the field `name` unless the model truncates long texts on this side."""
        own = self.parameters.get("truncation_side", "right")
        if side != own:
            raise bad_field(name, f"{self.name} truncates long texts on the {own}; leave {name} out")

    def _number(self, name: str) -> int | None:
        value = self.parameters.get(name)
        return int(value) if value is not None else None


def read_model(config: Any, version: str) -> ServedModel | None:
    """Return the model that a ModelConfig describes; None if it declares no task, as an engine does."""
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    fields = (_fields(config.input, True), _fields(config.output, False))
    types = {field.data_type for side in fields for field in side.values()}
    if "task" not in parameters or not types <= set(WIRE_TYPES):
        return None
    return ServedModel(
        config.name,
        version,
        parameters["task"],
        *fields,
        int(config.max_batch_size),
        bool(config.model_transaction_policy.decoupled),
        parameters,
    )


def hosted_models(front: ServedModel, text: str) -> dict[str, ServedModel]:
    """Return the models that `front` hosts according to hosted.json, by name; their tensors have the front's types."""
    return {
        name: ServedModel(
            name,
            str(entry["version"]),
            front.task,
            {key: replace(front.inputs[key], optional=optional) for key, optional in entry["inputs"].items()},
            {key: replace(front.outputs[key], dims=tuple(dims)) for key, dims in entry["outputs"].items()},
            entry["max_batch_size"],
            front.is_decoupled,
            entry["parameters"],
            front.name,
        )
        for name, entry in json.loads(text)["models"].items()
    }


def _fields(entries: Any, are_inputs: bool) -> dict[str, Field]:
    name_of = model_config_pb2.DataType.Name
    return {
        entry.name: Field(entry.name, name_of(entry.data_type), tuple(entry.dims), are_inputs and bool(entry.optional))
        for entry in entries
    }
