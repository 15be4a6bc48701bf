"""Read the options of an application: the arguments of builder.clusters.ray.application, as in serve.yaml."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from builder.common.errors import SpecError


class RayOptions(BaseModel):
    """Options of an application. `repository`: the same folder on every node.

    A replica takes `cores` of its node's logical cores, and `memory` bytes of it if that is not 0. Ray keeps between
    `min_replicas` and `max_replicas` of them, so that each has `busy` requests at once; it adds replicas when more have
    been needed for `grow_after_s` seconds, and removes some when fewer have been needed for `shrink_after_s`.
    `keys_file`: as of build-repo gateway, on the nodes of gateways.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository: str
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    models_per_replica: int = Field(default=8, ge=1)
    busy: float = Field(default=16, gt=0)
    grow_after_s: float = Field(default=30, ge=0)
    shrink_after_s: float = Field(default=600, ge=0)
    cores: float = Field(default=1, ge=0)
    memory: int = Field(default=0, ge=0)
    gateways: int = Field(default=1, ge=1)
    keys_file: str | None = None

    @model_validator(mode="after")
    def _ordered(self) -> RayOptions:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}, less than min_replicas, {self.min_replicas}; raise one or lower "
                "the other"
            )
        return self


def read_options(given: dict[str, Any]) -> RayOptions:
    """Read `given`, the arguments of a Serve configuration. Raises SpecError, with the fields that are wrong."""
    try:
        return RayOptions.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, at['loc']))}: {at['msg']}" for at in error.errors())
        raise SpecError(f"the arguments of builder.clusters.ray.application: {wrong}") from error
