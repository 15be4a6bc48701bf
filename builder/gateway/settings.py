"""What a gateway is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from builder.gateway.token_ids import Vocabulary

DEFAULT_PORT = 9000


@dataclass(frozen=True)
class OnDemand:
    """Loading models when they are asked for: those of `repository`, in `memory` bytes; `pins` stay loaded.

    `verify_key`: what each must have been signed with, as builder/triton/signatures.py takes it.
    """

    repository: Path
    memory: int
    pins: tuple[str, ...] = ()
    verify_key: Path | None = None


@dataclass(frozen=True)
class Settings:
    """`triton`: HOST:PORT of its gRPC. Times are in seconds, sizes in bytes, limits those of one key in a minute."""

    triton: str = "127.0.0.1:8001"
    keys: tuple[tuple[str, str], ...] = ()  # (name, secret); anybody may ask where there is none
    admin_key: str = ""  # whose bearer may give orders; nobody may where there is none
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_body: int = 8 << 20
    max_waiting: int = 256  # requests of one model that answers once: further ones get 429
    timeout_s: float = 600.0  # of one request, from its first byte to its last
    body_timeout_s: float = 30.0
    drain_s: float = 60.0  # what runs may take when the gateway is told to stop
    cors: tuple[str, ...] = field(default=())  # origins whose pages may ask
    forward_traces: bool = False  # hand `traceparent` on to Triton
    triton_metrics: str | None = None  # URL of Triton's metrics, for how full caches are; None: /metrics does not say
    token_ids: Vocabulary | None = None  # what ids in place of texts for embeddings are of; refused without
    on_demand: OnDemand | None = None  # None: the models that Triton has loaded
