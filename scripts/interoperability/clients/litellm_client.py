"""litellm: through the gateway as an OpenAI-compatible server, and through Triton's own endpoint."""

from __future__ import annotations

import litellm
from checking import WORK, check, report

CHAT = [{"role": "user", "content": "Where is the museum?"}]
OPENAI = {"api_base": f"{WORK['gateway']}/v1", "api_key": "none", "num_retries": 0}
GENERATE = f"{WORK['triton']}/v2/models/writes/generate"


@check("chat")
def _() -> None:
    answer = litellm.completion("openai/writes", CHAT, max_tokens=9, temperature=0, **OPENAI)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 9 or answer.choices[0].finish_reason == "stop"


@check("chat, streamed")
def _() -> None:
    chunks = litellm.completion("openai/writes", CHAT, max_tokens=9, stream=True, **OPENAI)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("embeddings")
def _() -> None:
    assert len(litellm.embedding("openai/embeds", ["a", "b"], **OPENAI).data) == 2


@check("triton/: generate")
def _() -> None:
    answer = litellm.completion("triton/writes", CHAT, max_tokens=9, api_base=GENERATE)
    assert answer.choices[0].message.content


@check("triton/: generate_stream")
def _() -> None:
    chunks = litellm.completion("triton/writes", CHAT, max_tokens=9, stream=True, api_base=GENERATE)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


report()
