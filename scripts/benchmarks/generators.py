"""Checkpoints of generating models in real sizes, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from builder.samples import TEXTS

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
}


def make_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Create a checkpoint of a real size with random weights, and a byte-level tokeniser with as many tokens."""
    if (folder / "model.safetensors").exists():
        return folder
    model_type, options = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **options)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, max_shard_size="100GB")
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
        vocabulary[f"Ġword{index}"] = index  # never made from a text, but said by the model
    if "pad_token" in special and special["pad_token"] not in vocabulary:
        vocabulary[special["pad_token"]] = vocabulary.pop(f"Ġword{size - 1}")
    full = Tokenizer(models.BPE(vocabulary, [tuple(merge) for merge in state["merges"]]))
    full.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    full.decoder = decoders.ByteLevel()
    named = {"bos_token": "!", "eos_token": "!", "unk_token": "!", **special}
    PreTrainedTokenizerFast(tokenizer_object=full, **named).save_pretrained(folder)
