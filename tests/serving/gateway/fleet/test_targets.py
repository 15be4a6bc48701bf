"""Addresses of a fleet, and options of the command that need one Triton."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from types import ModuleType

import pytest

from builder.commands import evaluate, gateway, query
from builder.common.errors import SpecError
from builder.serving.gateway.fleet.targets import AddressFile, DnsName, is_fleet, parse_targets, resolve


def test_targets_are_addresses_and_names() -> None:
    assert parse_targets("a:1, b:2,a:1,[::1]:8001,[fe80::1%eth0]:8001,dns:///tritons.models:8001") == [
        "a:1",
        "b:2",
        "[::1]:8001",
        "[fe80::1%eth0]:8001",
        DnsName("tritons.models", 8001),
    ]
    assert not is_fleet("a:1")
    assert is_fleet("file:///run/tritons")


@pytest.mark.parametrize(
    "wrong",
    [
        "a",
        "a:0",
        "a:65536",
        "http://a:1",
        "::1:8001",
        "[fe80::1%]:8001",
        "",
        "dns:///a",
        "dns://8.8.8.8/a:1",
        "dns:///a..b:1",
        "dns:///[fe80::1%eth0]:1",
        "file:///",
    ],
)
def test_unusable_address_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(SpecError, match="expected HOST:PORT") as refused:
        parse_targets(f"b:2,{wrong}")
    assert repr(wrong) in str(refused.value)


async def test_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def getaddrinfo(host: str, port: int, **options: object) -> list[object]:
        assert (host, port) == ("tritons", 8001)
        entries = [(socket.AF_INET6, ("fd00::2", port, 0, 0)), (socket.AF_INET, ("10.0.0.7", port))]
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in [*entries, *entries]]

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    assert list(await resolve(DnsName("tritons", 8001))) == ["10.0.0.7:8001", "[fd00::2]:8001"]


def test_file_stands_for_the_addresses_in_it(tmp_path: Path) -> None:
    (file,) = parse_targets(f"file://{tmp_path}/tritons")
    assert isinstance(file, AddressFile)
    with pytest.raises(OSError, match="No such file"):
        asyncio.run(resolve(file))
    file.write(["a:1", "[::1]:8001"])
    assert asyncio.run(resolve(file)) == ["a:1", "[::1]:8001"]
    file.write(["a:1", "b"])
    with pytest.raises(SpecError, match="'b'"):
        asyncio.run(resolve(file))
    file.path.write_bytes(b"a:1 \xff:1")
    with pytest.raises(SpecError, match="not the address"):
        asyncio.run(resolve(file))


def test_name_is_resolved_by_the_system() -> None:
    assert "127.0.0.1:8001" in asyncio.run(resolve(DnsName("localhost", 8001)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "a:1,b:2", "--load-on-demand"], "--memory-gb N"),
        (["--url", "a:1", "--url", "b:2", "--triton-metrics", "http://a:8002/metrics"], "--triton-metrics"),
        (["--url", "a:1", "--hedge", "95"], "--hedge sends requests to a second Triton"),
        (["--url", "a:1,b"], "'b', which is not the address"),
    ],
)
def test_options_that_do_not_fit_the_number_of_tritons_are_refused(options: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        gateway.run(gateway.parser().parse_args(options))


@pytest.mark.parametrize("verb", [query, evaluate])
def test_verbs_of_one_server_refuse_a_list(verb: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the list was passed to gRPC as one name, and failed with an error of the resolver."""
    with pytest.raises(SystemExit):
        verb.parser().parse_args(["minilm", "--url", "a:1,b:2"])
    assert "names several servers" in capsys.readouterr().err
