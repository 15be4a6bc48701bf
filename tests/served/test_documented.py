"""The requests in docs/guides, sent verbatim to a real Triton."""

from __future__ import annotations

import urllib.request

import pytest

from builder.serving.server.triton import TritonServer
from tests.documents import ROOT, blocks, commands

NAMES = {"Qwen3-0.6B": "writes", "minilm": "minilm_fp32"}  # in the documentation, and in the tests' repository


def _examples(page: str, language: str, server: TritonServer) -> list[str]:
    """Return the code blocks of a page, with the server and models replaced by those of the tests."""
    text = (ROOT / "docs" / "guides" / page).read_text("utf-8")
    for name, tested in NAMES.items():
        text = text.replace(name, tested)
    addresses = {"8000": server.ports.http, "8001": server.ports.grpc, "8002": server.ports.metrics}
    for port, free in addresses.items():
        text = text.replace(f"localhost:{port}", f"{server.host}:{free}").replace(
            f"127.0.0.1:{port}", f"{server.host}:{free}"
        )
    return [block for kind, _, block in blocks(text) if kind == language]


@pytest.mark.parametrize("page", ["clients.md", "text-generation.md", "guided-answers.md"])
def test_documented_curl_requests_are_answered(page: str, server: TritonServer) -> None:
    sent = 0
    for block in _examples(page, "bash", server):
        for program, url, *rest in (words for words in commands(block) if words[0] == "curl"):
            body = rest[1].encode() if rest else None
            with urllib.request.urlopen(f"http://{url}", body, timeout=300) as answer:
                content = answer.read().decode()
            assert (
                "/generate" not in url or '"text_output"' in content or '"embedding"' in content or '"label"' in content
            )
            sent += program == "curl"
    assert sent >= 2


def test_documented_python_clients_are_answered(server: TritonServer, capsys: pytest.CaptureFixture[str]) -> None:
    programs = [one for one in _examples("clients.md", "python", server) if "RemoteEncoder" not in one]
    assert len(programs) == 3
    for program in programs:
        exec(compile(program, "docs/guides/clients.md", "exec"), {})
        assert capsys.readouterr().out.strip()
