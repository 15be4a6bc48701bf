"""Optimisation profiles as functions of shapes: every call that a front model makes has one, in every instance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import SpecError
from builder.repository.placement import place, profiles_of
from builder.repository.profiles import Calls, Shape, default_profiles, groups, input_shapes, takes, uncovered
from builder.spec import Profile, make_spec

CALLS = st.builds(Calls, st.integers(1, 12), st.integers(1, 12), st.integers(1, 60))


@st.composite
def _profile(draw: st.DrawFn) -> Profile:
    sides = [sorted(draw(st.lists(st.integers(1, 12), min_size=3, max_size=3))) for _ in ("rows", "tokens")]
    least, best, most = (tuple(side[place] for side in sides) for place in range(3))
    return Profile(min=least, opt=best, max=most)


def _every(calls: Calls) -> list[Shape]:
    shapes = [(rows, length) for rows in range(1, calls.rows + 1) for length in range(1, calls.length + 1)]
    return [shape for shape in shapes if calls.include(shape)]


@given(CALLS, st.lists(_profile(), min_size=1, max_size=4))
def test_a_call_is_found_uncovered_exactly_when_no_profile_takes_it(calls: Calls, profiles: list[Profile]) -> None:
    missed = [shape for shape in _every(calls) if not any(takes(profile, shape) for profile in profiles)]
    assert uncovered(profiles, calls) == (min(missed) if missed else None)


@given(CALLS, st.lists(_profile(), min_size=1, max_size=4))
def test_every_instance_takes_every_call_that_any_profile_takes(calls: Calls, profiles: list[Profile]) -> None:
    if uncovered(profiles, calls) is not None:
        return
    found = groups(profiles, calls)
    assert sorted(number for group in found for number in group) == list(range(len(profiles)))
    for group in found:
        assert all(any(takes(profiles[number], shape) for number in group) for shape in _every(calls))


@given(st.integers(1, 256), st.integers(1, 8192), st.integers(1, 65536))
def test_the_default_profiles_take_every_call_each_and_are_tuned_for_one_that_is_made(
    rows: int, length: int, budget: int
) -> None:
    calls = Calls(rows, length, budget)
    for profile in default_profiles(calls):
        assert uncovered([profile], calls) is None
        assert calls.include(profile.opt)
    assert len({profile.opt for profile in default_profiles(calls)}) == len(default_profiles(calls))


def test_the_inputs_of_a_profile_have_its_shape_and_the_tasks_own_axis_its_own() -> None:
    profile = Profile(opt=(4, 32), max=(8, 64))
    assert input_shapes(profile, ["input_ids", "positions"], ["input_ids"]) == {
        "input_ids": {"min": (1, 1), "opt": (4, 32), "max": (8, 64)},
        "positions": {"min": (1, 1), "opt": (4, 1), "max": (8, 64)},
    }


def test_profiles_that_leave_a_call_out_are_refused_with_the_call() -> None:
    options = {"model": "x", "target": "tensorrt", "max_batch_size": 8}
    small = make_spec(**options, tensorrt={"profiles": [{"opt": [4, 64], "max": [8, 128]}]})
    with pytest.raises(SpecError, match="takes 1 rows of 129 tokens"):
        profiles_of(small, token_budget=2048, max_length=256)
    two = [{"opt": [4, 64], "max": [8, 128]}, {"min": [1, 129], "opt": [2, 200], "max": [8, 256]}]
    spec = make_spec(**options, tensorrt={"profiles": two})
    assert len(profiles_of(spec, 2048, 256)) == 2
    assert groups(profiles_of(spec, 2048, 256), Calls(8, 256, 2048)) == ((0, 1),), "neither takes every call alone"


def test_a_profile_out_of_order_is_refused() -> None:
    with pytest.raises(SpecError, match=r"tokens must be 1 <= min <= opt <= max, found 1, 200, 128"):
        make_spec(model="x", target="tensorrt", tensorrt={"profiles": [{"opt": [4, 200], "max": [8, 128]}]})


def test_the_gpu_options_of_a_spec_arrive_where_the_backend_reads_them() -> None:
    from tests.golden.repositories import graph  # a graph of the engine asked for, without weights

    gpu = {"devices": [1, 3], "memory_limit_mb": 512, "arena_extend_strategy": "kNextPowerOfTwo"}
    spec = make_spec(model="x", target="cuda", instances=2, gpu={**gpu, "cudnn_conv_algo_search": "EXHAUSTIVE"})
    placement = place(spec, graph("onnxruntime"), 2048, 128)
    assert [(g.count, g.kind, tuple(g.gpus)) for g in placement.groups] == [(2, "KIND_GPU", (1, 3))]
    assert placement.parameters["gpu_mem_limit"] == str(512 << 20)
    assert placement.parameters["arena_extend_strategy"] == "0"
    assert placement.parameters["cudnn_conv_algo_search"] == "0"
