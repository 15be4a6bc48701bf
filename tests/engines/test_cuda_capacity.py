"""Size of a decoder's cache by the memory of the card, prompts between steps, and threads beside a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builder.building.pipeline import build
from builder.common.cards import CARDS
from builder.common.errors import SpecError
from builder.common.memory import BYTES_PER_WEIGHT, cache_bytes
from builder.engines.cuda.capacity import IN_BLOCKS, IN_SLOTS, MAX_SLOTS, sized
from builder.engines.cuda.decoding import CudaDecoding
from builder.engines.gpu import CONTEXT, HEADROOM, SERVER_ON_CARD
from builder.options import BuildSpec, make_spec
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.cuda import MAX_NUMBERS
from builder.serving.plan.gpu import plan_on_gpu
from builder.serving.plan.needs import ModelNeeds, needs_of
from builder.serving.plan.unbuilt import on_gpu
from tests.decoders import make_decoder_checkpoint

LAYERS = (LayerShape(8, 128),) * 28
WEIGHTS, LENGTH = 1_200_000_000, 32768  # of Qwen3-0.6B in fp16
OF_TEXT = cache_bytes(LAYERS, 1, LENGTH, 2)


def _spec(**options: Any) -> BuildSpec:
    return make_spec(model="org/it", **{"target": "cuda", "precision": "fp16", **options})


def _sized(length: int = LENGTH, **options: Any) -> BuildSpec:
    return sized(_spec(**options), LAYERS, 2, WEIGHTS, length)


def _free(card: str, contexts: int = 1) -> float:
    return HEADROOM * CARDS[card].memory_mb * 2**20 - SERVER_ON_CARD - contexts * CONTEXT - WEIGHTS


def test_slots_are_those_that_the_card_has_memory_for() -> None:
    slots = int(IN_SLOTS * _free("l4") // OF_TEXT)
    assert 1 < slots < 16, "Regression: 16 slots were taken whatever the card, and refused as too large"
    assert _sized(gpu="l4").slots == slots
    assert _sized(machine={"gpus": [{"name": "l4"}]}).slots == slots
    assert _sized(gpu="h100", length=2048).slots == MAX_SLOTS
    assert _sized(gpu={"card": "l4", "memory_limit_mb": 8192}).slots == int(IN_SLOTS * ((8 << 30) - WEIGHTS) // OF_TEXT)
    assert _sized(gpu="l4", length=LENGTH * 100).slots == 1, "which is then refused by its size"


def test_slots_leave_memory_for_the_scales_of_small_weights() -> None:
    """Regression: scales were not counted, so that weights and slots were larger than the card."""
    parameters, length, layers = 24_000_000_000, 4096, (LayerShape(8, 128),) * 40
    spec = CudaDecoding(_spec(gpu="a10", precision="int4-weights")).sized(layers, parameters * 4, length).spec
    weights = BYTES_PER_WEIGHT["int4-weights"] * parameters
    assert spec.slots > 1
    assert cache_bytes(layers, spec.slots, length, 2) < _free("a10") + WEIGHTS - weights


def test_slots_are_no_more_than_a_tensor_has_numbers_for() -> None:
    """Regression: a server with more failed when it loaded the model."""
    layers, length = (LayerShape(8, 128),) * 4, 131072
    slots = sized(_spec(gpu="b200"), layers, 2, WEIGHTS, length).slots
    assert slots == MAX_NUMBERS // (8 * 128 * length) < MAX_SLOTS


def test_heads_without_a_kernel_are_refused_before_slots_are_counted() -> None:
    """Regression: a RuntimeError."""
    with pytest.raises(SpecError, match="heads have 512 numbers"):
        CudaDecoding(_spec(gpu="t4")).sized((LayerShape(4, 512),) * 2, WEIGHTS, LENGTH)


def test_search_of_more_beams_than_the_card_has_slots_for_is_refused(tmp_path: Path) -> None:
    """Regression: the model was built, with fewer slots than beams."""
    checkpoint = make_decoder_checkpoint(tmp_path / "writes", "llama", num_hidden_layers=16)
    options: dict[str, Any] = {"gpu": {"card": "l4", "memory_limit_mb": 1}, "beams": 16}
    spec = make_spec(model=str(checkpoint), output=tmp_path / "models", target="cuda", precision="fp16", **options)
    with pytest.raises(SpecError, match="a search of 16 beams needs as many slots"):
        build(spec)


def test_given_slots_and_unknown_cards_are_left_alone() -> None:
    for options in ({}, {"gpu": "l4", "slots": 16}, {"gpu": "t4", "slots": 16}, {"gpu": "l4", "cache_gb": 2}):
        spec = _spec(**options)
        assert sized(spec, LAYERS, 2, WEIGHTS, LENGTH) is spec


def test_cards_without_flash_attention_share_blocks_by_default() -> None:
    on_t4 = _sized(gpu="t4")
    assert on_t4.cache_gb == pytest.approx(IN_BLOCKS * _free("t4") / 1e9, abs=1e-3)
    in_slots = [
        _sized(gpu="t4", executor="bls"),
        _sized(gpu="t4", triton="24.10"),
        _sized(gpu="t4", serving={"prefill_tokens": 2048}),
        _sized(gpu="t4", length=LENGTH * 4),
        _sized(gpu="l4"),
    ]
    assert [spec.cache_gb for spec in in_slots] == [None] * 5
    assert in_slots[0].slots == int(IN_SLOTS * _free("t4", contexts=0) // OF_TEXT)


def test_gpus_read_more_of_a_prompt_between_steps_and_leave_cores_alone() -> None:
    """Regression: both were the CPU's: 256 tokens, and all cores for a graph that runs elsewhere."""
    assert [_spec(**o).prefill_tokens for o in ({}, {"serving": {"prefill_tokens": 64}})] == [1024, 64]
    assert make_spec(model="org/it").prefill_tokens == 256
    assert [CudaDecoding(_spec(**o)).session().threads for o in ({}, {"threads": 3})] == [1, 3]


def test_plan_counts_the_cache_that_the_build_will_choose(module_folder: Callable[[str], Path]) -> None:
    checkpoint = make_decoder_checkpoint(module_folder("planned") / "writes", "llama")
    options: dict[str, Any] = {"machine": {"cores": 2, "memory_gb": 8, "gpus": [{"name": "l4"}]}, "max_length": 128}
    spec = make_spec(model=str(checkpoint), target="cuda", precision="fp16", load={"requests_per_s": 1}, **options)
    needs = needs_of(spec)
    assert needs.sized == {"slots": MAX_SLOTS}
    assert needs.activated.startswith("4 x (1088 tokens of a step x"), "1,024 of prompts and one of each slot"
    assert spec.load is not None
    plan = plan_on_gpu(spec, spec.load, needs)
    assert plan.settings["slots"] == MAX_SLOTS
    assert plan.gpu_memory[0] == needs.weights + needs.activations + CONTEXT + cache_bytes(
        needs.layers, MAX_SLOTS, needs.length, 2
    )


def test_plan_refuses_a_precision_that_decoders_on_a_gpu_lack(module_folder: Callable[[str], Path]) -> None:
    """Regression: a KeyError, of a model that was built for the CPU."""
    checkpoint = make_decoder_checkpoint(module_folder("planned") / "exact", "llama")
    spec = make_spec(model=str(checkpoint), target="cuda", machine={"gpus": [{"name": "l4"}]})
    with pytest.raises(SpecError, match="not fp32: use --precision fp16"):
        on_gpu(spec, ModelNeeds("generation", WEIGHTS, LENGTH, LAYERS))
