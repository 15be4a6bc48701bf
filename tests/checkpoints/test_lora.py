"""Adapters as PEFT saves them: what is read, and what is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from builder.checkpoints.linear_layers import linear_layers
from builder.checkpoints.lora import PREFIX, WEIGHTS, merged, read_lora
from builder.common.errors import CheckpointError
from tests.decoders import make_decoder
from tests.lora import save_lora, write_configuration


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return make_decoder("llama")


def test_scale_of_each_layer_follows_the_patterns(llama: PreTrainedModel, tmp_path: Path) -> None:
    """PEFT matches a pattern with the end of a layer's name, or all of it."""
    patterns: dict[str, Any] = {
        "rank_pattern": {"v_proj": 2},
        "alpha_pattern": {"v_proj": 6, r"model\.layers\.1\.self_attn\.q_proj": 12},
    }
    for use_rslora, scales in ((False, (2.0, 3.0, 3.0)), (True, (4.0, 6.0, 6 / np.sqrt(2)))):
        folder = save_lora(tmp_path / str(use_rslora), llama, use_rslora=use_rslora, **patterns)
        adapter = read_lora(str(folder), linear_layers(llama), 4)
        layers = {name.removeprefix("model.layers."): one for name, one in adapter.layers.items()}
        read = layers["0.self_attn.q_proj"], layers["1.self_attn.q_proj"], layers["1.self_attn.v_proj"]
        assert tuple(one.scale for one in read) == pytest.approx(scales)
        assert [len(one.a) for one in read] == [4, 4, 2]
        assert adapter.rank == 4


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_merged_adds_the_change_and_takes_it_out_again(model_type: str, tmp_path: Path) -> None:
    model, ids = make_decoder(model_type), torch.arange(5, 15)[None]
    targets = ("q_proj", "up_proj", "c_attn")
    adapter = read_lora(str(save_lora(tmp_path, model, targets)), linear_layers(model), 4)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        hooks = []
        for name, layer in adapter.layers.items():
            a, b = torch.from_numpy(layer.a), torch.from_numpy(layer.b)

            def add(module: Any, inputs: Any, output: Any, a: Any = a, b: Any = b, scale: float = layer.scale) -> Any:
                return output + inputs[0] @ a.T @ b.T * scale

            hooks.append(model.get_submodule(name).register_forward_hook(add))
        expected = model(input_ids=ids).logits
        for hook in hooks:
            hook.remove()
        with merged(model, adapter):
            torch.testing.assert_close(model(input_ids=ids).logits, expected)
        assert not torch.allclose(before, expected)
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora=true"),
        ({"bias": "lora_only"}, 'bias="lora_only"'),
        ({"lora_bias": True}, "lora_bias=true"),
        ({"modules_to_save": ["classifier", "score"]}, r'modules_to_save=\["classifier", "score"\].*merge_and_unload'),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts.up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights="pissa"'),
        ({"use_something_new": True}, "use_something_new=true"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; expected 'LORA'"),
        ({"lora_alpha": None}, "the ranks or alphas .* cannot be read: TypeError"),
        ({"lora_alpha": "large"}, "the ranks or alphas .* cannot be read: ValueError"),
        ({"lora_alpha": float("nan")}, "has the alpha nan for model.layers.0.self_attn.q_proj"),
        ({"r": 8}, "has rank 4 in model.layers.0.self_attn.q_proj and 8 by its adapter_config.json"),
        ({"rank_pattern": {"v_proj": 2}}, "has rank 4 in model.layers.0.self_attn.v_proj and 2 by its"),
        ({"alpha_pattern": {"(": 2}}, "the ranks or alphas .* cannot be read"),
    ],
)
def test_reader_refuses_what_the_graph_cannot_express(
    llama: PreTrainedModel, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    save_lora(tmp_path, llama)
    write_configuration(tmp_path, **fields)
    with pytest.raises(CheckpointError, match=named):
        read_lora(str(tmp_path), linear_layers(llama), 4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"base_model.model.lm_head.weight": (600, 32)}, "has the weight base_model.model.lm_head.weight"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": (4, 600)}, "lora_embedding_A"),
        ({f"{PREFIX}model.layers.7.mlp.up_proj.lora_A.weight": (4, 32)}, "one of two matrices of model.layers.7"),
        (
            {f"{PREFIX}lm_head.lora_A.weight": (4, 32), f"{PREFIX}lm_head.lora_B.weight": (600, 4)},
            "changes lm_head, which adapters of the model cannot",
        ),
        ({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": (4, 64)}, "it is for another model"),
        (
            {
                f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": (5, 32),
                f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight": (32, 5),
            },
            "rank 5 in model.layers.0.self_attn.q_proj, .* build it with --adapter-rank 5",
        ),
        (
            {
                f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": (0, 32),
                f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight": (32, 0),
            },
            r"matrices \(0, 32\) and \(32, 0\) of model.layers.0.self_attn.q_proj",
        ),
        ({f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight": ()}, r"matrices \(\) and \(32, 4\)"),
    ],
)
def test_reader_refuses_weights_that_no_layer_takes(
    llama: PreTrainedModel, changes: dict[str, tuple[int, ...]], named: str, tmp_path: Path
) -> None:
    save_lora(tmp_path, llama)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({**weights, **{name: torch.zeros(shape) for name, shape in changes.items()}}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=named):
        read_lora(str(tmp_path), linear_layers(llama), 4)


def test_reader_refuses_numbers_that_are_not_finite(llama: PreTrainedModel, tmp_path: Path) -> None:
    """No comparison finds them if the checkpoint is not at hand."""
    weights = load_file(save_lora(tmp_path, llama) / WEIGHTS)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_B.weight"
    weights[name][3, 1] = float("inf")
    save_file(weights, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"numbers in model.layers.0.self_attn.q_proj that are not finite"):
        read_lora(str(tmp_path), linear_layers(llama), 4)


def test_reader_names_a_missing_file(llama: PreTrainedModel, tmp_path: Path) -> None:
    (save_lora(tmp_path, llama) / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=f"has no {WEIGHTS}"):
        read_lora(str(tmp_path), linear_layers(llama), 4)
