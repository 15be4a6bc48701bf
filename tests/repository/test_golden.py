"""Golden repositories: the emitted files of every target, byte for byte, parsed by Triton's protobuf."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from builder.options import make_spec
from builder.repository.config.render import parse, render
from builder.repository.layout.encoder import lay_out, serving_document
from builder.runtime.fields import Field
from tests.golden.repositories import FOLDER, TARGETS, graph, repository


@pytest.mark.parametrize("target", TARGETS)
def test_golden_repositories_are_unchanged(target: str) -> None:
    assert repository(target) == (FOLDER / f"{target}.txt").read_text(), "python -m tests.golden.repositories"


@pytest.mark.parametrize("target", TARGETS)
def test_golden_configurations_parse(target: str) -> None:
    parts = re.split(r"^== (\S+): .*$", repository(target), flags=re.MULTILINE)[1:]
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        assert parse(text, name).name == name


@pytest.mark.parametrize("target", TARGETS)
def test_fronts_allow_triton_to_prepare_the_next_batch(target: str) -> None:
    """A queue limit disables that (support_prefetching_ in scheduler_utils.cc) and causes pauses of 500 ms."""
    policy = _parsed(target, "encoder").dynamic_batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds, policy.allow_timeout_override) == (0, 0, False)


@pytest.mark.parametrize(
    ("options", "front", "batcher"),
    [
        ({}, (512, 30_000), (0, 0)),
        ({"serving": {"queue": {"max_size": 9, "timeout_us": 1500}}}, (9, 2), (0, 0)),
        ({"serving": {"queue": {"max_size": 0, "timeout_us": 0}}}, (0, 0), (0, 0)),
        ({"serving": {"priority_levels": 2, "default_priority": 2}}, (0, 0), (512, 30_000_000)),
        ({"serving": {"queue": {"max_size": 9, "timeout_action": "DELAY"}}}, (0, 0), (9, 30_000_000)),
        ({"serving": {"rate_limiter": [{"name": "R"}]}}, (0, 0), (0, 0)),
        ({"serving": {"rate_limiter": [{"name": "R"}], "queue": {"max_size": 9}}}, (0, 0), (9, 0)),
        ({"serving": {"rate_limiter": [{"name": "R"}]}, "executor": "bls"}, (512, 30_000), (0, 0)),
        ({"triton": "24.05"}, (0, 0), (0, 0)),
        ({"triton": "24.05", "serving": {"queue": {"max_size": 9}}}, (0, 0), (9, 0)),
    ],
)
def test_encoder_front_keeps_the_queue_if_it_can(
    options: dict[str, Any], front: tuple[int, int], batcher: tuple[int, int]
) -> None:
    """A queue limit in the batcher causes pauses, as priorities do anyway.

    Fronts of old releases cannot keep a queue, nor those whose resources Triton's rate limiter takes back when
    execute() returns.
    """
    spec = make_spec(model="org/encoder", machine={"cores": 4}, **options)
    made = graph("onnxruntime")
    serving = serving_document(spec, "feature_extraction", made, 256, {"input_ids": 0}, {})
    fields = [Field("text_input", "TYPE_STRING")], [Field("embedding", "TYPE_FP32", (384,))]
    entry, *_ = lay_out(spec, serving, "{}", made, {}, fields, [])
    said = json.loads(entry.files["1/serving.json"])  # type: ignore[arg-type]  # bytes
    policy = parse(render(entry.config), entry.name).dynamic_batching.default_queue_policy
    assert (said["queue"], said["queue_timeout_ms"]) == front
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == batcher


def test_plan_has_one_group_its_platform_and_cuda_graphs() -> None:
    config = _engine("tensorrt")
    assert (config.platform, config.default_model_filename) == ("tensorrt_plan", "model.plan")
    assert [list(group.profile) for group in config.instance_group] == [["0", "1"]]
    assert {group.kind for group in config.instance_group} == {config.instance_group[0].KIND_GPU}
    cuda = config.optimization.cuda
    assert cuda.graphs
    captured = [[spec.batch_size, int(spec.input["input_ids"].dim[0])] for spec in cuda.graph_spec]
    assert len(captured) == len(set(map(tuple, captured))) > 10
    assert all(shape in captured for shape in ([1, 16], [32, 64], [8, 256]))


def test_onnxruntime_tensorrt_is_warmed_in_its_one_profile() -> None:
    config = _engine("tensorrt-onnxruntime")
    accelerator, cuda = config.optimization.execution_accelerators.gpu_execution_accelerator
    parameters = dict(accelerator.parameters)
    assert (accelerator.name, cuda.name, dict(cuda.parameters)) == ("tensorrt", "cuda", {"use_tf32": "0"})
    assert parameters["trt_profile_opt_shapes"] == "input_ids:16x128,attention_mask:16x128"
    assert parameters["trt_profile_max_shapes"] == "input_ids:32x256,attention_mask:32x256"
    assert parameters["trt_engine_cache_path"] == parameters["trt_timing_cache_path"]
    assert parameters["trt_engine_cache_path"].startswith("/engines/encoder_model-")
    warmed = {(w.batch_size, w.inputs["input_ids"].dims[0]) for w in config.model_warmup}
    assert (16, 128) in warmed


def test_gpu_target_puts_only_the_engine_on_the_gpu() -> None:
    assert list(_engine("cuda").instance_group[0].gpus) == [0, 1]
    for target in TARGETS:
        front = _parsed(target, "encoder")
        assert [group.kind for group in front.instance_group] == [front.instance_group[0].KIND_CPU]


def _engine(target: str) -> Any:
    return _parsed(target, "encoder_model")


def _parsed(target: str, name: str) -> Any:
    text = re.split(rf"^== {name}: .*$", repository(target), flags=re.MULTILINE)[1]
    return parse(text.split("\n== ")[0], name)
