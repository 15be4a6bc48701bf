"""A tiny checkpoint of any architecture that transformers registers for a head, from its own configuration class.

The default configuration is made small by the names of its fields: sizes, layers, heads, experts, windows, positions.
`ODDITIES` has the values that a field's name does not determine. Weights are random and large enough that answers
differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto import modeling_auto

from builder.checkpoints.text_part import without_missing_libraries
from tests.tiny_encoders import ARCHITECTURES, VOCABULARY, make_tokenizer

HEADS = {  # mapping of transformers: the task that serves its head
    "CAUSAL_LM": "text-generation",
    "MULTIMODAL_LM": "text-generation",  # its part for text
    "MASKED_LM": "fill-mask",
    "SEQUENCE_CLASSIFICATION": "text-classification",
    "TOKEN_CLASSIFICATION": "token-classification",
}
AUTO = {
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "MULTIMODAL_LM": transformers.AutoModelForMultimodalLM,
    "MASKED_LM": transformers.AutoModelForMaskedLM,
    "SEQUENCE_CLASSIFICATION": transformers.AutoModelForSequenceClassification,
    "TOKEN_CLASSIFICATION": transformers.AutoModelForTokenClassification,
}
# Classes of whole checkpoints whose type the head's auto class gives a part that it cannot load again, or nothing.
WHOLE = {
    "emu3": "Emu3ForConditionalGeneration",
    "evolla": "EvollaForProteinText2Text",
    "mllama": "MllamaForConditionalGeneration",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}
UNLOADABLE = ("layoutlmv2",)  # transformers creates no model of it without a library that no package index has
DRAFTS = {  # they read keys and values of another model, of this type
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
GENERATING = ("CAUSAL_LM", "MULTIMODAL_LM")
ROWS = VOCABULARY + 8  # of the embedding table: some tokenisers add a token of their own
POSITIONS = 130  # RoBERTa's table starts counting at its third row: 128 tokens
WINDOW = 16
HIDDEN = 32
SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
NAMED: tuple[tuple[str, Any], ...] = (  # the first pattern that matches a field's whole name gives its value
    (r"vocab_size|n_token|n_vocab|text_vocab_size", ROWS),
    (r"sliding_window|window_size|attention_chunk_size|local_attention|attention_window", WINDOW),
    (
        r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|(max_sequence|model_max|seq)_length|max_2d_.*)",
        POSITIONS,
    ),
    (r"initializer_range|init_std", 0.2),
    (r"qk_head_dim", None),  # the sum of two others
    (r"(.*_)?head_dim|kv_channels|d_kv", 8),
    (r".*_rank", 8),
    (r"rotary_dim", 4),
    (r"(mamba_)?chunk_size", 16),
    (r"(n_|topk_)group", 1),
    (r"num_experts_per_tok|.*top_?k|moe_k", 2),
    (r".*(num|n)(_\w+)?_experts|num_experts|n_routed_experts", 4),
    (r".*moe.*(intermediate|ffn).*_size|expert_.*size", 16),
    (r"intermediate_size|.*ffn_dim|ffn_hidden_size|n_inner|d_inner|dff|d_ff|hidden_dim|.*intermediate_size", 64),
    (r"hidden_size|d_model|n_embd|n_embed|dim|emb_dim|model_dim|.*hidden_size|.*_hidden_dim|.*embed_dim", HIDDEN),
    (r"(num|n)_?(hidden_)?layers?|(encoder|decoder)_layers|.*num_layers|depth|num_.*hidden_layers|.*_layers", 2),
    (r"num_key_value_heads|.*_(kv|key_value)_heads|num_.*kv_heads|n_kv_heads", 2),
    (r"(num|n)_?(attention_)?heads?|(encoder|decoder)_attention_heads|.*_heads|num_heads", 4),
    (r"bos_token_id|cls_token_id", 2),
    (r".*_(size|dim|channels|length)", HIDDEN),
)
HYBRID = ["linear_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
SHARING = {  # the last layers share keys and values with earlier ones
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
# Gemma 4's full-attention layers have larger heads
TALL = {**SHARING, "per_layer_config": {"01": {"head_dim": 16}, "03": {"head_dim": 16}}}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}  # halves of heads of 8
IMAGE_TOKENS = {"<image>": 5, "<|extra_200|>": 6, "IMGIMGAAZ": 7, "<|visual token 000000|>": 7}
LOCAL: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "max_position_embeddings": POSITIONS,
    "head_dim": 8,
}
ODDITIES: dict[str, dict[str, Any]] = {  # values that the names of the fields do not give
    **{
        f"{name}_text": {"rope_parameters": MROPE}
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "paddleocr_vl")
    },
    **{
        f"{name}_text": {"rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
        for name in ("glm4v_moe", "glm_ocr")
    },
    # the keys of an index: scores are 0 if all of its heads are, and among equal scores any key may be chosen
    # the keys of an index: texts up to the last position have no others
    "axk2": {"index_topk": POSITIONS, "index_n_heads": 16},
    **{name: {"index_topk": POSITIONS} for name in ("deepseek_v32", "glm_moe_dsa", "hy_v4")},
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "layer_group_size": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    # sparse from 28 tokens on, in whole blocks up to the last position
    "big_bird": {"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 128},
    "bigbird_pegasus": {"block_size": 4, "num_random_blocks": 1},
    "blt": {
        "vocab_size": VOCABULARY,
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 100,
        **{f"{part}_config": LOCAL for part in ("patcher", "global")},
        **{f"{part}_config": {**LOCAL, "hidden_size_global": HIDDEN} for part in ("encoder", "decoder")},
    },
    "chameleon": {"vocabulary_map": IMAGE_TOKENS},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cosmos3_edge_text": {"rope_parameters": MROPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": HIDDEN},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots3_note_text": {"index_topk": POSITIONS, "shared_experts_intermediate_size": 16, "index_head_dim": 8},
    "doge": {"keep_window_size": POSITIONS},  # of no longer texts is a key left out
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": IMAGE_TOKENS},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 4, "token_dropout": False},
    "fun_asr_nano": {
        "adaptor_config": {"hidden_size": HIDDEN, "intermediate_size": HIDDEN // 4, "num_attention_heads": 4}
    },
    "gemma3n_text": {
        **SHARING,
        "vocab_size_per_layer_input": ROWS,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {**TALL, "vocab_size_per_layer_input": ROWS, "hidden_size_per_layer_input": 8},
    "gemma4_unified_text": TALL,
    "granitemoehybrid": {**MAMBA, "layer_types": HYBRID},
    "glm5_next_text": {"index_topk": 144, "index_n_heads": 16},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,  # a head of its query transformer has 64
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 16,
        },
    },
    "inkling2_text": {"unpadded_vocab_size": ROWS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "mamba_d_state": 8},
    "kimi_linear": {"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 1024},
    "llama4_text": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 1, 0],
        "layer_types": ["chunked_attention", "chunked_attention", "full_attention"],
        "moe_layers": [1, 2],
        "floor_scale": 8,
    },
    "longcat_flash": {"expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16},
    "marian": {"decoder_vocab_size": ROWS},
    "mimi": {"upsample_groups": HIDDEN},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "muse_spark_audio": {"patch_sizes": [2, 2], "hidden_sizes": [16, 32], "depths": [1, 1], "num_hidden_layers": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1},
    "nemotron3_diarization": {
        "chunk_length": 32,
        "chunk_left_context": 4,
        "chunk_right_context": 4,
        "fifo_length": 8,
        "speaker_cache_update_period": 16,
    },
    "neomme": {
        "per_layer_config": {},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "nystromformer": {"conv_kernel_size": 65},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
    **{name: {"enable_audio_output": False} for name in ("qwen2_5_omni", "qwen3_omni_moe")},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 128,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": HIDDEN},
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
        "num_buckets": 2,
        "attn_layers": ["local", "lsh"],
    },
    "rwkv": {"context_length": POSITIONS},
    "t5": {"decoder_start_token_id": 0},
    "timm_wrapper": {"model_args": {"embed_dim": HIDDEN}},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "xlstm": {"chunk_size": 16, "hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba": {
        "mamba_dt_rank": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "mamba_d_state": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_query_groups": 4,
        "hybrid_layer_ids": [1, 3],
    },
}
DECODING = {"big_bird": {"block_size": 32}}  # of heads that generate: sparse beyond the last position


def architectures(head: str) -> list[str]:
    """Return the model types that transformers registers for a head, in alphabetical order."""
    return sorted(getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES"))


def tiny_config(head: str, model_type: str) -> PreTrainedConfig:
    """Return the architecture's default configuration, made small."""
    kind = CONFIG_MAPPING[model_type]
    defaults = kind().to_dict()
    options = {**_small(defaults), **ODDITIES.get(model_type, {})}
    if head in GENERATING:
        options |= ({"is_decoder": True} if "is_decoder" in defaults else {}) | DECODING.get(model_type, {})
    elif head != "MASKED_LM":
        options["num_labels"] = 3
    return kind(**options)


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration (or of one inside it) that are to be smaller, with their new values."""
    kinds = [len(set(map(str, v))) for k, v in values.items() if _per_layer(k, v)]
    layers = max([2, *kinds])
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            kind = {"model_type": value["model_type"]}
            small[name] = {**kind, **_small(value), **ODDITIES.get(value["model_type"], {})}
        elif _per_layer(name, value):
            small[name] = _cycled(value, layers)
        elif name in SPECIAL_IDS:
            small[name] = SPECIAL_IDS[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = min(value, VOCABULARY - 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            named = next((new for pattern, new in NAMED if re.fullmatch(pattern, name)), None)
            if named is not None and value > 0:
                small[name] = min(value, named) if isinstance(named, int) and named != ROWS else named
    if "num_hidden_layers" in small:
        small["num_hidden_layers"] = layers
    if "num_key_value_heads" in small and values["num_key_value_heads"] == values.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "head_dim" in values and values["head_dim"] is None:
        small["head_dim"] = 8
    if values.get("sliding_window", 0) is None and "use_sliding_window" in values:
        small["sliding_window"] = WINDOW
    return small


def _per_layer(name: str, value: Any) -> bool:
    return isinstance(value, list) and len(value) > 4 and "layer" in name


def _cycled(values: list[Any], layers: int) -> list[Any]:
    """Return as many values as there are layers, with every kind among them."""
    kinds = list({str(value): value for value in values}.values())
    return [kinds[index % len(kinds)] for index in range(layers)]


def tiny_model(head: str, model_type: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = tiny_config(head, model_type)
    with without_missing_libraries(config):
        kind = _class(head, config)
        model: PreTrainedModel = getattr(kind, "from_config", kind)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.count_nonzero():
            # Some routers begin with zeros: all experts are equal then, and of equals any may be chosen.
            torch.nn.init.normal_(parameter, std=0.2)
    if model.can_generate():
        # a text cut at its maximum length would end with this token, whatever the logits are
        model.generation_config.forced_eos_token_id = None
    return model


def tiny_tokenizer(head: str, model_type: str) -> PreTrainedTokenizerFast:
    """Return the tokeniser of the support tables, with no limit of its own."""
    kind = "bpe" if head in GENERATING else getattr(ARCHITECTURES.get(model_type), "tokenizer", "bpe")
    tokenizer = make_tokenizer(kind, type_ids=kind == "wordpiece" and model_type not in ("distilbert", "mpnet"))
    tokenizer.model_max_length = 10**9
    if head in GENERATING:
        tokenizer.backend_tokenizer.post_processor = None
        tokenizer.bos_token, tokenizer.eos_token = "[CLS]", "[SEP]"
    return tokenizer


def load(head: str, folder: Path) -> PreTrainedModel:
    """Load the checkpoint in `folder` with transformers' class for the head."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with without_missing_libraries(config):
        model: PreTrainedModel = _class(head, config).from_pretrained(folder)
    return model.eval()


def _class(head: str, config: PreTrainedConfig) -> Any:
    name = WHOLE.get(config.model_type)
    return AUTO[head] if name is None else getattr(transformers, name)


def make_checkpoint(head: str, model_type: str, folder: Path) -> Path:
    """Save a tiny checkpoint with the head into `folder`."""
    if model_type in UNLOADABLE:
        tiny_config(head, model_type).save_pretrained(folder)
        save_file({}, folder / "model.safetensors")
    else:
        tiny_model(head, model_type).save_pretrained(folder)
    tiny_tokenizer(head, model_type).save_pretrained(folder)
    return folder
