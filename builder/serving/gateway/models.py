"""Models behind the gateway, as their config.pbtxt describes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from builder.common.tensors import WIRE
from builder.runtime.fields import Field
from builder.serving.gateway.errors import ApiError, bad_field

NAMED = 50  # models that a message names, at most
CANDIDATE_OF = "candidate_of"  # parameter by which build-repo promote marks a candidate
NAME = Field("model", "TYPE_STRING")  # input that tells a shared front which model a request is for
AWAY_S = 2.0  # after this a client retries


@dataclass(frozen=True)
class Model:
    """Inputs and outputs of a front model. `batch`: rows of one request, 0 without a batch dimension."""

    name: str
    version: str
    task: str
    inputs: Mapping[str, Field]
    outputs: Mapping[str, Field]
    batch: int
    streams: bool
    parameters: Mapping[str, str]
    front: str | None = None  # shared front that answers for it, if Triton does not know the model itself

    @property
    def max_input_length(self) -> int | None:
        """Maximum number of tokens of one text; None if the model does not state it."""
        return self._number("max_input_length")

    @property
    def max_total_tokens(self) -> int | None:
        """Maximum number of tokens of a prompt and its answer together; None if the model does not state it."""
        return self._number("max_total_tokens")

    @cached_property
    def labels(self) -> list[str]:
        """Labels of a classifier, in the order of its outputs; empty for other models."""
        labels = json.loads(self.parameters.get("labels", "[]"))
        return [str(label) for label in labels]

    @cached_property
    def languages(self) -> list[str]:
        """Languages of a translator; empty for other models."""
        return [str(code) for code in json.loads(self.parameters.get("languages", "[]"))]

    @cached_property
    def report(self) -> dict[str, Any] | None:
        """Measurements of its build (builder/repository/report/summary.py); None if the model has no report."""
        try:
            report = json.loads(self.parameters["report"])
        except (KeyError, ValueError, RecursionError):
            return None
        return report if isinstance(report, dict) else None

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
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
    def embeds(self) -> bool:
        """True if the model answers one vector per text."""
        output = self.outputs.get("embedding")
        return output is not None and len(output.dims) == 1

    @property
    def is_shared_front(self) -> bool:
        """True if the model only answers for other models, which clients name."""
        return self.parameters.get("shared") == "true"

    def refuse_others(self, names: Iterable[str]) -> None:
        """Raise ApiError for a name that is not one of the model's inputs."""
        for name in names:
            if name not in self.inputs:
                raise bad_field(name, f"{name} is not something that {self.name} takes; leave it out")

    def refuse_other_side(self, name: str, side: str) -> None:
        """Raise ApiError for the field `name` unless the model truncates long texts on this side."""
        own = self.parameters.get("truncation_side", "right")
        if side != own:
            raise bad_field(name, f"{self.name} cuts long texts on the {own}, as it was built to; leave {name} out")

    def _number(self, name: str) -> int | None:
        value = self.parameters.get(name)
        return int(value) if value is not None else None


class Models(Protocol):
    """Models that clients may name."""

    async def all(self) -> list[Model]:
        """Return every model, by name. Raises ApiError."""
        ...

    async def get(self, name: str) -> Model:
        """Return the model named `name`. Raises ApiError 404, or 503 if it is only away."""
        ...

    def missing(self) -> list[Model]:
        """Return the models that are away: known, not ready now, and still in the repository."""
        ...


async def one_of(models: Models, what: str, fits: Callable[[Model], bool], name: str | None) -> Model:
    """Return the model `name`, or the only one that `fits`. Raises ApiError if none or several fit."""
    if name is not None:
        model = await models.get(name)
        if not fits(model):
            raise ApiError(400, f"{name} is a model for {model.task}; expected one {what}", param="model")
        return model
    fitting = [model for model in await models.all() if fits(model)]
    if not fitting:
        for model in models.missing():
            if fits(model):
                raise away(model.name)
    if len(fitting) != 1:
        names = listed([model.name for model in fitting])
        raise ApiError(
            400, f"name the model in `model`: of those {what} there are: {names}", param="model", code="no_model"
        )
    return fitting[0]


def unknown(name: str, known: Sequence[str]) -> ApiError:
    """Return the error for an unknown model name; `known` are the existing names."""
    return ApiError(
        404, f"the model {name!r} does not exist; there are: {listed(known)}", param="model", code="model_not_found"
    )


def away(name: str) -> ApiError:
    """Return the error for a model that is not loaded now: the client can retry later."""
    return ApiError(503, f"{name} is not loaded now; send this again later", code="unavailable", retry_after=AWAY_S)


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first ones, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more or "none"


def read_model(config: Any, version: str) -> Model | None:
    """Return the model that a ModelConfig describes; None if it declares no task, as an engine does."""
    parameters = {name: value.string_value for name, value in config.parameters.items()}
    fields = (_fields(config.input, True), _fields(config.output, False))
    types = {field.data_type for side in fields for field in side.values()}
    if "task" not in parameters or not types <= set(WIRE):
        return None
    return Model(
        config.name,
        version,
        parameters["task"],
        *fields,
        int(config.max_batch_size),
        bool(config.model_transaction_policy.decoupled),
        parameters,
    )


def hosted_models(front: Model, text: str) -> dict[str, Model]:
    """Return the models that `front` hosts according to hosted.json, by name; their tensors have the front's types."""
    return {
        name: Model(
            name,
            str(entry["version"]),
            front.task,
            {key: replace(front.inputs[key], optional=optional) for key, optional in entry["inputs"].items()},
            {key: replace(front.outputs[key], dims=tuple(dims)) for key, dims in entry["outputs"].items()},
            entry["max_batch_size"],
            front.streams,
            entry["parameters"],
            front.name,
        )
        for name, entry in json.loads(text)["models"].items()
    }


def _fields(entries: Any, are_inputs: bool) -> dict[str, Field]:
    kinds = {number: name for name, number in _data_types().items()}
    return {
        entry.name: Field(
            entry.name, kinds[entry.data_type], tuple(entry.dims), bool(entry.optional) if are_inputs else False
        )
        for entry in entries
    }


def _data_types() -> Mapping[str, int]:
    from tritonclient.grpc import model_config_pb2

    return dict(model_config_pb2.DataType.items())
