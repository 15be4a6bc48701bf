"""Limits of each key: of one gateway, and of several that count in a real Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from builder.commands import gateway as command
from builder.commands.gateway import LIMITS_VARIABLE
from builder.common.errors import SpecError
from builder.serving.gateway import limits
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.limits import RateLimiter, RateLimits, rate_limits
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.server.gateway import gateway as gateway_process
from builder.serving.server.triton import free_ports
from tests.serving.gateway.requests import fetch, gateway
from tests.valkey_server import HOST, valkey

HOUR = 3600.0


def test_token_limit_counts_after_the_answer() -> None:
    app = gateway(tokens_per_minute=5)
    body = {"model": "embeds", "input": "x" * 20}
    assert fetch("/v1/embeddings", body, app).status == 200
    refused = fetch("/v1/embeddings", body, app)
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) > 60


def test_rate_limiter_refills_evenly() -> None:
    now = 0.0
    allowance = RateLimiter(60, "requests", lambda: now)
    allowance.spend("a", 60)
    with pytest.raises(ApiError):
        allowance.refuse("a")
    now = 1.5
    allowance.refuse("a")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Return the URL of a Valkey."""
    port = free_ports().http
    with valkey(port):
        yield f"valkey://{HOST}:{port}"


def over_two(url: str, use: Callable[[RateLimits, RateLimits], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run `use` with the limits of two gateways that share them."""

    async def run() -> None:
        asked = GatewaySettings(limits=url, **settings)
        async with rate_limits(asked) as one, rate_limits(asked) as other:
            await use(one, other)

    asyncio.run(run())


def test_gateways_share_the_requests_of_a_key(url: str) -> None:
    async def use(one: RateLimits, other: RateLimits) -> None:
        gateways = [one, other] * 4
        answers = await asyncio.gather(*(each.admit("ann") for each in gateways), return_exceptions=True)
        refused = [error for error in answers if isinstance(error, ApiError)]
        assert len(refused) == len(gateways) - 5
        assert {error.headers["retry-after"] for error in refused} == {"12"}
        await other.admit("bob")

    over_two(url, use, requests_per_minute=5)


def test_gateways_share_the_tokens_of_a_key(url: str) -> None:
    async def use(one: RateLimits, other: RateLimits) -> None:
        for each in (one, other):
            await each.admit("cid")
        await one.spend_tokens("cid", 20)
        with pytest.raises(ApiError) as refused:
            await other.admit("cid")
        assert int(refused.value.headers["retry-after"]) == 66, "11 tokens at 10 a minute"
        assert "10 tokens a minute" in refused.value.message
        await other.admit("dan")

    over_two(url, use, tokens_per_minute=10, requests_per_minute=1000)


def test_shared_bucket_refills(url: str) -> None:
    async def use(one: RateLimits, other: RateLimits) -> None:
        await one.spend_tokens("eve", 20)
        with pytest.raises(ApiError):
            await other.admit("eve")
        assert one.shared is not None
        client, bucket = one.shared.script.registered_client, "build-repo:limits:{eve}:tokens"
        assert 60_000 < await client.pttl(bucket) <= 120_000, "it is forgotten once it is full"
        await client.set(bucket, int(await client.get(bucket)) - 66_000_000)  # 11 tokens ago
        await other.admit("eve")

    over_two(url, use, tokens_per_minute=10)


def test_hanging_valkey_delays_few_requests(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(limits, "CALL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(limits, "RETRY_S", HOUR)
    with socket.create_server((HOST, 0)) as hanging:

        async def use(one: RateLimits, other: RateLimits) -> None:
            for _ in range(3):
                await one.admit("ann")
            with pytest.raises(ApiError, match="3 requests a minute"):
                await one.admit("ann")

        over_two(f"valkey://{HOST}:{hanging.getsockname()[1]}", use, requests_per_minute=3)
        hanging.settimeout(0)
        hanging.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hanging.accept()
    assert len(caplog.records) == 1


def test_valkey_is_asked_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    port, now = free_ports().http, 0.0

    async def use(one: RateLimits, other: RateLimits) -> None:
        nonlocal now
        assert one.shared is not None
        one.shared.now = lambda: now
        await one.admit("ann")
        with valkey(port):
            await one.admit("ann")
            assert _shared_count(port) == 0
            now += limits.RETRY_S
            await one.admit("ann")
            for _ in range(2):
                await other.admit("ann")
            with pytest.raises(ApiError):
                await other.admit("ann")

    over_two(f"valkey://{HOST}:{port}/1", use, requests_per_minute=3)
    assert len(caplog.records) == 2, "one when it is gone, and one when it is back"


def test_gateway_processes_share_limits_and_outlive_their_valkey() -> None:
    """Two gateways without a Triton: they answer 503 within the limit, and 429 beyond it."""
    port, ports = free_ports().http, [free_ports().http for _ in range(2)]
    options = ["--requests-per-minute", "2", "--limits", f"redis://{HOST}:{port}/1"]
    with (
        gateway_process(f"{HOST}:1", HOST, ports[0], *options, log=subprocess.DEVNULL),
        gateway_process(f"{HOST}:1", HOST, ports[1], *options, log=subprocess.DEVNULL),
    ):
        with valkey(port) as process:
            assert Counter(_status(ports[number % 2]) for number in range(4)) == {503: 2, 429: 2}
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            assert _status(ports[0]) == 503, "it has counted one request of its own"
        with valkey(port):
            assert _status(ports[1]) == 503
            assert _shared_count(port) == 1


def _status(port: int) -> int:
    """Return the status of a request."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models") as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _shared_count(port: int) -> int:
    """Return how many buckets a Valkey has."""
    from valkey import Valkey

    with Valkey(port=port, db=1) as client:
        return int(client.dbsize())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--limits", "valkey://h:1"], "--requests-per-minute"),
        (["--limits", "h:1", "--requests-per-minute", "1"], "valkey://HOST:6379"),
        (["--limits", "valkey://:secret/1@h:1", "--requests-per-minute", "1"], "valkey://HOST:6379"),
        (["--limits", "valkey://h:1?secret=1", "--requests-per-minute", "1"], "valkey://HOST:6379"),
        (["--limits", "valkey://h:1/secret", "--requests-per-minute", "1"], "DATABASE, a number"),
        (["--limits", "valkey://h:1/1/2", "--requests-per-minute", "1"], "DATABASE, a number"),
    ],
)
def test_gateway_command_refuses_other_limits(options: list[str], says: str) -> None:
    """Regression: an error had part of a password, an unknown option failed each request, a name was database 0."""
    with pytest.raises(SpecError, match=says) as refused:
        command.run(command.parser().parse_args(options))
    assert "secret" not in str(refused.value)


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL with a password stays out of the list of processes."""
    started: list[GatewaySettings] = []
    monkeypatch.setenv(LIMITS_VARIABLE, "valkeys://:secret@h:1")
    monkeypatch.setattr("builder.serving.gateway.server.serve", lambda settings, *_: started.append(settings))
    command.run(command.parser().parse_args(["--tokens-per-minute", "1"]))
    assert started[0].limits == "valkeys://:secret@h:1"
