from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import RepositoryError
from builder.engines.placement import InstanceGroup
from builder.options import QueuePolicy, RateLimiterResource, Serving
from builder.repository.config import render as render_module
from builder.repository.config.entries import Config, WarmUp
from builder.repository.config.render import parse, render
from builder.runtime.fields import Field


def _config(**changes: Any) -> Config:
    base = Config(
        name="front",
        backend="python",
        max_batch_size=16,
        inputs=[Field("text_input", "TYPE_STRING"), Field("labels", "TYPE_STRING", (-1,), optional=True)],
        outputs=[Field("embedding", "TYPE_FP32", (384,))],
        groups=[InstanceGroup(2)],
        serving=Serving(),
        dynamic_batching=True,
    )
    return dataclasses.replace(base, **changes)


def test_rendered_configuration_parses_to_its_values() -> None:
    parsed = parse(render(_config(max_queue_delay_us=500)), "front")
    assert (parsed.name, parsed.backend, parsed.max_batch_size) == ("front", "python", 16)
    assert [(i.name, list(i.dims), i.optional, i.allow_ragged_batch) for i in parsed.input] == [
        ("text_input", [1], False, False),
        ("labels", [-1], True, True),
    ]
    assert parsed.dynamic_batching.max_queue_delay_microseconds == 500
    assert [(g.count, g.kind) for g in parsed.instance_group] == [(2, 2)]
    assert list(parsed.version_policy.specific.versions) == [1]


def test_decoupled_model_has_a_queue_without_limits_or_batches() -> None:
    parsed = parse(render(_config(max_batch_size=0, decoupled=True, max_queue_delay_us=500, queue_size=9)), "front")
    assert parsed.HasField("dynamic_batching")
    assert parsed.dynamic_batching.ListFields() == []
    assert not any(entry.allow_ragged_batch for entry in parsed.input)


def test_render_writes_every_field_that_a_user_can_set() -> None:
    serving = Serving(
        preferred_batch_sizes=(4, 8),
        queue=QueuePolicy(allow_timeout_override=True, timeout_action="DELAY"),
        priority_levels=2,
        default_priority=1,
        rate_limiter=(RateLimiterResource(name="memory", count=2, is_global=True),),
        rate_limiter_priority=3,
    )
    warm_up = WarmUp("text_0", 1, {"input_ids": {"length": 7, "file": "text_0_input_ids"}})
    parsed = parse(
        render(
            _config(
                serving=serving,
                queue_size=64,
                queue_timeout_us=9000,
                rate_limited=True,
                response_cache=True,
                graph_level=1,
                parameters={"owner": 'a "quoted" \\ name\n', "intra_op_thread_count": "2"},
                warm_ups=[warm_up],
                version=3,
            )
        ),
        "front",
    )
    batching = parsed.dynamic_batching
    assert list(batching.preferred_batch_size) == [4, 8]
    assert (batching.priority_levels, batching.default_priority_level) == (2, 1)
    policy = batching.default_queue_policy
    assert (policy.default_timeout_microseconds, policy.max_queue_size) == (9000, 64)
    assert (policy.allow_timeout_override, policy.timeout_action) == (True, 1)
    assert list(parsed.version_policy.specific.versions) == [3]
    limiter = parsed.instance_group[0].rate_limiter
    assert [(r.name, r.count) for r in limiter.resources] == [("memory", 2)]
    assert limiter.priority == 3
    assert parsed.response_cache.enable
    assert parsed.optimization.graph.level == 1
    assert parsed.parameters["owner"].string_value == 'a "quoted" \\ name\n'
    (warm,) = parsed.model_warmup
    assert (warm.name, warm.inputs["input_ids"].input_data_file) == ("text_0", "3/text_0_input_ids")


def test_warm_up_without_batching_has_a_batch_size_of_one() -> None:
    warm_up = WarmUp("text_0", 1, {"input_ids": {"length": 7, "file": ""}})
    (warm,) = parse(render(_config(max_batch_size=0, warm_ups=[warm_up])), "front").model_warmup
    assert (warm.batch_size, list(warm.inputs["input_ids"].dims)) == (1, [1, 7])


def test_render_refuses_a_missing_template_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.pbtxt.j2").write_text('name: "{{ nobody_gave_this }}"')
    monkeypatch.setattr(render_module, "templates", lambda: tmp_path)
    with pytest.raises(RepositoryError, match="nobody_gave_this"):
        render(_config())


def test_render_refuses_a_template_that_omits_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.pbtxt.j2").write_text('name: "{{ name }}"')
    monkeypatch.setattr(render_module, "templates", lambda: tmp_path)
    with pytest.raises(RepositoryError, match="does not read back"):
        render(_config())


def test_render_refuses_a_field_that_triton_does_not_know() -> None:
    with pytest.raises(RepositoryError, match="not a Triton model configuration"):
        parse('name: "x" no_such_field: 1', "x")
