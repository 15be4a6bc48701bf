"""Tiny checkpoints generated from fixed seeds, with random weights large enough that answers differ.

The table in docs/reference/architectures.md is generated from `ARCHITECTURES`, and the export tests enumerate it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast

from builder.checkpoints.tasks import find_task
from builder.common.samples import TEXTS

VOCABULARY = 600
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 514,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Architecture:
    """Tiny configuration of one model type. `fused` is how many of its attentions must be fused."""

    tokenizer: str
    options: dict[str, Any] = field(default_factory=dict)
    fused: int = 2
    without: tuple[str, ...] = ()
    note: str = ""


ARCHITECTURES: dict[str, Architecture] = {
    "albert": Architecture("unigram", {"embedding_size": 16}, note="layers share weights"),
    "bert": Architecture("wordpiece", note="MiniLM too"),
    "camembert": Architecture("unigram"),
    "convbert": Architecture("wordpiece", {"embedding_size": 32, "head_ratio": 2}, fused=0, note="mixed convolution"),
    "data2vec-text": Architecture("bpe"),
    "deberta": Architecture("bpe", {"pos_att_type": ["c2p", "p2c"], "relative_attention": True}, fused=0),
    "deberta-v2": Architecture(
        "unigram",
        {
            "pos_att_type": ["c2p", "p2c"],
            "relative_attention": True,
            "position_buckets": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
        note="v3 too; disentangled scores as attention bias",
    ),
    "distilbert": Architecture(
        "wordpiece",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        without=("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    ),
    "electra": Architecture("wordpiece", {"embedding_size": 16}),
    "ernie": Architecture("wordpiece"),
    "eurobert": Architecture("bpe", {"num_key_value_heads": 2, "head_dim": 8}, note="grouped-query attention"),
    "mobilebert": Architecture(
        "wordpiece", {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16}
    ),
    "modernbert": Architecture(
        "bpe",
        {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
        note="sliding window as attention bias",
    ),
    "mpnet": Architecture("wordpiece", note="relative position bias"),
    "nomic_bert": Architecture("wordpiece"),
    "roberta": Architecture("bpe"),
    "roberta-prelayernorm": Architecture("bpe"),
    "xlm-roberta": Architecture("unigram"),
    "xlm-roberta-xl": Architecture("unigram"),
    "xmod": Architecture("unigram", {"default_language": "en_XX", "languages": ["en_XX"]}),
}
NAMED_OTHERWISE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
PECULIAR: dict[str, Architecture] = {  # served with special handling, or refused; not in the support table
    "bart": Architecture(
        "bpe",
        {
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "eos_token_id": 3,
            "decoder_start_token_id": 3,
            "init_std": 0.2,
        },
        without=NAMED_OTHERWISE,
    ),
    "big_bird": Architecture("unigram", {"block_size": 8, "num_random_blocks": 1}),
    "fnet": Architecture("unigram"),
    "longformer": Architecture("bpe", {"attention_window": 8}),
    "openai_privacy_filter": Architecture(
        "bpe",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "eos_token_id": 3,
        },
        note="sinks, a band of tokens on each side; experts",
    ),
    "squeezebert": Architecture("wordpiece", {"embedding_size": 32}, note="its linear layers are convolutions"),
    "reformer": Architecture(
        "unigram",
        {
            "attn_layers": ["local", "lsh"],
            "axial_pos_embds": False,
            "is_decoder": False,
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
        },
    ),
}
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def make_tokenizer(kind: str, type_ids: bool) -> PreTrainedTokenizerFast:
    """Create a tokeniser of the kind over the project's own texts, the same at every call.

    Training a WordPiece or Unigram vocabulary is not deterministic, so theirs is counted here.
    """
    special = list(SPECIAL.values())
    if kind == "wordpiece":
        words, endings = _counted(lower=True)
        letters = sorted(set("".join(TEXTS).lower()) - {" "})
        pieces = [*special, *letters, *(f"##{p}" for p in letters), *words, *(f"##{p}" for p in endings)]
        vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece(prefix="##")
    elif kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
    else:
        words, endings = _counted(lower=False)
        letters = sorted(set("".join(TEXTS)) - {" "})
        pieces = [*letters, "▁", *(f"▁{word}" for word in words), *endings]
        scored = [(piece, -2.0 * index**0.2) for index, piece in enumerate(dict.fromkeys(reversed(pieces)), 1)]
        tokenizer = Tokenizer(models.Unigram([(token, 0.0) for token in special] + scored, unk_id=1))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.add_special_tokens(special)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if type_ids else "[CLS] $A [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair=pair, special_tokens=ids)
    names = ["input_ids", "token_type_ids", "attention_mask"] if type_ids else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, model_max_length=512, **SPECIAL)


def _counted(lower: bool) -> tuple[list[str], list[str]]:
    """Return the commonest words and word endings of the texts, ties in alphabetical order."""
    text = " ".join(TEXTS)
    words = re.findall(r"[A-Za-z]+", text.lower() if lower else text)
    endings = [word[-n:] for word in words for n in (2, 3) if len(word) > n]
    counts = (Counter(words), Counter(endings))
    common, endings = ([p for p, _ in sorted(c.items(), key=lambda item: (-item[1], item[0]))] for c in counts)
    return common[:200], endings[:100]


def make_checkpoint(
    folder: Path, model_type: str, task: str, labels: dict[int, str] | None = None, **options: Any
) -> Path:
    """Save a tiny checkpoint of `model_type` with the head of `task` into `folder`."""
    architecture = {**ARCHITECTURES, **PECULIAR}[model_type]
    sizes = {key: value for key, value in SIZES.items() if key not in architecture.without}
    if labels is not None:
        options |= {"id2label": labels, "label2id": {label: index for index, label in labels.items()}}
    type_ids = architecture.tokenizer == "wordpiece" and model_type not in ("distilbert", "mpnet")
    tokenizer = make_tokenizer(architecture.tokenizer, type_ids)
    config = AutoConfig.for_model(model_type, **{**sizes, **architecture.options, **options})
    torch.manual_seed(0)
    model = find_task(task).auto_class().from_config(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_colbert(folder: Path) -> Path:
    """Make the tiny BERT in `folder` a checkpoint of Stanford's ColBERT, with vectors of 16 numbers."""
    weights = {f"bert.{name}": values for name, values in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(3)
    save_file({**weights, "linear.weight": torch.randn(16, 32)}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    settings = {"query_maxlen": 24, "doc_maxlen": 60, "mask_punctuation": True}
    (folder / "artifact.metadata").write_text(json.dumps(settings))
    return folder


transformers.utils.logging.set_verbosity_error()
