"""LlamaIndex's OpenAI-like models."""

from __future__ import annotations

from checking import WORK, check, report
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

URL = {"api_base": f"{WORK['gateway']}/v1", "api_key": "none"}
writer = OpenAILike(model="writes", is_chat_model=True, max_tokens=12, temperature=0, max_retries=0, **URL)
CHAT = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Where is the museum?")]


@check("chat")
def _() -> None:
    assert writer.chat(CHAT).message.content


@check("chat, streamed")
def _() -> None:
    assert "".join(part.delta or "" for part in writer.stream_chat(CHAT)) == writer.chat(CHAT).message.content


@check("completion")
def _() -> None:
    continues = OpenAILike(model="writes", is_chat_model=False, max_tokens=12, temperature=0, max_retries=0, **URL)
    assert continues.complete("The museum").text


@check("embeddings")
def _() -> None:
    embeds = OpenAILikeEmbedding(model_name="embeds", **URL)
    assert len(embeds.get_text_embedding_batch(["a", "b"])) == 2


report()
