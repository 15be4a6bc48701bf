"""Token ids in place of texts, as LangChain's embeddings send them."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

from builder.common.errors import SpecError
from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.settings import GatewaySettings, Vocabulary, read_vocabulary
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import FakeTriton

TOKENS = {0: b"pass", 1: b"port", 2: "é".encode()[:1], 3: "é".encode()[1:]}


def embed(inputs: object, vocabulary: Vocabulary | None, triton: FakeTriton | None = None) -> Answer:
    triton = triton or FakeTriton()
    app = make_app(GatewaySettings(token_ids=vocabulary), triton, None, models=Catalogue(triton))
    return asyncio.run(ask(app, "/v1/embeddings", {"model": "embeds", "input": inputs}))


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    file = tmp_path / "small.tiktoken"
    file.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in TOKENS.items()))
    return read_vocabulary(file)


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([0, 1], ["passport"]),
        ([[0, 1], [1]], ["passport", "port"]),
        ([[2, 3]], ["é"]),
        ([[0, 2]], ["pass\ufffd"]),
        (["port", [1]], ["port", "port"]),
    ],
)
def test_token_ids_decode_to_their_text(vocabulary: Vocabulary, ids: list[object], texts: list[str]) -> None:
    triton = FakeTriton()
    assert len(embed(ids, vocabulary, triton).json["data"]) == len(texts)
    (inputs,) = triton.requests
    assert [row[0] for row in inputs["text_input"]] == texts


def test_token_ids_outside_the_vocabulary_are_refused(vocabulary: Vocabulary) -> None:
    assert embed([[0, 9]], vocabulary).error["message"] == "input[0] holds 9, which is outside the vocabulary small"
    assert "--token-ids" in embed([[0, 1]], None).error["message"]
    inputs: tuple[list[object], ...] = ([[]], [[0, "a"]], [[True]], [None])
    for wrong in inputs:
        assert "neither a text nor a list of token ids" in embed(wrong, vocabulary).error["message"]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "holds no tokens"), (b"cGFzcw== 0\n=x 1", "line 2"), (b"cGFzcw==", "line 1")]
)
def test_invalid_vocabulary_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "v.tiktoken"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_vocabulary(file)
    with pytest.raises(SpecError, match="cannot be read"):
        read_vocabulary(tmp_path / "absent")
