"""Requests of every kind of nonsense: each is answered, none by a fault of the gateway's, and no slot stays taken."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from builder.gateway.app import make_app
from builder.gateway.settings import Settings
from tests.gateway.asgi import ask
from tests.gateway.fake_triton import MODELS, FakeTriton

ROUTES = {
    "/v1/chat/completions": {"model": "writes", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"model": "writes", "prompt": "a", "max_tokens": 2},
    "/v1/embeddings": {"model": "embeds", "input": ["a", "b"]},
    "/v1/rerank": {"model": "ranks", "query": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "texts": ["b"]},
    "/embed": {"inputs": "a"},
    "/predict": {"inputs": ["a"]},
    "/v1/tasks/text-classification": {"inputs": "a", "parameters": {}},
    "/v1/tasks/text-ranking": {"inputs": {"query": "a", "documents": ["b"]}},
    "/v1/tasks/text-generation": {"model": "writes", "inputs": "a"},
}
NUMBERS = st.one_of(st.integers(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(st.characters()), st.sampled_from(sorted(MODELS))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted(
    {name for body in ROUTES.values() for name in body}
    | {field.name for model in MODELS.values() for field in model[1]}
    | {"stream", "stream_options", "logprobs", "top_logprobs", "stop", "seed", "tools", "response_format", "echo"}
    | {"dimensions", "encoding_format", "top_n", "return_documents", "normalize", "raw_scores", "tool_choice"}
)


@st.composite
def requests(draw: Any) -> tuple[str, dict[str, Any]]:
    """A route, and its body with some fields replaced by anything."""
    path = draw(st.sampled_from(sorted(ROUTES)))
    body = {**ROUTES[path], **draw(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), VALUES, max_size=3))}
    for name in draw(st.sets(st.sampled_from(sorted(body)), max_size=1)):
        del body[name]
    return path, body


@settings(max_examples=30)
@given(st.lists(requests(), min_size=8, max_size=8), st.integers(0, 3))
def test_nonsense_is_refused_and_leaves_nothing_behind(sent: list[tuple[str, dict[str, Any]]], leaves: int) -> None:
    triton = FakeTriton(slots=100)
    app = make_app(Settings(), triton, None)

    async def run() -> list[Any]:
        calls = [ask(app, path, body, leave_after=0 if at < leaves else None) for at, (path, body) in enumerate(sent)]
        return await asyncio.gather(*calls)

    for (path, body), answer in zip(sent[leaves:], asyncio.run(run())[leaves:], strict=True):
        assert 200 <= answer.status < 500, (path, json.dumps(body), answer.pieces)
        if answer.status >= 400:
            assert answer.json["error"]
    assert triton.running == 0
    assert app.active == 0
