"""Tiny checkpoints of GLiNER and GLiNER2 from fixed seeds, as their `save_pretrained` writes them, without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from builder.checkpoints.gliner.layers import GlinerHead
from builder.checkpoints.gliner.settings import FILE, read_settings
from builder.checkpoints.gliner2.layers import Gliner2Head
from builder.checkpoints.gliner2.settings import ENCODER_FILE
from builder.checkpoints.gliner2.settings import read_settings as read_gliner2_settings
from tests.tiny_encoders import ARCHITECTURES, SIZES, make_tokenizer

GLINERS: dict[str, dict[str, Any]] = {  # those of which golden answers are kept
    "deberta": {"encoder_type": "deberta-v2", "hidden_size": 24},
    "bert": {"encoder_type": "bert", "num_rnn_layers": 0, "subtoken_pooling": "last", "embed_ent_token": False},
    "modernbert": {"encoder_type": "modernbert", "num_rnn_layers": 2},
    "tokens": {"encoder_type": "deberta-v2", "span_mode": "token_level", "model_type": "gliner_uni_encoder_token"},
}
GLINER2S: dict[str, dict[str, Any]] = {
    "deberta": {"encoder_type": "deberta-v2", "counting_layer": "count_lstm_v2"},
    "bert": {"encoder_type": "bert", "counting_layer": "count_lstm", "span_head": {"max_width": 4}},
    "modernbert": {"encoder_type": "modernbert", "counting_layer": "count_lstm_moe", "max_width": 3},
}
MARKERS2 = (  # in the order in which GLiNER2 adds them
    *("[SEP_STRUCT]", "[SEP_TEXT]", "[P]", "[C]", "[E]", "[R]", "[L]"),
    *("[EXAMPLE]", "[OUTPUT]", "[DESCRIPTION]"),
)
MARKERS = ("[FLERT]", "<<ENT>>", "<<SEP>>")  # in the order in which the library adds them


def make_gliner(folder: Path, encoder_type: str, scale: float = 1.0, **settings: Any) -> Path:
    """Save a tiny checkpoint with an encoder of `encoder_type`; `settings` are those of gliner_config.json.

    `scale`: of its weights after the encoder; larger ones make scores more certain.
    """
    architecture = ARCHITECTURES[encoder_type]
    tokenizer = make_tokenizer(architecture.tokenizer, False)
    tokenizer.add_tokens(list(MARKERS), special_tokens=True)
    size = {"vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(encoder_type, **{**SIZES, **architecture.options, **size})
    torch.manual_seed(7)
    encoder = AutoModel.from_config(config).eval()
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    values = {
        "model_type": "gliner_uni_encoder_span",
        "model_name": "tiny",
        "encoder_config": config.to_dict(),
        "class_token_index": tokenizer.convert_tokens_to_ids("<<ENT>>"),
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "max_width": 5,
        "max_len": 200,
        **settings,
    }
    (folder / FILE).write_text(json.dumps(values))
    own = read_settings(folder, folder.name, weights=False)
    assert own is not None
    head = GlinerHead(own, config.hidden_size)
    for name, weights in sorted(head.state_dict().items()):
        if not name.startswith("rnn."):
            torch.nn.init.normal_(weights, std=scale * (0.5 if name.endswith("bias") else weights.shape[-1] ** -0.5))
    named = {f"{own.encoder_prefix}{name}": weights for name, weights in encoder.state_dict().items()}
    save_file({**named, **head.state_dict()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_gliner2(folder: Path, encoder_type: str, scale: float = 1.0, **settings: Any) -> Path:
    """Save a tiny checkpoint of GLiNER2 with an encoder of `encoder_type`; `settings` are those of config.json.

    `scale`: of its weights after the encoder; larger ones make scores more certain.
    """
    architecture = ARCHITECTURES[encoder_type]
    tokenizer = make_tokenizer(architecture.tokenizer, False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS2)})
    size = {"vocab_size": len(tokenizer)}
    config = AutoConfig.for_model(encoder_type, **{**SIZES, **architecture.options, **size})
    torch.manual_seed(7)
    encoder = AutoModel.from_config(config).eval()
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained((folder / ENCODER_FILE).parent)
    values = {"model_type": "extractor", "model_name": "tiny", "token_pooling": "first", **settings}
    (folder / "config.json").write_text(json.dumps(values))
    own = read_gliner2_settings(folder, folder.name)
    assert own is not None
    head = Gliner2Head(own, config.hidden_size)
    for _, weights in sorted(head.state_dict().items()):
        torch.nn.init.normal_(weights, std=scale * (0.5 if weights.dim() == 1 else weights.shape[-1] ** -0.5))
    named = {f"{own.encoder_prefix}{name}": weights for name, weights in encoder.state_dict().items()}
    save_file({**named, **head.state_dict()}, folder / "model.safetensors", {"format": "pt"})
    return folder
