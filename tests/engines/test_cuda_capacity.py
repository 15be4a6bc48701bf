"""Size of a decoder's cache by the memory of the card, prompts between steps, and threads beside a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from builder.building.pipeline import build
from builder.checkpoints.activations import DecodingStep
from builder.common.cards import CARDS
from builder.common.errors import SpecError
from builder.common.memory import BYTES_PER_WEIGHT, cache_bytes
from builder.engines.cuda.capacity import MAX_SLOTS, SHARE, SHARE_BEFORE_FLASH, sized
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
CONFIG = Qwen3Config(hidden_size=1024, intermediate_size=3072, vocab_size=151_936)
STEP = partial(DecodingStep.of, CONFIG, 1024, width=2)


def _spec(**options: Any) -> BuildSpec:
    return make_spec(model="org/it", **{"target": "cuda", "precision": "fp16", **options})


def _sized(length: int = LENGTH, **options: Any) -> BuildSpec:
    return sized(_spec(**options), LAYERS, 2, WEIGHTS, length, STEP)


def _in_slots(**options: Any) -> BuildSpec:
    return _sized(executor="bls", **options)


def _free(card: str, contexts: int = 1) -> float:
    return HEADROOM * CARDS[card].memory_mb * 2**20 - SERVER_ON_CARD - contexts * CONTEXT - WEIGHTS


def test_slots_are_those_that_the_card_has_memory_for() -> None:
    slots = int(SHARE * _free("l4", contexts=0) // OF_TEXT)
    assert 1 < slots < 16, "Regression: 16 slots were taken whatever the card, and refused as too large"
    assert _in_slots(gpu="l4").slots == slots
    assert _in_slots(machine={"gpus": [{"name": "l4"}]}).slots == slots
    limit = {"card": "l4", "memory_limit_mb": 8192}
    assert _in_slots(gpu=limit).slots == int(SHARE * ((8 << 30) - WEIGHTS) // OF_TEXT)
    assert _in_slots(gpu="l4", length=LENGTH * 100).slots == 1, "which is then refused by its size"


@pytest.mark.parametrize("options", [{"slots": 5}, {"cache_gb": 19.05}])
def test_build_counts_what_a_step_computes_beside_weights_and_cache(options: dict[str, Any]) -> None:
    """Regression: a cache was accepted that leaves no memory for a step, which `plan` counts."""
    length = 33_300
    engine = CudaDecoding(_spec(gpu="l4", **options)).sized(LAYERS, 2 * WEIGHTS, length, CONFIG)
    alone = replace(engine, config=None).plan_memory(LAYERS, 2 * WEIGHTS, length).cache
    assert _free("l4") - STEP(engine.spec.slots).bytes < alone < _free("l4")
    with pytest.raises(SpecError, match=r"weights, a step of \d+ tokens and .*cache.* need 20.* GB and l4 has room"):
        engine.plan_memory(LAYERS, 2 * WEIGHTS, length)


@pytest.mark.parametrize(("executor", "weights"), [("bls", 20_800_000_000), ("in-process", 19_900_000_000)])
def test_cache_by_the_card_leaves_memory_for_a_step(executor: str, weights: int) -> None:
    """A step may compute more than the fifth that the cache leaves of what weights do."""
    engine = CudaDecoding(_spec(gpu="l4", executor=executor)).sized(LAYERS, 2 * weights, 256, CONFIG)
    cache = engine.plan_memory(LAYERS, 2 * weights, 256).cache
    assert 0 < cache < SHARE * (_free("l4", contexts=executor == "in-process") + WEIGHTS - weights)


def test_slots_leave_memory_for_the_scales_of_small_weights() -> None:
    """Regression: scales were not counted, so that weights and slots were larger than the card."""
    parameters, length, layers = 24_000_000_000, 4096, (LayerShape(8, 128),) * 40
    options = {"gpu": "a10", "precision": "int4-weights", "triton": "24.10"}
    spec = CudaDecoding(_spec(**options)).sized(layers, parameters * 4, length, CONFIG).spec
    weights = BYTES_PER_WEIGHT["int4-weights"] * parameters
    assert spec.slots > 1
    assert cache_bytes(layers, spec.slots, length, 2) < _free("a10") + WEIGHTS - weights


@pytest.mark.parametrize("executor", ["bls", "in-process"])
def test_cache_is_no_more_than_a_tensor_has_numbers_for(executor: str) -> None:
    """Regression: a server with more failed when it loaded the model."""
    layers, length = (LayerShape(8, 128),) * 4, 131072
    spec = sized(_spec(gpu="b200", executor=executor), layers, 2, WEIGHTS, length, STEP)
    slots = MAX_NUMBERS // (8 * 128 * length)
    assert slots < MAX_SLOTS
    if executor == "bls":
        assert (spec.slots, spec.cache_gb) == (slots, None)
    else:
        assert spec.slots == MAX_SLOTS
        assert spec.cache_gb is not None
        assert 0.99 * MAX_NUMBERS < spec.cache_gb * 1e9 / (4 * 2 * 2) < MAX_NUMBERS


def test_heads_without_a_kernel_are_refused_before_slots_are_counted() -> None:
    """Regression: a RuntimeError."""
    with pytest.raises(SpecError, match="heads have 512 numbers"):
        CudaDecoding(_spec(gpu="t4")).sized((LayerShape(4, 512),) * 2, WEIGHTS, LENGTH, CONFIG)


def test_search_of_more_beams_than_the_card_has_slots_for_is_refused(tmp_path: Path) -> None:
    """Regression: the model was built, with fewer slots than beams."""
    checkpoint = make_decoder_checkpoint(tmp_path / "writes", "llama", num_hidden_layers=16)
    options: dict[str, Any] = {"gpu": {"card": "l4", "memory_limit_mb": 1}, "beams": 16}
    options |= {"serving": {"prefill_tokens": 2048}}  # more than blocks take
    spec = make_spec(model=str(checkpoint), output=tmp_path / "models", target="cuda", precision="fp16", **options)
    with pytest.raises(SpecError, match="a search of 16 beams needs as many slots"):
        build(spec)


def test_given_slots_and_unknown_cards_are_left_alone() -> None:
    for options in ({}, {"gpu": "l4", "slots": 16}, {"gpu": "t4", "slots": 16}, {"gpu": "l4", "cache_gb": 2}):
        spec = _spec(**options)
        assert sized(spec, LAYERS, 2, WEIGHTS, LENGTH, STEP) is spec


def test_sequences_share_blocks_where_memory_ends_before_slots_do() -> None:
    """Regression: an L4 decoded four sequences at once, each with memory for the longest text."""
    for card, share in (("t4", SHARE_BEFORE_FLASH), ("l4", SHARE), ("h100", SHARE)):
        spec = _sized(gpu=card)
        assert spec.slots == MAX_SLOTS
        assert spec.cache_gb == pytest.approx(share * _free(card) / 1e9, abs=1e-3)
    assert _sized(gpu="t4", length=128).cache_gb, "slots are slow there, however many fit"
    assert [_sized(gpu="t4", length=LENGTH * 4).cache_gb, _sized(gpu="l4", length=LENGTH * 100).cache_gb] == [None] * 2
    fast = _sized(gpu="h100", length=2048)
    assert (fast.slots, fast.cache_gb) == (MAX_SLOTS, None), "slots have faster kernels"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"executor": "bls"}, "made of slots with --executor bls"),
        ({"triton": "24.10"}, "the Python of Triton 24.10 gets 1.23.2"),
        ({"serving": {"prefill_tokens": 2048}}, "prefill_tokens is 2048"),
    ],
)
def test_report_says_why_a_cache_is_in_slots(options: dict[str, Any], reason: str) -> None:
    engine = CudaDecoding(_spec(gpu="l4", **options)).sized(LAYERS, WEIGHTS, LENGTH, CONFIG)
    assert engine.spec.cache_gb is None
    assert reason in "".join(engine.remarks)
    chosen = CudaDecoding(_spec(gpu="l4", slots=2, **options)).sized(LAYERS, WEIGHTS, LENGTH, CONFIG)
    assert not chosen.remarks


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
