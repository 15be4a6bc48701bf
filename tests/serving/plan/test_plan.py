"""Plans: the arithmetic on invented speeds, and the shortages with their remedies."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from rich.console import Console

from builder.commands.plan import lines_table
from builder.common.errors import SpecError
from builder.common.memory import bias_bytes, cache_bytes
from builder.common.releases import NEWEST
from builder.options import BuildSpec, make_spec
from builder.runtime.contract import LayerShape
from builder.serving.plan import machine
from builder.serving.plan.encoder import plan_encoder
from builder.serving.plan.generating import plan_generating
from builder.serving.plan.lines import PROCESS, ModelPlan, power_of_two
from builder.serving.plan.needs import ModelNeeds
from builder.serving.plan.speeds import decoding_cost, encoder_cost

GRID = {f"{rows}x{tokens}": 2.0 + 0.01 * rows * tokens for rows in (1, 8) for tokens in (16, 64, 128)}
ENCODER = ModelNeeds("encoder", 100_000_000, 256, latency=GRID, measured="int8", answer_bytes=1536)
LAYERS = (LayerShape(4, 64),) * 6
STEPS = {"token, 1 rows": 6.0, "token, 8 rows": 13.0, "prompt of 128": 64.0}
DECODER = ModelNeeds("generation", 500_000_000, 1024, LAYERS, latency=STEPS, measured="int8")


def _spec(load: dict[str, Any], **options: Any) -> BuildSpec:
    options = {"machine": {"cores": 4, "memory_gb": 4}, **options}
    return make_spec(model="org/it", load={"requests_per_s": 50, **load}, **options)


def _lines(plan: ModelPlan) -> dict[str, str]:
    return {line.quantity: line.result for line in plan.lines}


def _encoder(load: dict[str, Any], needs: ModelNeeds = ENCODER, **options: Any) -> ModelPlan:
    spec = _spec(load, **options)
    assert spec.load is not None
    return plan_encoder(spec.capacity, spec.load, needs)


def _decoder(load: dict[str, Any], needs: ModelNeeds = DECODER, **options: Any) -> ModelPlan:
    spec = _spec(load, **options)
    assert spec.load is not None
    return plan_generating(spec.capacity, spec.load, needs)


def test_costs_are_fitted_to_measured_latencies() -> None:
    cost = encoder_cost(GRID)
    assert cost is not None
    assert (cost.call, cost.part) == pytest.approx((2.0, 0.01))
    decoding = decoding_cost(STEPS)
    assert decoding is not None
    assert (decoding.step.call, decoding.step.part) == pytest.approx((5.0, 1.0))
    assert decoding.prompt_ms == 0.5
    assert encoder_cost({}) is None
    assert decoding_cost({"token, 1 rows": 6.0}) is None
    through_zero = encoder_cost({"1x10": 1.0, "1x100": 11.0})
    assert through_zero is not None
    assert through_zero.call == 0, "a call costs nothing rather than less"


def test_plan_batches_texts_that_arrive_during_a_call() -> None:
    """500 texts/s of 64 tokens: each keeps it busy for 0.64 ms, so 0.32 of the time; 500 * 2 / (1000 - 320) = 1.47."""
    plan = _encoder({"requests_per_s": 500, "tokens": 64, "p99_ms": 40})
    lines = _lines(plan)
    assert lines["most texts/s"] == "1,562"
    assert lines["busy with texts"] == "32% of each instance"
    assert lines["texts that arrive during a batch"] == "1.47 on average, 5 at most 99 times of 100"
    assert float(lines["p50"].split()[0]) == pytest.approx(8.1, abs=0.8), "texts share calls, padded to the longest"
    assert float(lines["p99"].split()[0]) == pytest.approx(26, abs=3), "the longest text takes 4.6 ms by itself"
    assert plan.settings == {
        "instances": 1,
        "threads": 4,
        "max_queue_delay_us": 0,
        "max_batch_size": 16,
        "serving.token_budget": 1792,
        "serving.call_cost": 200,
    }
    assert plan.lacking == ()
    assert plan.memory == PROCESS + 100_000_000
    assert plan.shm == (1 << 20) + 16 * ((1 << 20) + 1536), "the batch, each request as large as is allowed"
    assert plan.cores == pytest.approx(0.32 * 4), "of its texts: batches grow until the calls fit beside them"


def test_memory_includes_the_largest_call_of_each_instance() -> None:
    """Its tokens are those of the token budget that the plan chooses, or of a text that is longer."""
    needs, slack = replace(ENCODER, call_token=50_000), {"requests_per_s": 5, "tokens": 64, "p99_ms": 40}
    plan = _encoder(slack, needs, instances=2)
    assert plan.settings["serving.token_budget"] == 1792
    assert plan.memory == 2 * (PROCESS + 100_000_000 + 1792 * 50_000)
    longer = _encoder(slack, replace(needs, length=4096), instances=2)
    assert longer.memory == 2 * (PROCESS + 100_000_000 + 4096 * 50_000)


def test_plan_counts_batches_in_texts() -> None:
    """A request has 8 texts, and at most 27 arrive 99 times of 100: a batch of 8 texts would be a single request."""
    plan = _encoder({"requests_per_s": 50, "texts": 8, "tokens": 64})
    assert _lines(plan)["texts that arrive during a batch"] == "8 on average, 27 at most 99 times of 100"
    assert plan.settings["max_batch_size"] == 64
    assert plan.shm == (1 << 20) + 64 * ((1 << 20) + 1536), "of 64 clients with a text each"


def test_plan_p99_grows_with_utilisation() -> None:
    """Regression: p99 was the same at 5%, 32% and 64% utilisation."""
    p99 = [float(_lines(_encoder({"requests_per_s": rate}))["p99"].split()[0]) for rate in (75, 500, 1000)]
    assert p99[0] < 0.7 * p99[1] < 0.7 * 0.7 * p99[2]


def test_plan_enlarges_batches_until_requests_do_not_pile_up() -> None:
    """Small batches rarely contain texts of equal length, so that much of them is padding."""
    plan = _encoder({"requests_per_s": 1000, "tokens": 64})
    assert plan.settings["max_batch_size"] == 64
    assert "2 times that" in next(line.formula for line in plan.lines if line.quantity == "max_batch_size")
    assert plan.lacking == ()
    (text,) = _encoder({"requests_per_s": 1240, "tokens": 64, "p99_ms": 9}).lacking
    assert text.startswith("requests pile up")


def test_plan_detects_a_slowly_growing_backlog() -> None:
    """At 101% load, waits grow from 0.4 s to 0.6 s during the simulation."""
    (text,) = _encoder({"requests_per_s": 1245, "tokens": 64}).lacking
    assert "texts take 101% of the time in which they come, in batches of at most 256" in text


def test_token_budget_covers_the_longest_text_and_meets_p99() -> None:
    assert _encoder({"p99_ms": 5}).settings["serving.token_budget"] == 256
    assert _encoder({"p99_ms": 5, "longest": 40}).settings["serving.token_budget"] == 40
    assert _encoder({}).settings["serving.token_budget"] == 2048
    assert _encoder({"p99_ms": 500}).settings["serving.token_budget"] == 2048


def test_plan_reports_an_overloaded_encoder() -> None:
    plan = _encoder({"requests_per_s": 2000, "tokens": 64}, replace(ENCODER, faster="int8-static OpenVINO"))
    (text,) = plan.lacking
    assert "it holds 1,250 requests/s" in text, "0.8 of 1,562"
    assert "about 7 cores" in text, "4 x 1.28 / 0.8"
    assert "int8-static OpenVINO, which was the fastest" in text


def test_plan_reports_a_missed_p99_with_remedies() -> None:
    (text,) = _encoder({"requests_per_s": 500, "tokens": 64, "p99_ms": 6}).lacking
    assert re.match(r"99 of 100 within \d\d ms, not 6 ms\. What helps: fewer requests a second, more cores", text)
    (text,) = _encoder({"requests_per_s": 1, "tokens": 200, "p99_ms": 4}).lacking
    assert "What helps: shorter texts" in text


def test_plan_sizes_the_response_cache_for_distinct_texts() -> None:
    plan = _encoder({"distinct_texts": 10_000})
    assert plan.response_cache == power_of_two(10_000 * 1536 * 2)
    assert plan.settings["serving.response_cache"] is True


def test_plan_refuses_a_response_cache_beside_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "needs_of", lambda spec: ENCODER)
    with pytest.raises(SpecError, match="it: distinct_texts sizes a response cache, which --adapters cannot"):
        machine.plan([make_spec(model="org/it", adapters=1, load={"requests_per_s": 1, "distinct_texts": 9})])


def test_plan_without_latencies_has_no_speed() -> None:
    plan = _encoder({"p99_ms": 1}, ModelNeeds("encoder", 100_000_000, 256, measured="not measured: build it"))
    assert plan.cores is None
    assert plan.lacking == ()
    assert "p99" not in _lines(plan)
    assert "not measured: build it" in plan.notes


def test_plan_accepts_a_build_without_a_cost_per_token() -> None:
    """On a busy machine, the fitted cost per token of a tiny model can be 0, and any number of texts fits."""
    latency = {f"{rows}x{tokens}": 5.0 if tokens == 16 else 4.0 for rows in (1, 8) for tokens in (16, 64, 128)}
    plan = _encoder({"p99_ms": 60}, replace(ENCODER, latency=latency))
    lines = _lines(plan)
    assert "most texts/s" not in lines
    assert lines["busy with texts"] == "0% of each instance"
    assert plan.settings["serving.call_cost"] == 16, "as the specification has it"
    assert plan.lacking == ()


def test_plan_sizes_slots_for_concurrent_answers_with_a_margin() -> None:
    """5/s x 128 tokens = 640 tokens/s, 20 tokens x 0.5 ms = 50 ms/s of prompts: 640 * 5 / (850 - 50 - 640) = 20."""
    plan = _decoder({"requests_per_s": 5, "tokens": 20, "answer_tokens": 128, "longest": 100})
    lines = _lines(plan)
    assert lines["answers at once"] == "20 on average"
    assert plan.settings["slots"] == 31, "20 + 2.33 x sqrt(20), rounded up"
    assert plan.settings["max_length"] == 228
    assert lines["between tokens"] == "26.3 ms", "a step of 5 + 20 ms in 0.95 of the time"
    assert lines["first token"] == "35 ms"
    of_slot = cache_bytes(LAYERS, 1, 228)
    assert plan.memory == PROCESS + 500_000_000 + 31 * of_slot, "as the build reserves it"
    assert plan.settings["serving.queue.max_size"] == 150, "30 s of waiting"
    assert plan.lacking == ()


def test_plan_counts_decode_steps_of_single_answers() -> None:
    """1/s x 8 tokens of 6 ms each, and 8 tokens of a prompt x 0.5 ms: 52 ms of each second, of 4 cores."""
    assert _decoder({"requests_per_s": 1, "tokens": 8, "answer_tokens": 8}).cores == pytest.approx(4 * 0.052)


def test_plan_limits_prefill_by_the_time_between_tokens() -> None:
    load = {"requests_per_s": 5, "tokens": 20, "answer_tokens": 128}
    assert _decoder({**load, "between_tokens_ms": 75}).settings["serving.prefill_tokens"] == 100, "(75 - 25) / 0.5"
    assert _decoder({**load, "between_tokens_ms": 27}).settings["serving.prefill_tokens"] == 32
    assert _decoder(load).settings["serving.prefill_tokens"] == 256
    (text,) = _decoder({**load, "between_tokens_ms": 20}).lacking
    assert text.startswith("between tokens: 26.3 ms, not 20 ms. What helps: fewer requests a second")
    (text,) = _decoder({**load, "first_token_ms": 20}).lacking
    assert text.startswith("first token: 35 ms, not 20 ms. What helps: shorter prompts")


def test_plan_reports_too_many_tokens_and_too_large_a_cache() -> None:
    (text,) = _decoder({"requests_per_s": 50, "tokens": 20}).lacking
    assert "it holds 6.16 requests/s" in text, "850 / (20 x 0.5 + 128 x 1)"
    plan = _decoder({"requests_per_s": 5, "tokens": 20}, machine={"cores": 4, "memory_gb": 0.7})
    assert any("weights and cache exceed the 700 MB" in text for text in plan.lacking)
    assert _lines(plan)["most slots"] == "9", "(700 - 584) MB of 12.6 MB"


def test_plan_sizes_int8_and_paged_caches() -> None:
    load = {"requests_per_s": 5, "tokens": 20, "answer_tokens": 128}
    narrow, full = (_decoder(load, replace(DECODER, cache=cache)) for cache in ("int8", "float32"))
    rest = PROCESS + DECODER.weights
    assert (full.memory - rest) == 4 * (narrow.memory - rest - 5 * 4 * 4 * 64 * 1024)
    shared = _decoder(load, replace(DECODER, paged=True, engine="openvino"))
    assert shared.memory < full.memory, "texts that are shorter than a slot leave blocks to others"
    assert "max_length" not in shared.settings
    assert "cache_gb" in shared.settings


def _machine(monkeypatch: pytest.MonkeyPatch, *specs: BuildSpec) -> machine.MachinePlan:
    needs = {"encoder": ENCODER, "writes": DECODER}
    monkeypatch.setattr(machine, "needs_of", lambda spec: needs[spec.entry_name])
    return machine.plan(specs)[1]


def test_plan_adds_up_the_models_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = _spec({"requests_per_s": 500}, name="encoder")
    writes = _spec({"requests_per_s": 5, "tokens": 20}, name="writes")
    sums = _machine(monkeypatch, encoder, writes, make_spec(model="org/idle"))
    assert any("keep" in text and "cores busy" in text for text in sums.lacking)
    assert sums.memory > 2 * PROCESS + ENCODER.weights + DECODER.weights
    compose = yaml.safe_load(sums.compose("triton"))["services"]["triton"]
    assert compose == {"shm_size": f"{sums.shm}b", "mem_limit": f"{sums.memory + sums.shm}b", "cpus": 4}
    assert sums.shm % (64 << 20) == 0
    small = {"machine": {"cores": 4, "memory_gb": 0.5, "shm_mb": 64}}
    lacking = _machine(monkeypatch, _spec({}, name="encoder", **small), _spec({}, name="writes", **small)).lacking
    assert any("/dev/shm needs" in text and "has 64" in text for text in lacking)
    assert any("and 500 MB may be used" in text for text in lacking)


def test_plan_counts_a_bias_on_positions_in_the_largest_call() -> None:
    """Regression: biases of 64 heads on 1,024 positions, for 256 tokens of a prompt, were left out: 134 MB."""
    load = {"requests_per_s": 1, "tokens": 100, "answer_tokens": 50}
    plain, biased = _decoder(load), _decoder(load, replace(DECODER, bias=bias_bytes(64, 1, 1)))
    assert biased.memory - plain.memory == bias_bytes(64, 256, 1024) == 2 * 64 * 256 * 1024 * 4
    assert "bias on positions" not in _lines(plain)
    assert _lines(biased)["bias on positions"] == "134 MB"
    many = _decoder(load, replace(DECODER, bias=bias_bytes(64, 1, 1), latency=None), slots=300)
    assert _lines(many)["bias on positions"] == "157 MB", "a step of 300 slots"


def test_plan_counts_what_prompts_convert_of_an_int8_cache() -> None:
    """Regression: the fp32 copies of a layer's keys and values were left out: 336 MB in models that read long texts."""
    load = {"requests_per_s": 1, "tokens": 100, "answer_tokens": 50}
    full, narrow = (_decoder(load, replace(DECODER, cache=cache)) for cache in ("float32", "int8"))
    assert "keys and values in fp32" not in _lines(full)
    assert _lines(narrow)["keys and values in fp32"] == "5.24 MB"
    (memory,) = (line for line in narrow.lines if line.quantity == "memory")
    assert "5.24 MB of keys and values in fp32" in memory.formula
    cache, converted = int(str(narrow.settings["slots"])) * cache_bytes(LAYERS, 1, 1024, 1), 5 * 4 * 4 * 64 * 1024
    assert narrow.memory == PROCESS + DECODER.weights + cache + converted
    long = replace(DECODER, cache="int8", length=1 << 17)
    assert _lines(_decoder(load, long))["keys and values in fp32"] == "336 MB", "prompts that need more convert nothing"


def test_plan_shows_formulas_in_80_columns() -> None:
    """Regression: beside the longest results of an encoder no column was left for the formulas."""
    (line,) = (line for line in _encoder({}).lines if line.quantity == "texts that arrive during a batch")
    terminal = Console(width=80, file=io.StringIO())
    terminal.print(lines_table("minilm", [line]))
    assert isinstance(terminal.file, io.StringIO)
    cells = [row.split("│")[1:-1] for row in terminal.file.getvalue().splitlines() if row.startswith("│")]
    shown = [" ".join(cell.strip() for cell in column).strip() for column in zip(*cells, strict=True)]
    assert shown == [line.quantity, line.formula, line.result]


def test_plan_leaves_memory_beside_the_most_slots() -> None:
    """Regression: a bias on positions, and what prompts convert, were not among the rest that slots have to leave."""
    needs = replace(DECODER, cache="int8", bias=bias_bytes(64, 1, 1))
    plan = _decoder({"requests_per_s": 1, "tokens": 100}, needs, machine={"cores": 4, "memory_gb": 0.75})
    assert _lines(plan)["most slots"] == "8", "(750 - 723) MB of 3.15 MB"


def test_plan_says_by_how_much_memory_is_exceeded() -> None:
    """Regression: the memory of the process was left out, which could be negative."""
    plan = _decoder({"requests_per_s": 1, "tokens": 100}, machine={"cores": 4, "memory_gb": 0.55})
    assert "by 84.3 MB" in plan.lacking[0]


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "the front lets at most 512 requests wait, each for at most 30 s (serving.queue)"),
        ({"queue": {"max_size": 9, "timeout_us": 0}}, "the front lets at most 9 requests wait, each for any time"),
        ({"queue": {"max_size": 0, "timeout_us": 0}}, "nothing limits how many requests wait"),
        ({"triton": "24.05"}, "nothing limits how many requests wait"),
        ({"triton": "24.05", "queue": {"max_size": 9}}, "has limits, lets at most 9 requests wait, each for any time"),
        (
            {"priority_levels": 3, "default_priority": 2},
            "Triton's batcher, which pauses where it has limits, lets at most 512 requests of each priority wait",
        ),
        ({"queue": {"timeout_action": "DELAY"}}, "each for at most 30 s, and then behind all others"),
    ],
)
def test_plan_notes_the_queue_limits_of_an_encoder(
    options: dict[str, Any], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "needs_of", lambda spec: ENCODER)
    serving = {name: value for name, value in options.items() if name != "triton"}
    ((plan,), _) = machine.plan([_spec({}, serving=serving, triton=options.get("triton", NEWEST))])
    assert any(note in text for text in plan.notes)
    assert not any("lets" in text and note not in text for text in plan.notes)


def test_plan_requires_a_load_and_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="no model states a load"):
        machine.plan([make_spec(model="org/it")])
    other = _spec({}, name="writes", machine={"cores": 8})
    with pytest.raises(SpecError, match="a plan is for one machine"):
        _machine(monkeypatch, _spec({}, name="encoder"), other)
