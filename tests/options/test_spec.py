from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import SpecError
from builder.common.machine import available_cores
from builder.options import load_specs, make_spec
from builder.options.parts import Budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "../evil"}, "without a path"),
        ({"name": "a/b"}, "without a path"),
        ({"name": ""}, "without a path"),
        ({"triton": "19.01"}, "Triton 19.01 is not known"),
        ({"precision": "int3"}, "precision"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"instances": 2, "threads": 10_000}, "exceed the"),
        ({"max_batch": 3}, "did you mean 'max_batch_size'"),
        ({"serving": {"preferred_batch_sizes": [128]}}, "exceeds max_batch_size"),
        ({"serving": {"queue": {"timeout": 3}}}, "did you mean 'timeout_us'"),
        ({"serving": {"priority_levels": 2}}, "default_priority"),
        ({"budget": "accuracy 0.5%", "data": "a.jsonl"}, "--budget is 'accuracy 0.5%'; expected a measure"),
        ({"budget": "-0.5%", "data": "a.jsonl"}, "expected a measure"),
        ({"budget": "accuracy -100%", "data": "a.jsonl"}, "allow a loss of less than 100 %"),
        ({"budget": "accuracy -0.5%"}, "--budget needs --data"),
        ({"data": "a.jsonl"}, "--data needs --budget"),
        ({"budget": "accuracy -0.5%", "data": "a.jsonl", "quality": 0.9}, "--budget and --quality"),
    ],
)
def test_spec_refuses_meaningless_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make_spec(model="org/name", **options)


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("accuracy -0.5%", Budget("accuracy", 0.005, True)),
        ("ndcg@10 -0.01", Budget("ndcg@10", 0.01, False)),
        (" F1 macro-2 % ", Budget("F1 macro", 0.02, True)),
    ],
)
def test_budget_is_a_share_or_a_number(text: str, budget: Budget) -> None:
    assert make_spec(model="org/name", budget=text, data="a.jsonl").loss_budget == budget


def test_batcher_keeps_queue_limits_only_if_the_front_cannot() -> None:
    """Any limit disables Triton's prefetching of the next batch, and a single instance then pauses for 500 ms."""
    assert not make_spec(model="org/name", serving={"queue": {"max_size": 9}}).serving.batcher_keeps_limits
    for serving in (
        {"priority_levels": 2, "default_priority": 1},
        {"queue": {"timeout_action": "DELAY"}},
        {"queue": {"allow_timeout_override": True}},
    ):
        assert make_spec(model="org/name", serving=serving).serving.batcher_keeps_limits


@pytest.mark.parametrize(
    ("queue", "size", "milliseconds"),
    [({}, 512, 30_000), ({"max_size": 0, "timeout_us": 0}, 0, 0), ({"max_size": 9, "timeout_us": 1}, 9, 1)],
)
def test_queue_of_0_has_no_limit(queue: dict[str, int], size: int, milliseconds: int) -> None:
    """0 disables a limit, as in Triton; a timeout below a millisecond stays a timeout."""
    policy = make_spec(model="org/name", serving={"queue": queue}).serving.queue
    assert (policy.size, policy.waiting_ms) == (size, milliseconds)


def test_spec_refuses_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    for instances, threads in ((1, 6), (2, 3), (4, 1), (6, 1)):
        spec = make_spec(model="org/name", instances=instances)
        assert (spec.threads_per_instance, spec.build_threads) == (threads, threads)


def test_spec_uses_the_cores_and_memory_of_machine() -> None:
    """Sizes and config.pbtxt follow the cores of `machine`; measurements use those of this machine."""
    here = available_cores()
    spec = make_spec(model="org/name", threads=here + 2, machine={"cores": 2 * here + 4}, instances=2)
    assert (spec.threads_per_instance, spec.loop_threads, spec.build_threads) == (here + 2, here + 2, here)
    with pytest.raises(SpecError, match=rf"exceed the {here + 1} cores of the machine that serves"):
        make_spec(model="org/name", threads=here + 2, machine={"cores": here + 1})
    assert make_spec(model="org/name", machine={"memory_gb": 2.5}).usable_memory == 2.5e9


def test_decode_loop_uses_all_cores_by_default() -> None:
    assert make_spec(model="org/name").loop_threads == 0
    assert make_spec(model="org/name", threads=1).loop_threads == 1
    assert make_spec(model="org/name", machine={"cores": 3}).loop_threads == 3


def test_default_name_is_the_last_part_of_the_model() -> None:
    assert make_spec(model="org/name").entry_name == "name"
    assert make_spec(model="/some/folder/").entry_name == "folder"


def test_models_file_applies_defaults(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("defaults: {precision: int8}\nmodels:\n  - {model: a/b}\n  - {model: c/d, precision: fp32}\n")
    assert [(s.entry_name, s.precision) for s in load_specs(path)] == [("b", "int8"), ("d", "fp32")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", "expected a mapping with a list"),
        ("- a", "expected a mapping"),
        ("models: [{model: a/b, precison: int8}]", "did you mean 'precision'"),
        ("model: [{model: a/b}]", "expected a mapping with a list"),
        ("models: [{model: a/b}]\ndefault: {}", "did you mean 'defaults'"),
        ("models: [{name: x}]", "needs a key `model`"),
        ("models: [{model: a/b}, {model: c/b}]", "'b' is used twice"),
        ("models: [", "cannot be read as YAML"),
    ],
)
def test_models_file_with_errors_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_specs(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": {"devices": [1]}}, "`gpu:` is for --target cuda or tensorrt"),
        ({"target": "cuda", "gpu": {"cuda_graphs": True}}, "`gpu.cuda_graphs:` is for plans: --target tensorrt"),
        ({"target": "cuda", "tensorrt": {"workspace_mb": 9}}, "`tensorrt:` is for --target tensorrt"),
        ({"vllm": {"tensor_parallel_size": 2}}, "`vllm:` is for --engine vllm"),
        ({"target": "cuda", "gpu": {"devices": []}}, "gpu.devices"),
        ({"target": "cuda", "gpu": {"devices": [-1]}}, "gpu.devices.0"),
        ({"triton": "23.01"}, "Triton 23.01 is not known"),
        ({"target": "cuda", "graph": "model.onnx"}, "--graph is verified and served on a CPU"),
        ({"target": "tpu"}, "target: Input should be 'cpu', 'cuda' or 'tensorrt', found 'tpu'"),
    ],
)
def test_spec_refuses_gpu_options_on_a_cpu(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        make_spec(model="x", **options)
