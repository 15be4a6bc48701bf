"""Connect to Ray, on this machine alone or in a running cluster, and run the application on it.

Its options are the arguments of builder.clusters.ray.application, as in serve.yaml.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from builder.common.addresses import is_loopback
from builder.common.distribution import installing
from builder.common.errors import ServeError, SpecError
from builder.common.machine import available_cores

NAME = "triton"
OBJECT_STORE_BYTES = 128 << 20  # bytes of shared memory: no request passes through it, and Ray's minimum is 75 MB
RAY_SETTINGS = {
    "RAY_worker_niceness": "0",  # not 15, with which a replica's Triton waits for every other program of its node
}
# On a busy machine a node takes longer to start than the 10 to 30 s that Ray waits.
RAY_TIMEOUTS = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
}
START_ATTEMPTS = 3  # of a local cluster: its node waits 15 s for its agent's port, a time that cannot be set
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # a local cluster uses the loopback address
ADDRESS_VARIABLE = "RAY_ADDRESS"  # address of a cluster, as Ray's own programs read it; KubeRay sets it for a RayJob


def cluster_address() -> str | None:
    """Return the address of the cluster that the environment names; None for this machine alone."""
    return os.environ.get(ADDRESS_VARIABLE) or None


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Yield the module ray, connected to the cluster at `address`, or to a local one that ends with this context.

    A local cluster that does not start, on a busy machine, is started again. Raises SpecError if ray is not installed,
    ServeError if no cluster answers.
    """
    is_elsewhere = address is not None and not is_loopback(address)
    # For ray, and for its child processes.
    os.environ.update({**RAY_TIMEOUTS, **os.environ, **RAY_SETTINGS, **({} if is_elsewhere else LOOPBACK)})
    try:
        import ray
    except ModuleNotFoundError as error:
        raise SpecError(f"Ray is not installed: {installing('ray')}") from error
    if ray.is_initialized():  # the caller has connected
        yield ray
        return
    local = {"num_cpus": available_cores(), "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.WARNING}
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(address=address or "local", **quiet, **({} if address else local))
            break
        except Exception as error:  # Ray has no type of its own for a node that does not start in time
            ray.shutdown()  # ends the processes that did start
            if address or attempt == START_ATTEMPTS:
                tries = "" if address else f", in {attempt} attempts"
                raise ServeError(f"no Ray cluster at {address or 'this machine'}{tries}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def serving(
    options: RayOptions, host: str, port: int, *more: str, say: Callable[[str], None] = print
) -> Iterator[None]:
    """Run the Tritons of `options` on the connected cluster, and a gateway on `host`:`port` of this machine.

    `more`: other options of the gateway. Raises ServeError if they do not start.
    """
    from ray import serve

    from builder.clusters.ray.application import application
    from builder.clusters.ray.gateway import ray_gateway
    from builder.clusters.ray.registry import Registry

    is_shared = bool(set(serve.status().applications) - {NAME})  # its other applications stay
    serve.start(proxy_location="Disabled")
    try:
        try:
            serve.run(application({**options.model_dump(), "gateways": 0}), name=NAME)
        except RuntimeError as error:
            raise ServeError(f"Ray does not start the replicas: {error}") from error
        with ray_gateway(Registry(NAME), host, port, *more, say=say):
            yield
    finally:
        if is_shared:
            serve.delete(NAME, _blocking=False)
        else:
            serve.shutdown()


class RayOptions(BaseModel):
    """Options of an application. `repository`: the same folder on every node.

    A replica takes `cores` of its node's logical cores, and `memory` bytes of it if that is not 0. Ray keeps between
    `min_replicas` and `max_replicas` of them, so that each has `busy` requests at once; it adds replicas when more have
    been needed for `grow_after_s` seconds, and removes some when fewer have been needed for `shrink_after_s`.
    `on_demand`: the gateway loads the models. `insecure_bind`: replicas may listen on addresses that other machines
    reach. Ray runs `gateways` on as many nodes, on `host`:`port`, with `keys_file` and limits as of build-repo gateway.
    `models`: digests by NAME@VERSION; if they change, as any argument may, `serve deploy` replaces replicas one after
    another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    repository: str
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    busy: float = Field(default=16, gt=0)
    grow_after_s: float = Field(default=30, ge=0)
    shrink_after_s: float = Field(default=600, ge=0)
    cores: float = Field(default=1, ge=0)
    memory: int = Field(default=0, ge=0)
    on_demand: bool = False
    insecure_bind: bool = False
    gateways: int = Field(default=1, ge=0)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    keys_file: str | None = None
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    limits: str | None = None
    models: dict[str, str] = Field(default_factory=dict)

    @property
    def gateway_options(self) -> list[str]:
        """Return the options of build-repo gateway beside its addresses."""
        given = {
            "--keys": self.keys_file,
            "--requests-per-minute": self.requests_per_minute,
            "--tokens-per-minute": self.tokens_per_minute,
            "--limits": self.limits,
        }
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]

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


def log_line(text: str) -> None:
    """Write a line to standard error, which Ray keeps as the log of a process."""
    print(text, file=sys.stderr, flush=True)
