"""Rerankers that are decoders, generated from fixed seeds and saved by sentence-transformers' CrossEncoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.decoders import DECODERS, SIZES, make_decoder
from tests.tiny_encoders import make_tokenizer

FIRST = "messages | selectattr('role', 'eq', '{}') | map(attribute='content') | first"
TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements.<|im_end|>\n<|im_start|>user\n"
    f"<Instruct>: {{{{ {FIRST.format('system')} | default('Find passages that answer the query') }}}}\n"
    f"<Query>: {{{{ {FIRST.format('query')} }}}}\n<Document>: {{{{ {FIRST.format('document')} }}}}<|im_end|>\n"
    "{% if add_generation_prompt or true %}<|im_start|>assistant\n{% endif %}"
)
# Of mxbai-rerank-v2 and of zerank-2: a pair in one turn of the user, and the query in place of a system turn.
ONE_TURN = (
    "<|im_start|>user\n{% if messages | selectattr('role', 'eq', 'system') | list %}instruction: "
    f"{{{{ {FIRST.format('system')} }}}} \n{{% endif %}}query: {{{{ {FIRST.format('query')} }}}} \ndocument: "
    f"{{{{ {FIRST.format('document')} }}}} \nRelevance:<|im_end|>\n<|im_start|>assistant\n"
)
QUERY_AS_SYSTEM = (
    f"<|im_start|>system\n{{{{ {FIRST.format('query')} }}}}<|im_end|>\n<|im_start|>user\n"
    f"{{{{ {FIRST.format('document')} }}}}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMED = f"A: {{{{ {FIRST.format('query')} | trim }}}}\nB: {{{{ {FIRST.format('document')} | trim }}}}\nRelevant?"


def make_reranker_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Create a tokenizer with the tokens yes and no, and those of the template, which puts tokens around a text."""
    tokenizer = make_tokenizer("bpe", type_ids=False)
    tokenizer.add_tokens(
        ["yes", "no", "Yes", "1", "0", AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_reranker(folder: Path, model_type: str, template: str | None = TEMPLATE, **options: Any) -> Path:
    """Save a tiny causal language model that scores yes against no into `folder`, as the library does.

    `options`: of the library's CrossEncoder.
    """
    tokenizer = make_reranker_tokenizer(template)
    plain = folder.with_name(f"{folder.name}-plain")
    make_decoder(model_type, vocab_size=len(tokenizer) + 4).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    CrossEncoder(str(plain), device="cpu", **options).save_pretrained(str(folder))
    return folder


def make_scoring_reranker(
    folder: Path, model_type: str, template: str, true: str, false: str | None = None, **variables: Any
) -> Path:
    """Save such a model that scores the token `true`, against `false` if given, without an activation.

    `variables`: of the template.
    """
    plain = make_reranker(folder.with_name(f"{folder.name}-yes"), model_type, template)
    tokens = [
        None if token is None else make_reranker_tokenizer().convert_tokens_to_ids(token) for token in (true, false)
    ]
    settings = {"processing_kwargs": {"chat_template": variables}} if variables else {}
    chain = [Transformer(str(plain), transformer_task="text-generation", **settings), LogitScore(*tokens)]
    CrossEncoder(modules=chain, device="cpu", activation_fn=torch.nn.Identity()).save_pretrained(str(folder))
    return folder


def make_classifying_reranker(folder: Path, model_type: str, template: str | None = TEMPLATE) -> Path:
    """Save the conversion of such a model to a classification head with one label, without modules.json."""
    tokenizer = make_reranker_tokenizer(template)
    torch.manual_seed(0)
    sizes = {**SIZES, **DECODERS[model_type].options, "vocab_size": len(tokenizer), "num_labels": 1}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **sizes)).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
