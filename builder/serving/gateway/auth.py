"""Control access: bearer keys, each within its limits."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from builder.common.errors import SpecError
from builder.serving.gateway.context import RECORD, RequestRecord
from builder.serving.gateway.errors import ApiError, anthropic_error, openai_error
from builder.serving.gateway.http_responses import send_error
from builder.serving.gateway.limits import RateLimits
from builder.serving.gateway.settings import GatewaySettings

PUBLIC_ROUTES = {  # public: liveness, and the page, which asks for a key itself
    (method, path) for method in ("GET", "HEAD") for path in ("/", "/health", "/health/ready", "/-/healthz")
}
ANONYMOUS = "anonymous"
ANTHROPIC_PATH = "/v1/messages"  # errors of this route have Anthropic's shape
ADMIN_PATH = "/admin/"  # admin API: every path below it needs a key of its own


def read_keys(file: Path | None, environment: str) -> tuple[tuple[str, str], ...]:
    """Return (name, secret) of each NAME:SECRET entry, one a line or separated by commas.

    Raises SpecError for a file that cannot be read, for other entries and for a name that occurs twice.
    """
    try:
        text = file.read_text("utf-8") if file is not None else ""
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"the keys in {file} cannot be read ({error}); name a text file of NAME:SECRET lines"
        ) from error
    entries = [line.strip() for line in (*text.splitlines(), *environment.split(","))]
    keys = []
    for number, entry in enumerate(entry for entry in entries if entry and not entry.startswith("#")):
        name, colon, secret = entry.partition(":")
        if not colon or not name.strip() or not secret.strip():
            raise SpecError(f"key {number + 1} is not NAME:SECRET; write one a line")
        keys.append((name.strip(), secret.strip()))
    if file is not None and not keys:
        raise SpecError(f"{file} holds no keys; write NAME:SECRET, one a line")
    if len({name for name, _ in keys}) < len(keys):
        raise SpecError("two keys have the same name; give each client a name of its own")
    return tuple(keys)


class ApiKeys:
    """Digests of the secrets. All are compared in constant time, so timing reveals nothing about them."""

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        self.digests = [(name, _digest(secret)) for name, secret in keys]

    def name(self, authorization: str) -> str:
        """Return the name of the key. Raises ApiError 401 for an unknown key."""
        if not self.digests:
            return ANONYMOUS
        scheme, _, secret = authorization.partition(" ")
        presented, match = _digest(secret.strip()), None
        for name, digest in self.digests:
            if hmac.compare_digest(presented, digest):
                match = name
        if match is None or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "no key, or one that is not known; send Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
            )
        return match


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class AuthMiddleware:
    """ASGI middleware that admits requests with a valid key that is within its limits."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, limits: RateLimits) -> None:
        self.app, self.keys, self.limits = app, ApiKeys(settings.keys), limits
        self.admin = ApiKeys([("admin", settings.admin_key)]) if settings.admin_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) in PUBLIC_ROUTES:
            await self.app(scope, receive, send)
            return
        record: RequestRecord = scope[RECORD]
        try:
            await self._admit(scope, record)
        except ApiError as error:
            record.set_error(error)
            await send_error(send, error, anthropic_error if scope["path"].startswith(ANTHROPIC_PATH) else openai_error)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            await self.limits.spend_tokens(record.key, record.prompt_tokens + record.completion_tokens)

    async def _admit(self, scope: Scope, record: RequestRecord) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        header = headers.get(b"authorization", "")
        if scope["path"].startswith(ADMIN_PATH):
            if self.admin is None:
                raise ApiError(
                    403, "the admin API is disabled; start the gateway with --admin-key FILE", code="no_admin_key"
                )
            record.key = self.admin.name(header)
            return
        record.key = self.keys.name(header or f"Bearer {headers.get(b'x-api-key', '')}")
        await self.limits.admit(record.key)
