"""Read models from their ModelConfig, and from the hosted.json of a shared front."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tritonclient.grpc import model_config_pb2

from builder.common.tensors import WIRE_TYPES
from builder.runtime.fields import Field
from builder.serving.gateway.served_model import ServedModel

CANDIDATE_OF = "candidate_of"  # parameter by which build-repo promote marks a candidate
MODEL_INPUT = Field("model", "TYPE_STRING")  # input that tells a shared front which model a request is for


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
