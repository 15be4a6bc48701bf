"""Define the settings of a gateway, and read the files that they name."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.common.errors import SpecError

DEFAULT_PORT = 9000


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, by its id, of the tokeniser that clients use.

    LangChain's OpenAIEmbeddings tokenises texts with OpenAI's cl100k_base, whatever the model, and sends the ids.
    """

    name: str
    tokens: dict[int, bytes]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; half a character at an end is replaced. Raises KeyError for an unknown id."""
        return b"".join(self.tokens[token] for token in ids).decode("utf-8", "replace")


def read_vocabulary(file: Path) -> Vocabulary:
    """Read a tiktoken vocabulary, a token in base64 and its number on each line. Raises SpecError for any other file.

    Source: https://github.com/openai/tiktoken, tiktoken/load.py.
    """
    tokens, number = {}, 0
    try:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):  # noqa: B007  (named in the error)
            token, rank = line.split()
            tokens[int(rank)] = base64.b64decode(token, validate=True)
    except OSError as error:
        raise SpecError(f"the vocabulary {file} cannot be read: {error.strerror or error}") from error
    except (ValueError, binascii.Error) as error:
        raise SpecError(
            f"{file}, line {number}, is not a token in base64 and its number, as in cl100k_base.tiktoken"
        ) from error
    if not tokens:
        raise SpecError(f"{file} holds no tokens; expected a vocabulary such as cl100k_base.tiktoken")
    return Vocabulary(file.stem, tokens)


@dataclass(frozen=True)
class OnDemandSettings:
    """Settings of loading on demand: models of `repository`, in `memory` bytes of each Triton; `pins` stay loaded.

    `verify_key`: key that each model must be signed with, as in builder/repository/signatures.py.
    """

    repository: Path
    memory: int
    pins: tuple[str, ...] = ()
    verify_key: Path | None = None


@dataclass(frozen=True)
class GatewaySettings:
    """Settings. Times are in seconds, sizes in bytes, limits per key and minute.

    `triton`: HOST:PORT of its gRPC; of several, separated by commas, dns:///NAME:PORT for all addresses of a name, or
    file:///PATH for those in a file.
    """

    triton: str = "127.0.0.1:8001"
    keys: tuple[tuple[str, str], ...] = ()  # (name, secret); without keys, access is open
    admin_key: str = ""  # its bearer may use the admin API; "" disables that API
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    limits: str = ""  # URL of the Valkey in which all gateways count; "": each has limits of its own
    max_body: int = 8 << 20
    max_waiting: int = 256  # requests of one model that answers once; further ones get 429
    hedge_percentile: int | None = None  # of recent answers, after which a request goes to a second Triton; None: never
    timeout_s: float = 600.0  # of one request, from its first byte to its last
    body_timeout_s: float = 30.0
    drain_s: float = 60.0  # time for running requests after the signal to stop
    cors: tuple[str, ...] = field(default=())  # origins whose pages may send requests
    forward_traces: bool = False  # forward `traceparent` to Triton
    triton_metrics: str | None = None  # URL of Triton's metrics, for the cache usage; None: /metrics omits it
    token_ids: Vocabulary | None = None  # vocabulary of the token ids sent for embeddings; without it they are refused
    on_demand: OnDemandSettings | None = None  # None: serve the models that Triton has loaded
