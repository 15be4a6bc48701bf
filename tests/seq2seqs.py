"""Encoder-decoder checkpoints generated from fixed seeds: one tiny configuration of each supported architecture.

The support table of the README is generated from `SEQ2SEQS`, and the export tests enumerate it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, MBart50Tokenizer, PreTrainedModel

from builder.common.samples import TEXTS
from tests.decoders import Decoder as Seq2Seq
from tests.tiny_encoders import VOCABULARY, make_tokenizer

SPECIAL = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 2}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_max_distance": 24,
    "relative_attention_num_buckets": 8,
    "initializer_factor": 2.0,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "init_std": 0.3,
    "bos_token_id": 2,
    "forced_eos_token_id": None,
}

SEQ2SEQS: dict[str, Seq2Seq] = {
    "bart": Seq2Seq(BART),
    "blenderbot": Seq2Seq(BART),
    "blenderbot-small": Seq2Seq(BART),
    "m2m_100": Seq2Seq(BART, note="NLLB too"),
    "marian": Seq2Seq({**BART, "decoder_vocab_size": VOCABULARY}),
    "mbart": Seq2Seq(BART, note="mBART-50 too"),
    "mt5": Seq2Seq({**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "pegasus": Seq2Seq(BART),
    "plbart": Seq2Seq(BART),
    "t5": Seq2Seq(T5, note="FLAN-T5 too; relative bias"),
    "umt5": Seq2Seq({**T5, "feed_forward_proj": "gated-gelu"}, note="a relative bias a layer"),
}


def make_seq2seq(model_type: str, **options: Any) -> PreTrainedModel:
    """Create a tiny model of `model_type` with random weights."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, **SPECIAL, **SEQ2SEQS[model_type].options, **options}
    config = AutoConfig.for_model(model_type, **settings)
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():  # an end token is as likely as any other, so that texts end at different lengths
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_multilingual_tokenizer() -> MBart50Tokenizer:
    """Create a tokeniser of the few words of the packaged samples, with the languages of mBART-50."""
    words = sorted({word for text in TEXTS for word in text.lower().split()} | set("abcdefghijklmnopqrstuvwxyz"))[:300]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"▁{word}", -2.0 - 0.01 * index) for index, word in enumerate(words)]
    pieces += [(letter, -8.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return MBart50Tokenizer(vocab=pieces, src_lang="en_XX", model_max_length=64)


def make_seq2seq_checkpoint(folder: Path, model_type: str, multilingual: bool = False, **options: Any) -> Path:
    """Save a tiny encoder-decoder of `model_type` with its tokeniser into `folder`; see `generation_config`."""
    generation = options.pop("generation_config", {})
    model = make_seq2seq(model_type, **options)
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer = make_multilingual_tokenizer() if multilingual else make_tokenizer("bpe", type_ids=False)
    tokenizer.save_pretrained(folder)
    return folder
