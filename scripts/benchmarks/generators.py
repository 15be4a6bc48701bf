"""Checkpoints of generating models in real sizes, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from builder.common.samples import TEXTS

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "qwen3-0.6b": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "llama-wide": (  # few layers, as wide as those of the next: 0.43 billion parameters
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "llama-1b": (
        "llama",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-700m": (
        "lfm2",
        {
            "vocab_size": 65536,
            "hidden_size": 1536,
            "intermediate_size": 10240,  # two thirds of it, rounded up to 256
            "layer_types": ["full_attention" if at in (2, 5, 8, 10, 12, 14) else "conv" for at in range(16)],
            "num_hidden_layers": 16,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128000,
        },
    ),
    "qwen3.5-0.8b": (  # the text model alone
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "layer_types": 6 * [*(3 * ["linear_attention"]), "full_attention"],
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
        },
    ),
    "granite-4-h-350m": (
        "granitemoehybrid",
        {
            "vocab_size": 100352,
            "hidden_size": 768,
            "intermediate_size": 2048,  # no layer has it without experts, but llama.cpp reads it
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "num_hidden_layers": 32,
            "layer_types": ["attention" if at in (10, 13, 17, 27) else "mamba" for at in range(32)],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "position_embedding_type": "nope",
            "max_position_embeddings": 32768,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 1 / 64,
            "residual_multiplier": 0.246,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-moe-1b": (  # 0.4 billion parameters a token
        "granitemoe",
        {
            "vocab_size": 49152,
            "hidden_size": 1024,
            "intermediate_size": 512,
            "num_local_experts": 32,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 1 / 64,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
}
STORED_IN_FP32 = ("gpt2", "qwen3-0.6b")  # the others in bf16


def make_checkpoint(name: str, folder: Path) -> Path:
    """Create a checkpoint of a real size with random weights, and a byte-level tokeniser with as many tokens."""
    if (folder / "model.safetensors").exists():
        return folder
    model_type, options = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **options)
    dtype = torch.float32 if name in STORED_IN_FP32 else torch.bfloat16
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="100GB")
    path = folder / "config.json"  # older transformers know the layers by the names of published checkpoints alone
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}, indent=1))
    save_tokenizer(folder, config.vocab_size)
    return folder


def first_layers(checkpoint: Path, count: int) -> Path:
    """Save the first `count` layers of a checkpoint, with its embeddings and its tokeniser, in a folder beside it."""
    folder = checkpoint.with_name(f"{checkpoint.name}-first-{count}-layers")
    if not (folder / "model.safetensors").exists():
        config = AutoConfig.from_pretrained(checkpoint)
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:count]
        model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype="auto")
        model.save_pretrained(folder, max_shard_size="100GB")
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, size: int, **special: str) -> None:
    """Save a byte-level tokeniser of `size` tokens, most of which never come from a text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet))
    state = json.loads(trained.to_str())["model"]
    vocabulary = state["vocab"]
    for index in range(len(vocabulary), size):
        vocabulary[f"Ġword{index}"] = index  # never made from a text, but generated by the model
    if "pad_token" in special and special["pad_token"] not in vocabulary:
        vocabulary[special["pad_token"]] = vocabulary.pop(f"Ġword{size - 1}")
    full = Tokenizer(models.BPE(vocabulary, [tuple(merge) for merge in state["merges"]]))
    full.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    full.decoder = decoders.ByteLevel()
    named = {"bos_token": "!", "eos_token": "!", "unk_token": "!", **special}
    PreTrainedTokenizerFast(tokenizer_object=full, **named).save_pretrained(folder)
