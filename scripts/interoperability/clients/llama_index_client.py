"""LlamaIndex's OpenAI-like models, and its classes that rank."""

from __future__ import annotations

from checking import WORK, check, report
from llama_index.core.llms import ChatMessage
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

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


def ranks(ranker: BaseNodePostprocessor) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("The town hall", "The soup", "A museum")]
    first, second = ranker.postprocess_nodes(nodes, query_str="passport")
    assert first.get_score() >= second.get_score()


@check("CohereRerank")
def _() -> None:
    ranks(CohereRerank(base_url=WORK["gateway"], api_key="none", model="ranks", top_n=2))


@check("JinaRerank")
def _() -> None:
    ranks(JinaRerank(base_url=f"{WORK['gateway']}/v1", api_key="none", model="ranks", top_n=2))


@check("TextEmbeddingInference")
def _() -> None:
    ranks(TextEmbeddingInference(base_url=WORK["gateway"], top_n=2))


report()
