"""Optimisation profiles: every call of a front has a profile, in every instance."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.building.variants.candidates import requested_variants
from builder.common.errors import SpecError
from builder.engines.placement import place
from builder.engines.profiles import (
    Calls,
    Shape,
    buckets,
    covering_profile,
    default_profiles,
    input_shapes,
    largest_calls,
    profiles_of,
    takes,
    uncovered,
)
from builder.options import Profile, TensorRT, make_spec
from builder.runtime.encoder.cutting import smallest_bucket

CALLS = st.builds(Calls, st.integers(1, 12), st.integers(1, 12), st.integers(1, 60))


@st.composite
def _profile(draw: st.DrawFn) -> Profile:
    sides = [sorted(draw(st.lists(st.integers(1, 12), min_size=3, max_size=3))) for _ in ("rows", "tokens")]
    least, best, most = (tuple(side[index] for side in sides) for index in range(3))
    return Profile(min=least, opt=best, max=most)


def _every(calls: Calls) -> list[Shape]:
    shapes = [(rows, length) for rows in range(1, calls.rows + 1) for length in range(1, calls.length + 1)]
    return [shape for shape in shapes if calls.include(shape)]


@given(CALLS, st.lists(_profile(), min_size=1, max_size=4))
def test_uncovered_call_is_found_exactly_if_no_profile_takes_it(calls: Calls, profiles: list[Profile]) -> None:
    missed = [shape for shape in _every(calls) if not any(takes(profile, shape) for profile in profiles)]
    assert uncovered(profiles, calls) == (min(missed) if missed else None)


@given(st.integers(1, 256), st.integers(1, 8192), st.integers(1, 65536))
def test_default_profiles_take_every_call_and_share_no_length(rows: int, length: int, budget: int) -> None:
    calls = Calls(rows, length, max(budget, length))
    profiles = default_profiles(calls)
    assert uncovered(profiles, calls) is None
    assert uncovered([covering_profile(calls)], calls) is None
    for before, after in itertools.pairwise(profiles):
        assert before.max[1] < after.min[1]
    for profile in profiles:
        assert calls.include(profile.opt)
        assert largest_calls(profile, calls), "each is compared at its end"


@given(st.integers(1, 256), st.integers(1, 8192), st.integers(1, 65536))
def test_default_profiles_reserve_at_most_twice_the_token_budget(rows: int, length: int, budget: int) -> None:
    """Regression: 64 rows of 8192 tokens were reserved for calls of 8192 tokens."""
    calls = Calls(rows, length, max(budget, length, rows * 128))
    assert all(p.max[0] * p.max[1] <= 2 * calls.token_budget for p in default_profiles(calls))
    assert len(default_profiles(calls)) <= 8


@given(st.integers(1, 64), st.integers(1, 600), st.integers(600, 4096))
def test_buckets_fit_every_call_and_belong_to_a_profile(rows: int, length: int, budget: int) -> None:
    calls = Calls(rows, length, budget)
    shapes = buckets(calls)
    assert all(calls.include(shape) and any(takes(p, shape) for p in default_profiles(calls)) for shape in shapes)
    for call in [(1, 1), (1, length), (rows, min(length, budget // rows)), (max(1, rows // 2), 1)]:
        if calls.include(call) and call[0] * 2 * max(call[1], 16) * 2 <= budget:
            assert smallest_bucket(call, shapes) != call or call in shapes
    sizes = [row * tokens for row, tokens in shapes]
    assert sizes == sorted(sizes)


def test_call_is_padded_to_the_smallest_bucket_that_fits() -> None:
    shapes = buckets(Calls(8, 128, 512))
    assert smallest_bucket((3, 20), shapes) == (4, 32)
    assert smallest_bucket((1, 128), shapes) == (1, 128)
    assert smallest_bucket((8, 65), shapes) == (8, 65), "no bucket within the budget holds it: it runs as it is"


def test_profile_inputs_have_its_shape_and_the_tasks_own_axis() -> None:
    profile = Profile(opt=(4, 32), max=(8, 64))
    assert input_shapes(profile, ["input_ids", "positions"], ["input_ids"]) == {
        "input_ids": {"min": (1, 1), "opt": (4, 32), "max": (8, 64)},
        "positions": {"min": (1, 1), "opt": (4, 1), "max": (8, 64)},
    }


def test_incomplete_profiles_are_refused_with_the_missing_call() -> None:
    options = {"model": "x", "target": "tensorrt", "max_batch_size": 8}
    small = make_spec(**options, tensorrt={"profiles": [{"opt": [4, 64], "max": [8, 128]}]})
    with pytest.raises(SpecError, match="takes 1 rows of 129 tokens"):
        profiles_of(small.tensorrt.profiles, Calls(8, 256, 2048), plan=True)
    two = [{"opt": [4, 64], "max": [8, 128]}, {"min": [1, 129], "opt": [2, 200], "max": [8, 256]}]
    spec = make_spec(**options, tensorrt={"profiles": two})
    assert len(profiles_of(spec.tensorrt.profiles, Calls(8, 256, 2048), plan=True)) == 2


def test_profiles_share_one_instance_group() -> None:
    from tests.golden.repositories import graph

    spec = make_spec(model="x", target="tensorrt", instances=2)
    placement = place(spec, graph("tensorrt"), 2048, 512)
    assert [(group.count, group.profiles) for group in placement.groups] == [(2, (0, 1, 2))]
    assert placement.parameters == {"execution_context_allocation_strategy": "ON_PROFILE_CHANGE"}
    older = place(spec.model_copy(update={"triton": "25.04"}), graph("tensorrt"), 2048, 512)
    assert older.parameters == {}, "every context takes the memory of the largest profile there"


def test_onnxruntime_tensorrt_has_one_profile_and_its_own_cache(tmp_path: Path) -> None:
    from tests.golden.repositories import graph

    spec = make_spec(model="x", target="tensorrt", engine="onnxruntime", max_batch_size=8)
    paths = []
    for weights in (b"before", b"retrained"):
        (tmp_path / "model.onnx").write_bytes(weights)
        placement = place(spec, replace(graph("onnxruntime"), path=tmp_path / "model.onnx"), 2048, 512)
        parameters = placement.accelerators[0].parameters
        assert parameters["trt_profile_max_shapes"] == "input_ids:8x512,attention_mask:8x512"
        assert len(placement.warm_ups) == 1
        paths.append(parameters["trt_engine_cache_path"])
    assert paths[0] != paths[1], "an engine of the old weights would answer for the new ones"
    assert all(path.startswith("/engines/x_model-") for path in paths)
    two = {"profiles": [{"opt": [4, 64], "max": [8, 128]}, {"min": [1, 129], "opt": [2, 200], "max": [8, 512]}]}
    with pytest.raises(SpecError, match=r"runs the first profile alone, and tensorrt\.profiles has 2"):
        place(spec.model_copy(update={"tensorrt": TensorRT(**two)}), graph("onnxruntime"), 2048, 512)


def test_onnxruntime_tensorrt_refuses_fp32_where_it_would_be_tf32() -> None:
    options = {"model": "x", "target": "tensorrt", "engine": "onnxruntime"}
    for gpu in ({}, {"gpu": "l4"}):
        with pytest.raises(SpecError, match=r"multiplies fp32 as TF32 .* leave --engine out for a plan"):
            requested_variants(make_spec(**options, **gpu), ())
    assert [v.precision for v in requested_variants(make_spec(**options, gpu="t4"), ())] == ["fp32"]
    assert [v.precision for v in requested_variants(make_spec(**options, level="O4"), ())] == ["fp16"]
    assert [v.engine for v in requested_variants(make_spec(model="x", target="tensorrt"), ())] == ["tensorrt"]


def test_tf32_is_disabled_or_the_release_is_refused() -> None:
    from tests.golden.repositories import graph

    spec = make_spec(model="x", target="cuda")
    (accelerator,) = place(spec, graph("onnxruntime"), 2048, 128).accelerators
    assert (accelerator.name, dict(accelerator.parameters)) == ("cuda", {"use_tf32": "0"})
    hopper = spec.model_copy(update={"gpu": spec.gpu.model_copy(update={"card": "h100"}), "precision": "fp16"})
    assert place(hopper, graph("onnxruntime"), 2048, 128).accelerators[0].parameters["sdpa_kernel"] == "127"
    older = hopper.model_copy(update={"triton": "24.10"})
    assert "sdpa_kernel" not in place(older, graph("onnxruntime"), 2048, 128).accelerators[0].parameters
    with pytest.raises(SpecError, match=r"multiplies fp32 as TF32 .* or --triton 24.06 or later"):
        place(spec.model_copy(update={"triton": "24.05"}), graph("onnxruntime"), 2048, 128)


def test_cuda_graphs_are_refused_for_a_task_with_its_own_input() -> None:
    from tests.golden.repositories import graph

    spec = make_spec(model="x", target="tensorrt", gpu={"cuda_graphs": True})
    changed = replace(graph("tensorrt"), inputs=("input_ids", "attention_mask", "positions"))
    with pytest.raises(SpecError, match="has the input positions, whose length changes"):
        place(spec, changed, 2048, 128)


def test_profile_with_sizes_out_of_order_is_refused() -> None:
    with pytest.raises(SpecError, match=r"tokens must be 1 <= min <= opt <= max, found 1, 200, 128"):
        make_spec(model="x", target="tensorrt", tensorrt={"profiles": [{"opt": [4, 200], "max": [8, 128]}]})


def test_gpu_options_reach_the_parameters_that_the_backend_reads() -> None:
    from tests.golden.repositories import graph  # a graph of the engine asked for, without weights

    gpu = {"devices": [1, 3], "memory_limit_mb": 512, "arena_extend_strategy": "kNextPowerOfTwo"}
    spec = make_spec(model="x", target="cuda", instances=2, gpu={**gpu, "cudnn_conv_algo_search": "EXHAUSTIVE"})
    placement = place(spec, graph("onnxruntime"), 2048, 128)
    assert [(g.count, g.kind, tuple(g.gpus)) for g in placement.groups] == [(2, "KIND_GPU", (1, 3))]
    assert placement.parameters["gpu_mem_limit"] == str(512 << 20)
    assert placement.parameters["arena_extend_strategy"] == "0"
    assert placement.parameters["cudnn_conv_algo_search"] == "0"
