"""Models of `scripts/bench retrieval`: one entry each, with how its checkpoint is made and what a request to it is.

All but MiniLM have the real sizes, random weights and MiniLM's tokenizer and vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.models import minilm

TEMPLATE = (
    "<|im_start|>system\nJudge whether the document answers the query. Answer yes or no.\n"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
)
UNLIMITED = {"queue": {"timeout_us": 0}}  # in fp32, requests of 8 clients wait for longer than the default 30 s


@dataclass(frozen=True)
class RetrievalModel:
    """Model of a kind: embed, rerank, or late for late interaction.

    `spec`: options of its build; `seconds`: of a measurement, at least.
    """

    kind: str
    make: Callable[[Path], None]
    spec: Mapping[str, Any] = field(default_factory=dict)
    pooling: str = "mean"
    documents: int = 0  # of a request to a ranker
    seconds: float = 3

    def requests(self, texts: Sequence[str]) -> list[Any]:
        """Return the requests of a client: texts, or a query with its documents."""
        if self.kind == "embed":
            return list(texts)
        rolled = [*texts, *texts]
        return [{"query": texts[at], "documents": rolled[at + 1 : at + 1 + self.documents]} for at in range(len(texts))]

    @property
    def texts(self) -> int:
        """Texts that one request brings."""
        return max(1, self.documents)


def _minilm(folder: Path) -> None:
    shutil.copytree(minilm(), folder)


def _embedder(folder: Path, config: Any, pooling: str, side: str = "right") -> None:
    """Write a sentence-transformers folder of the config with random weights and a pooling mode, in fp32."""
    torch.manual_seed(0)
    shutil.copytree(minilm(), folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json"))
    AutoModel.from_config(config).save_pretrained(folder)
    modes = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": False, pooling: True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    tokenizer.save_pretrained(folder)


def _bert_base(folder: Path) -> None:
    _embedder(folder, AutoConfig.for_model("bert"), "pooling_mode_mean_tokens")


def _bge_m3(folder: Path) -> None:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    config = AutoConfig.for_model("xlm-roberta", vocab_size=30522, max_position_embeddings=514, pad_token_id=0, **sizes)
    _embedder(folder, config, "pooling_mode_cls_token")


def _qwen3(layers: int = 28) -> Any:
    return AutoConfig.for_model(
        "qwen3", vocab_size=30522, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=101, eos_token_id=102, pad_token_id=0,
    )  # fmt: skip


def qwen3_embedding(folder: Path, layers: int = 28) -> None:
    _embedder(folder, _qwen3(layers), "pooling_mode_lasttoken", "left")


def _qwen3_reranker(folder: Path) -> None:
    """Write sentence-transformers' chain of a causal model and LogitScore."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    torch.manual_seed(0)
    model = folder.with_name(folder.name + "-model")
    AutoModelForCausalLM.from_config(_qwen3()).save_pretrained(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(minilm(), padding_side="left")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B")  # as Qwen3's, adds none
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    yes, no = tokenizer.convert_tokens_to_ids(["##yes", "##no"])  # which openvino-genai reads by the names "yes", "no"
    chain = [Transformer(str(model), transformer_task="text-generation"), LogitScore(yes, no)]
    CrossEncoder(modules=chain, device="cpu").save_pretrained(str(folder))


def _colbert(folder: Path) -> None:
    """Write sentence-transformers' MultiVectorEncoder of BERT-base with a projection to 128."""
    from sentence_transformers import MultiVectorEncoder

    model = folder.with_name(folder.name + "-model")
    _bert_base(model)
    shutil.rmtree(model / "1_Pooling")
    (model / "modules.json").unlink()
    MultiVectorEncoder(str(model), device="cpu").save_pretrained(str(folder))


RETRIEVAL_MODELS: dict[str, RetrievalModel] = {
    "minilm": RetrievalModel("embed", _minilm),
    "bert-base": RetrievalModel("embed", _bert_base, {"quality": 0.0}),
    "bge-m3": RetrievalModel("embed", _bge_m3, {"quality": 0.0}, "cls", seconds=8),
    "qwen3-embedding": RetrievalModel(
        "embed", qwen3_embedding, {"quality": 0.0, "max_length": 512}, "lasttoken", seconds=10
    ),
    "qwen3-reranker": RetrievalModel(
        "rerank",
        _qwen3_reranker,
        {
            "quality": 0.0,
            "task": "text-ranking",
            "max_length": 640,
            "serving": UNLIMITED,
        },
        documents=20,
        seconds=20,
    ),
    "colbert": RetrievalModel(
        "late",
        _colbert,
        {"quality": 0.0, "task": "multi-vector-embedding", "truncate": True, "serving": UNLIMITED},
        documents=100,
        seconds=15,
    ),
}  # fmt: skip
