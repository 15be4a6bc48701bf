"""Decoder checkpoints generated from fixed seeds: one tiny configuration of each supported architecture.

The support table of the README is generated from `DECODERS`, and the export tests enumerate it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.tiny_encoders import VOCABULARY, make_tokenizer

SIZES: dict[str, float] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = {"num_key_value_heads": 2}
WINDOW = {**GROUPED, "sliding_window": 16}
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SHARING = {  # the third layer shares keys and values with the first, the fourth with the second
    **WINDOW,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 30.0,
}
DELTA = {
    **GROUPED,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
SCAN = {
    **GROUPED,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 64,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window_size": 16,
    "rel_extent": 24,
    "d_rel": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "unpadded_vocab_size": VOCABULARY,
}
LATENT_EXPERTS = "latents in the cache; experts"
CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}> {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@dataclass(frozen=True)
class Decoder:
    """Tiny configuration of one model type."""

    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""


DECODERS: dict[str, Decoder] = {
    "apertus": Decoder(GROUPED),
    "arcee": Decoder(GROUPED),
    "biogpt": Decoder(),
    "bamba": Decoder({**SCAN, "attn_layer_indices": [1]}, note="Mamba 2"),
    "big_bird": Decoder(
        {"is_decoder": True, "block_size": 32, "num_random_blocks": 1},
        note="texts as long as their keys are not in blocks",
    ),
    "bloom": Decoder(note="ALiBi as attention bias"),
    "codegen": Decoder({"n_positions": 256, "n_ctx": 256, "rotary_dim": 4}),
    "cohere": Decoder(GROUPED),
    "cohere2": Decoder(ALTERNATING, note="sliding window"),
    "deepseek_v2": Decoder({**LATENT, **ROUTED, "q_lora_rank": None}, note=LATENT_EXPERTS),
    "deepseek_v3": Decoder({**LATENT, **ROUTED}, note=LATENT_EXPERTS),
    "deepseek_v32": Decoder(
        {**LATENT, **ROUTED, "index_topk": 128, "index_n_heads": 4, "index_head_dim": 16},
        note="latents in the cache; experts; texts as long as its index chooses keys",
    ),
    "diffllama": Decoder(GROUPED, note="differential attention"),
    "doge": Decoder({**GROUPED, "keep_window_size": 128}, note="scores of keys; texts as long as none is left out"),
    "ernie4_5": Decoder(GROUPED),
    "exaone4": Decoder(ALTERNATING, note="sliding window"),
    "falcon": Decoder({"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}),
    "flint": Decoder({**ALTERNATING, "head_dim": 8}, note="sinks, alternating windows"),
    "falcon_h1": Decoder({**SCAN, "head_dim": 8, "mamba_d_ssm": 64}, note="Mamba 2 beside attention in each layer"),
    "gemma": Decoder({**GROUPED, "head_dim": 8}),
    "gemma2": Decoder(
        {
            **WINDOW,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        note="soft-capping, alternating windows",
    ),
    "gemma3_text": Decoder(
        {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2}, note="alternating windows"
    ),
    "gemma3n_text": Decoder(
        {**SHARING, "laurel_rank": 8, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
        note="alternating windows, layers that share keys and values",
    ),
    "gemma4_text": Decoder(
        {**SHARING, "num_key_value_heads": 1, "global_head_dim": 16, "use_double_wide_mlp": True},
        note="alternating windows, layers that share keys and values",
    ),
    "glm": Decoder({**GROUPED, "head_dim": 8}),
    "glm4": Decoder({**GROUPED, "head_dim": 8}),
    "glm4_moe": Decoder(
        {
            **GROUPED,
            "head_dim": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
        note="experts in groups, a shared one",
    ),
    "glm4_moe_lite": Decoder({**LATENT, **ROUTED}, note=LATENT_EXPERTS),
    "gpt2": Decoder({"n_positions": 256}),
    "gpt_bigcode": Decoder({"n_positions": 256}, note="multi-query"),
    "gpt_neo": Decoder(
        {"attention_types": [[["global", "local"], 1]], "window_size": 16, "num_layers": 2, "num_heads": 4},
        note="local attention",
    ),
    "gpt_neox": Decoder(),
    "gpt_oss": Decoder(
        {**ALTERNATING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        note="sinks, alternating windows; experts",
    ),
    "gptj": Decoder({"n_positions": 256, "rotary_dim": 4}),
    "granite": Decoder(GROUPED),
    "granite_swa": Decoder(ALTERNATING, note="sinks, alternating windows"),
    "granitemoe": Decoder({**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, note="experts"),
    "granitemoe_swa": Decoder(
        {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
        note="sinks, alternating windows; experts",
    ),
    "granitemoehybrid": Decoder(
        {
            **SCAN,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
        },
        note="Mamba 2",
    ),
    "helium": Decoder({**GROUPED, "head_dim": 8}),
    "hunyuan_v1_dense": Decoder({**GROUPED, "head_dim": 8}),
    "inkling_text": Decoder(
        {**INKLING, "log_scaling_n_floor": 8}, note="biases of each query by distance, sliding window; experts"
    ),
    "inkling2_text": Decoder(
        {**INKLING, "log_scaling_n_floor": 8},
        note="biases and sinks of each query, sliding window; experts",
    ),
    "jamba": Decoder(
        {
            **GROUPED,
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
        note="Mamba",
    ),
    "jetmoe": Decoder(
        {
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "num_experts_per_tok": 2,
            "num_local_experts": 4,
        },
        note="experts, of attention too",
    ),
    "lfm2": Decoder({**GROUPED, "layer_types": ["conv", "full_attention"]}, note="short convolutions"),
    "lfm2_moe": Decoder(
        {
            **GROUPED,
            "layer_types": ["conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 16,
        },
        note="short convolutions; experts",
    ),
    "llama": Decoder(GROUPED, note="SmolLM too"),
    "llama4_text": Decoder(
        {
            **GROUPED,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 1, 0],
            "floor_scale": 8,
            "moe_layers": [1, 2],
            "num_local_experts": 4,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
        },
        note="chunks, layers without positions; experts, a shared one",
    ),
    "longcat_flash": Decoder(
        {
            **LATENT,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 16,
        },
        note="two attentions a layer, latents in the cache; experts, some of which return a token as it is",
    ),
    "mamba2": Decoder(
        {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 64},
        note="Mamba 2, no attention",
    ),
    "megatron-bert": Decoder({"is_decoder": True}),
    "mimo_v2_flash": Decoder(
        {
            **ALTERNATING,
            "head_dim": 16,
            "v_head_dim": 8,
            **ROUTED,
        },
        note="sinks, alternating windows, values smaller than keys; experts",
    ),
    "minimax": Decoder(
        {**GROUPED, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
        note="linear attention; experts",
    ),
    "minicpm3": Decoder(LATENT, note="latents in the cache"),
    "mistral": Decoder(WINDOW, note="sliding window"),
    "mixtral": Decoder({**WINDOW, "num_local_experts": 4}, note="experts; sliding window"),
    "mpt": Decoder({"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}, note="ALiBi as attention bias"),
    "nemotron": Decoder({**GROUPED, "head_dim": 8}),
    "nemotron_h": Decoder(
        {
            **GROUPED,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 64,
        },
        note="Mamba 2",
    ),
    "olmo": Decoder(GROUPED),
    "olmo2": Decoder(GROUPED),
    "olmo3": Decoder(ALTERNATING, note="sliding window"),
    "olmo_hybrid": Decoder({**DELTA, "linear_num_key_heads": 4}, note="gated delta rule"),
    "olmoe": Decoder({**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, note="experts"),
    "openai-gpt": Decoder({"n_positions": 256}, note="no cache in transformers"),
    "opt": Decoder({"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "persimmon": Decoder(),
    "phi": Decoder(GROUPED, note="partial rotary"),
    "phi3": Decoder({**GROUPED, "original_max_position_embeddings": 256}),
    "qwen2": Decoder({**WINDOW, "use_sliding_window": True, "max_window_layers": 1}, note="2.5 too; sliding window"),
    "qwen2_moe": Decoder(
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        note="experts, a shared one",
    ),
    "qwen3": Decoder({**GROUPED, "head_dim": 8}),
    "qwen3_5_text": Decoder(DELTA, note="gated delta rule"),
    "qwen3_next": Decoder(
        {
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        note="gated delta rule; experts",
    ),
    "qwen3_moe": Decoder(
        {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        note="experts",
    ),
    "qwen4_exp_text": Decoder(
        {
            **DELTA,
            "layer_types": ["linear_attention", "indexed_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 1,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 128,
            "indexer_compress_ratio": 4,
        },
        note="gated delta rule, n-grams; experts; texts as long as its index chooses keys",
    ),
    "recurrent_gemma": Decoder(
        {**GROUPED, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8, "attention_window_size": 16},
        note="gated linear recurrence, sliding window",
    ),
    "roberta": Decoder({"is_decoder": True}, note="positions after a padding row"),
    "rwkv": Decoder(note="RWKV-4, no attention"),
    "seed_oss": Decoder({**GROUPED, "head_dim": 8}),
    "smollm3": Decoder({**GROUPED, "no_rope_layers": [1, 0]}, note="layers without positions"),
    "stablelm": Decoder({**GROUPED, "partial_rotary_factor": 0.25}, note="partial rotary"),
    "starcoder2": Decoder(WINDOW, note="sliding window"),
    "xlstm": Decoder(
        {"num_heads": 2, "hidden_size": 128, "embedding_dim": 128, "num_blocks": 2, "chunk_size": 16},
        note="xLSTM, no attention",
    ),
    "youtu": Decoder(LATENT, note="latents in the cache"),
    "zaya": Decoder(
        {
            **GROUPED,
            "head_dim": 8,
            "cca_time1": 3,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "router_hidden_size": 16,
            "attention_bias": True,
        },
        note="convolutions of queries and keys; experts",
    ),
    "zamba2": Decoder(
        {
            **GROUPED,
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "chunk_size": 64,
        },
        note="Mamba 2",
    ),
}


def make_decoder(model_type: str, **options: Any) -> PreTrainedModel:
    """Create a tiny model of `model_type` with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **DECODERS[model_type].options, **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # Granite's begin with zeros
            torch.nn.init.normal_(parameter)
    return model


def make_decoder_checkpoint(folder: Path, model_type: str, chat: bool = False, **options: Any) -> Path:
    """Save a tiny decoder of `model_type` with its tokeniser into `folder`."""
    tokenizer = make_tokenizer("bpe", type_ids=False)
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    if chat:
        tokenizer.chat_template = CHAT
    model = make_decoder(model_type, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
