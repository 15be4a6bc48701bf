"""Tuning without a server: the search space, the search, the verdict, and the written files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.building.pipeline import build
from builder.cli import main
from builder.commands import tune as command
from builder.common.errors import ServeError, SpecError
from builder.options import load_specs
from builder.repository.config.render import parse
from builder.repository.versions import served_number
from builder.runtime.contract import LayerShape, dump, load_generation
from builder.serving.load.record import LoadMeasurement
from builder.serving.load.traffic import Level
from builder.serving.tune.search import Finding, search, verdict
from builder.serving.tune.space import SHARED, choices, settings_of, space_of
from builder.serving.tune.trials import TrialOutcome, best_outcome
from builder.serving.tune.winner import write_settings
from tests.serving.load.runs import encoder, stream
from tests.servings import decoder_serving

LEVELS = [Level("concurrency", value) for value in (1, 8, 32)]
HAS = {"instances": 1, "threads": 0, "max_batch_size": 64, "max_queue_delay_us": 0}
SPACE: Mapping[str, Sequence[object]] = {SHARED: ["1x1", "1x4", "2x2"], "max_batch_size": [16, 64]}


def _loads(*figures: tuple[float, float]) -> list[LoadMeasurement]:
    """Return load tests of levels in order: (answers/s, p99)."""
    return [encoder(level, [rate], p99_ms=p99)[0] for level, (rate, p99) in zip(LEVELS, figures, strict=False)]


def test_best_outcome_has_the_highest_throughput_within_the_limit() -> None:
    best = best_outcome(_loads((50, 8), (180, 30), (210, 90)), 40)
    assert (best.level, best.throughput, best.score) == (LEVELS[1], 180, 180)
    over = best_outcome(_loads((50, 80), (180, 120)), 40)
    assert (over.level, over.score) == (LEVELS[0], -80)
    streams = best_outcome([*stream(LEVELS[0], [90.0]), *stream(LEVELS[1], [400.0])], 26)
    assert streams.throughput == 400, "tokens, and the limit is about the first"


def test_choices_and_settings_convert_into_each_other() -> None:
    point = choices(HAS, 4, SPACE)
    assert point == {SHARED: "1x4", "max_batch_size": 64}
    assert settings_of(point) == {"instances": 1, "threads": 4, "max_batch_size": 64}


def test_space_excludes_slots_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "config.pbtxt").write_text('name: "writes"\n')
    arena = replace(decoder_serving().arena, slots=3)
    (tmp_path / "1" / "serving.json").write_text(dump(decoder_serving(executor="in-process", arena=arena)))
    slot = 64 * 2 * 2 * 8 * 4
    space = space_of(tmp_path / "1", 4, 16.5 * slot)
    assert space["slots"] == [3, 4, 8, 16]
    assert space["threads"] == [1, 2, 4]
    assert 16 in space["serving.prefill_tokens"], "what it has"


def test_space_counts_the_states_of_slots(tmp_path: Path) -> None:
    """Regression: tune tried slots whose states did not fit into memory beside the cache."""
    (tmp_path / "1").mkdir()
    (tmp_path / "config.pbtxt").write_text('name: "writes"\n')
    arena = replace(decoder_serving().arena, slots=3, layers=(LayerShape(2, 8), LayerShape(0, 0, ((16, 64),))))
    (tmp_path / "1" / "serving.json").write_text(dump(decoder_serving(executor="in-process", arena=arena)))
    cache, states = 64 * 2 * 2 * 8 * 4, 16 * 64 * 4
    assert space_of(tmp_path / "1", 4, 16 * cache)["slots"] == [3, 4, 8]
    assert space_of(tmp_path / "1", 4, 16 * (cache + states))["slots"] == [3, 4, 8, 16]


def _search(
    rates: Mapping[str, float], trials: int = 12, refused: str = "", noise: float = 0.5
) -> tuple[Finding, list[object]]:
    """Search a model whose throughput depends only on instances x threads, and that fails to load with `refused`."""
    attempts: list[object] = []

    def share(settings: Mapping[str, int] | None) -> str:
        return "1x4" if settings is None else f"{settings['instances']}x{settings['threads']}"

    def attempt(settings: Mapping[str, int] | None) -> TrialOutcome:
        attempts.append(settings)
        if share(settings) == refused:
            raise ServeError("it does not load")
        rate = rates[share(settings)]
        return TrialOutcome(LEVELS[1], rate, 30.0, rate)

    def again(settings: Mapping[str, int] | None, level: Level) -> LoadMeasurement:
        turn[0] += 1
        return encoder(level, [rates[share(settings)] + noise * (turn[0] % 3)])[0]

    turn = [0]
    result = search(SPACE, choices(HAS, 4, SPACE), trials, 40, attempt, again, 4, lambda text: None)
    return result, attempts


def test_search_finds_a_better_point_and_measures_none_twice() -> None:
    pytest.importorskip("optuna", reason="of the extra tune")
    result, attempts = _search({"1x1": 50, "1x4": 100, "2x2": 130})
    assert result.settings is not None
    assert (result.settings["instances"], result.settings["threads"]) == (2, 2)
    assert "answers/s" in result.reason
    assert "change +30" in result.reason
    assert len(attempts) == len({str(one) for one in attempts}), "six points, one of them as it is"


def test_search_keeps_defaults_that_nothing_beats() -> None:
    pytest.importorskip("optuna", reason="of the extra tune")
    result, _ = _search({"1x1": 50, "1x4": 100, "2x2": 90})
    assert result.settings is None
    assert result.reason.startswith("none of 12 trials did better")
    result, _ = _search({"1x1": 50, "1x4": 100, "2x2": 100.5}, noise=20)
    assert result.settings is None
    assert "not more than noise ahead" in result.reason


def test_search_skips_a_setting_that_does_not_load() -> None:
    pytest.importorskip("optuna", reason="of the extra tune")
    result, _ = _search({"1x1": 120, "1x4": 100, "2x2": 130}, refused="2x2")
    assert result.settings is not None
    assert result.settings["threads"] == 1
    assert any(one.outcome is None for one in result.tried)


def test_tune_rejects_a_winner_that_misses_the_limit_on_repetition() -> None:
    best, base = TrialOutcome(LEVELS[1], 130, 39, 130), TrialOutcome(LEVELS[1], 100, 30, 100)
    new = [encoder(LEVELS[1], [rate], p99_ms=45)[0] for rate in (130, 131, 132)]
    old = [encoder(LEVELS[1], [rate])[0] for rate in (100, 101, 102)]
    assert verdict({"instances": 2}, new, old, best, base, 40, ()).settings is None
    assert verdict({"instances": 2}, new, old, best, base, 50, ()).settings == {"instances": 2}
    slower = [encoder(LEVELS[1], [rate])[0] for rate in (80, 81, 82)]
    beyond = replace(base, score=-60.0)
    finding = verdict({"instances": 2}, slower, old, best, beyond, 40, ())
    assert finding.settings == {"instances": 2}, "within the limit, which the defaults were not"
    assert "which it was not before" in finding.reason


def test_tune_finds_a_winner_on_a_machine_that_slows_down() -> None:
    best, base = TrialOutcome(LEVELS[1], 130, 30, 130), TrialOutcome(LEVELS[1], 100, 30, 100)
    rates = (110, 197, 119, 60)
    old = [encoder(LEVELS[1], [rate])[0] for rate in rates]
    new = [encoder(LEVELS[1], [rate * ahead])[0] for rate, ahead in zip(rates, (1.3, 1.25, 1.35, 1.3), strict=True)]
    assert verdict({"instances": 2}, new, old, best, base, 40, ()).settings == {"instances": 2}
    shuffled = [*new[2:], *new[:2]]
    assert verdict({"instances": 2}, shuffled, old, best, base, 40, ()).settings is None, "of other turns"


MODELS = """\
# our models
defaults: {output: repository}
models:
  - model: org/minilm # from the Hub
    name: minilm
    max_batch_size: 32
    serving:
      call_cost: 8
  - model: org/other
"""


def test_write_settings_preserves_comments_and_other_settings(tmp_path: Path) -> None:
    pytest.importorskip("ruamel.yaml", reason="of the extra tune")
    path = tmp_path / "models.yaml"
    path.write_text(MODELS)
    settings: dict[str, Any] = {"instances": 2, "max_batch_size": 16, "serving.token_budget": 1024}
    write_settings(path, "minilm", settings, "tuned: 130 answers/s")
    text = path.read_text()
    for line in ("# our models", "model: org/minilm # from the Hub", "call_cost: 8", "# tuned: 130 answers/s"):
        assert line in text
    tuned, other = load_specs(path)
    assert (tuned.instances, tuned.max_batch_size) == (2, 16)
    assert (tuned.serving.token_budget, tuned.serving.call_cost) == (1024, 8)
    assert other.instances == 1
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(SpecError, match="has no model absent; it has minilm, other"):
        write_settings(path, "absent", settings, "")


def test_tuned_decoder_equals_a_build_from_the_tuned_file(
    built: Callable[[str], Path], checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the whole command without the load tests, and a build from its file."""
    pytest.importorskip("optuna", reason="of the extra tune")
    pytest.importorskip("ruamel.yaml", reason="of the extra tune")
    winner = Finding({"threads": 1, "slots": 2, "serving.prefill_tokens": 16}, "twice as many tokens/s", ())
    for name, found in {"serve_copy": nullcontext("url"), "model_samples": [], "search": winner}.items():
        monkeypatch.setattr(command, name, lambda *_, found=found: found)
    mine, path = tmp_path / "model_repository", tmp_path / "models.yaml"
    shutil.copytree(built("writes"), mine, copy_function=os.link)
    path.write_text(
        f"defaults: {{output: {tmp_path / 'again'}}}\n"
        f"models:\n  - {{model: {checkpoint('writes')}, name: writes, slots: 4, max_length: 128}}\n"
    )
    assert main(["tune", "writes", "--p99-ms", "50", "--repository", str(mine), "--models", str(path)]) == 0
    assert served_number(mine / "writes") == 2
    (spec,) = load_specs(path)
    assert (spec.threads, spec.slots, spec.serving.prefill_tokens, spec.max_length) == (1, 2, 16, 128)
    build(spec)
    tuned, again = mine / "writes" / "2", tmp_path / "again" / "writes" / "1"
    assert (tuned / "serving.json").read_bytes() == (again / "serving.json").read_bytes()
    assert _memory_and_rest(tuned / "config.pbtxt") == _memory_and_rest(again / "config.pbtxt")
    assert load_generation(tuned).arena.slots == 2
    assert load_generation(mine / "writes" / "1").arena.slots == 4, "what tune started from"


def _memory_and_rest(config: Path) -> tuple[int, object]:
    """Return the memory in a configuration, and its other fields without the version and the measurements."""
    parsed = parse(config.read_text("utf-8"), "writes")
    memory: int = json.loads(parsed.parameters["report"].string_value)["memory"]
    del parsed.parameters["report"]
    parsed.ClearField("version_policy")
    return memory, parsed


def test_write_settings_refuses_invalid_settings(tmp_path: Path) -> None:
    pytest.importorskip("ruamel.yaml", reason="of the extra tune")
    path = tmp_path / "models.yaml"
    path.write_text(MODELS)
    with pytest.raises(SpecError, match="instances"):
        write_settings(path, "minilm", {"instances": 0}, "")
    assert path.read_text() == MODELS
