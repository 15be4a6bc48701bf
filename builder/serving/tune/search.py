"""Search the space with Optuna's tree-structured Parzen estimator, then measure winner and defaults in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from builder.common.distribution import installing
from builder.common.errors import ServeError, SpecError
from builder.serving.load.noise import Estimate, compare_pairs
from builder.serving.load.record import LoadMeasurement
from builder.serving.load.traffic import Level
from builder.serving.tune.space import Space, settings_of
from builder.serving.tune.trials import TrialOutcome, throughput

SEED = 0

Attempt = Callable[[Mapping[str, int] | None], TrialOutcome]
Remeasure = Callable[[Mapping[str, int] | None, Level], LoadMeasurement]
Say = Callable[[str], None]


@dataclass(frozen=True)
class TriedSettings:
    """One point of the space and its outcome; None if the server refused it."""

    settings: Mapping[str, int]
    outcome: TrialOutcome | None


@dataclass(frozen=True)
class Finding:
    """Result of the search. `settings`: the winner's; None if nothing beat the defaults."""

    settings: Mapping[str, int] | None
    reason: str
    tried: tuple[TriedSettings, ...]


def optuna() -> Any:
    """Import the library. Raises SpecError if the extra is not installed."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise SpecError(f"tune needs the extra tune: {installing('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def search(
    space: Space,
    defaults: Mapping[str, object],
    trials: int,
    limit_ms: float,
    attempt: Attempt,
    again: Remeasure,
    repeats: int,
    say: Say,
) -> Finding:
    """Try `trials` points of `space`, then measure the best one and the unchanged model in turn, `repeats` times.

    `defaults`: the point of the unchanged model. Raises ServeError if the unchanged model cannot be measured.
    """
    base = attempt(None)
    say(f"as it is: {format_settings(base)}")
    library = optuna()
    choices = {name: library.distributions.CategoricalDistribution(list(values)) for name, values in space.items()}
    study = library.create_study(direction="maximize", sampler=library.samplers.TPESampler(seed=SEED))
    study.add_trial(library.trial.create_trial(params=dict(defaults), distributions=choices, value=base.score))
    tried: list[TriedSettings] = []
    for number in range(trials):
        trial = study.ask(choices)
        settings = settings_of(trial.params)
        known = next((one for one in tried if one.settings == settings), None)
        outcome: TrialOutcome | None = None
        if known is not None:
            outcome = known.outcome
        elif trial.params == dict(defaults):
            outcome = base
        else:
            try:
                outcome = attempt(settings)
            except ServeError as error:
                say(f"{settings}: {error}")
        study.tell(trial, outcome.score if outcome is not None else -1e9)
        tried.append(TriedSettings(settings, outcome))
        if outcome is not None:
            say(f"trial {number + 1} of {trials}: {format_settings(outcome)} with {settings}")
    measured = [(one.outcome, one.settings) for one in tried if one.outcome is not None]
    best, winner = max(measured, key=lambda pair: pair[0].score, default=(base, {}))
    if best.score <= base.score:
        reason = f"none of {trials} trials did better than what it has: {format_settings(base)}"
        return Finding(None, reason, tuple(tried))
    new, old = [], []
    for turn in range(repeats):  # each at its own best level, so that both see the same conditions
        old.append(again(None, base.level))
        new.append(again(winner, best.level))
        say(f"turn {turn + 1} of {repeats}: {throughput(old[-1]):.1f}/s as it is, {throughput(new[-1]):.1f}/s tuned")
    return verdict(winner, new, old, best, base, limit_ms, tuple(tried))


def verdict(
    settings: Mapping[str, int],
    new: Sequence[LoadMeasurement],
    old: Sequence[LoadMeasurement],
    best: TrialOutcome,
    base: TrialOutcome,
    limit_ms: float,
    tried: tuple[TriedSettings, ...],
) -> Finding:
    """Decide whether the winner is still within the limit, and ahead of the unchanged model by more than noise."""
    change = compare_pairs([throughput(load) for load in old], [throughput(load) for load in new])
    after, before = (Estimate.of([throughput(load) for load in loads]) for loads in (new, old))
    p99, had = (mean(load.client.bounded_ms for load in loads) for loads in (new, old))
    unit = "answers/s" if new[0].client.stream is None else "tokens/s"
    text = (
        f"{after} {unit} with p99 {p99:.0f} ms at {best.level}; as it was {before} with p99 {had:.0f} ms at "
        f"{base.level}; change {change}, {len(new)} times by turns"
    )
    if p99 > limit_ms:
        return Finding(None, f"the best of {len(tried)} trials was beyond {limit_ms:g} ms when repeated: {text}", tried)
    if base.score < 0:
        return Finding(settings, f"within {limit_ms:g} ms, which it was not before: {text}", tried)
    if change is None or not change.sure or change.share <= 0:
        return Finding(None, f"the best of {len(tried)} trials is not more than noise ahead: {text}", tried)
    return Finding(settings, f"within {limit_ms:g} ms: {text}", tried)


def format_settings(outcome: TrialOutcome) -> str:
    """Format the outcome in a few words."""
    limit = "" if outcome.score >= 0 else ", beyond the limit"
    return f"{outcome.throughput:.1f}/s, p99 {outcome.p99_ms:.0f} ms at {outcome.level}{limit}"
