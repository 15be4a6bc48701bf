"""A decoder on the engine that generates most tokens a second on the samples: `--engine auto`.

All engines share the export and PyTorch's answers; then each has its own stages (one_engine.py). An engine is left out,
and the report says why, if it cannot serve this model, or not with these options, or if no precision keeps the quality.
If an engine's answers differ from PyTorch's, the build stops. What the other engines chose is then run as it will be
served: the emitted loop, one sequence at a time and several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from builder.building.families import Result
from builder.building.families.decoder.one_engine import Decoder
from builder.building.families.decoder.outputs import FusedDecoder, PyTorchDecoder, SelectedDecoder, VerifiedDecoder
from builder.building.families.generating import vocabulary_of
from builder.building.variants.traffic import Rates, fastest, in_words, measure, remark_on_noise
from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.building.verify.runtimes import Replay
from builder.common.engines import ENGINES
from builder.common.errors import BuilderError, ExportError, SpecError, VerificationError
from builder.common.progress import Stage
from builder.engines.decoding import opened
from builder.graphs.export.decoder import DecoderExport

ANSWER = 16  # tokens
MAX_CLIENTS, REQUESTS = 8, 16
UNABLE = (SpecError, ExportError)  # raised by an engine that cannot serve a model

Before = TypeVar("Before")
After = TypeVar("After")


@dataclass(frozen=True)
class PerEngine(Generic[After]):
    """Result of a stage for each engine, by its name in options; `refused`: the engines left out, and why."""

    by_engine: Mapping[str, After]
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SelectedEngine:
    """Choice of `engine`, with the variants of all engines; `reason`: the measurements, in words."""

    engine: str
    decoder: SelectedDecoder
    reason: str

    @property
    def is_cacheable(self) -> bool:
        return self.decoder.is_cacheable


@dataclass(frozen=True)
class FastestEngine:
    """Stages of `decoders`, one for each engine; `refused`: the engines that refused the options, and why."""

    decoders: Mapping[str, Decoder]
    refused: Mapping[str, str]

    def export(self) -> DecoderExport:
        return self._first.export()

    def reference(self, exported: DecoderExport) -> PyTorchDecoder:
        return self._first.reference(exported)

    def fuse(self, exported: DecoderExport) -> PerEngine[FusedDecoder]:
        each = PerEngine(dict.fromkeys(self.decoders, exported), self.refused)
        return run_each(each, lambda engine, one: self.decoders[engine].fuse(one), UNABLE)

    def verify(self, fused: PerEngine[FusedDecoder], reference: PyTorchDecoder) -> PerEngine[VerifiedDecoder]:
        return run_each(fused, lambda engine, one: self.decoders[engine].verify(one, reference), UNABLE)

    def select(self, exact: PerEngine[VerifiedDecoder], stage: Stage) -> SelectedEngine:
        """Choose the precision that each engine would serve, then the engine that generates most tokens a second."""
        chosen = run_each(exact, lambda engine, one: self._select(engine, one, stage), (*UNABLE, VerificationError))
        rates: dict[str, Rates] = {}
        if len(chosen.by_engine) > 1:
            with stage("measure as served"):
                loops = {engine: self._loop(engine, one) for engine, one in chosen.by_engine.items()}
                rates = measure(loops, self._first.rows, self.clients, REQUESTS)
        engine = fastest(rates) if rates else next(iter(chosen.by_engine))
        others = [measured for one in chosen.by_engine.values() for measured in one.variants[1:]]
        fastest_decoder = chosen.by_engine[engine]
        decoder = replace(fastest_decoder, variants=(fastest_decoder.variants[0], *others))
        return SelectedEngine(engine, decoder, _choice(engine, rates, chosen))

    def replay(self, choice: SelectedEngine) -> Replay:
        return self.decoders[choice.engine].replay(choice.decoder)

    def result(self, choice: SelectedEngine, stage: Stage) -> Result:
        result = self.decoders[choice.engine].result(choice.decoder, stage)
        words = "; ".join(filter(None, [choice.reason, result.report.choice]))
        return replace(result, report=replace(result.report, choice=words))

    @property
    def clients(self) -> tuple[int, ...]:
        """Numbers of clients to measure with: one, and as many as there are slots, up to MAX_CLIENTS."""
        return tuple(sorted({1, min(self._first.spec.slots, MAX_CLIENTS)}))

    @property
    def _first(self) -> Decoder:
        return next(iter(self.decoders.values()))

    def _select(self, engine: str, exact: VerifiedDecoder, stage: Stage) -> SelectedDecoder:
        """Return the choice of `engine`, with the engine's name in its variants."""
        chosen = self.decoders[engine].select(exact, stage)
        named = {
            id(measured): replace(measured, name=f"{measured.name} {ENGINES[engine].title}")
            for measured in (*chosen.variants[1:], chosen.exact.measured, chosen.measured)
        }
        return replace(
            chosen,
            exact=replace(chosen.exact, measured=named[id(chosen.exact.measured)]),
            variants=(chosen.variants[0], *(named[id(measured)] for measured in chosen.variants[1:])),
            measured=named[id(chosen.measured)],
        )

    def _loop(self, engine: str, chosen: SelectedDecoder) -> Callable[[Sequence[Sequence[int]]], object]:
        """Return the emitted loop over the choice of `engine`: a function that answers several rows, greedily."""
        decoder = self.decoders[engine]
        length, spec = max(map(len, decoder.rows)) + ANSWER, decoder.spec
        geometry = geometry_of(
            chosen.exact.fused.exported.caches,
            max(self.clients),
            length,
            vocabulary_of(decoder.checkpoint.model),
            decoder.engine.cache_type,
        )
        executor = opened(chosen.own, spec.build_threads)(geometry)
        return lambda rows: generate(executor, rows, ANSWER, spec.prefill_tokens)


def run_each(
    before: PerEngine[Before],
    step: Callable[[str, Before], After],
    unable: tuple[type[BuilderError], ...],
) -> PerEngine[After]:
    """Run `step` for each engine and leave out those that raise an error of the types `unable`.

    If none is left, raises an error with all reasons: of their type if all failed with the same type, else BuilderError
    itself.
    """
    results: dict[str, After] = {}
    refused = dict(before.refused)
    kinds: list[type[BuilderError]] = []
    for engine, one in before.by_engine.items():
        try:
            results[engine] = step(engine, one)
        except unable as error:
            refused[engine] = str(error)
            kinds.append(type(error))
            if len(kinds) == len(before.by_engine):
                kind = kinds[0] if len({*kinds}) == 1 and not before.refused else BuilderError
                reasons = _reasons(refused)
                raise kind(f"no engine can serve this model with these options: {reasons}") from error
    return PerEngine(results, refused)


def _choice(fastest: str, rates: Mapping[str, Rates], chosen: PerEngine[SelectedDecoder]) -> str:
    words = f"chose {ENGINES[fastest].title}"
    if rates:
        named = {chosen.by_engine[engine].measured.name: rate for engine, rate in rates.items()}
        words += f": answers of {ANSWER} tokens a second as served, {in_words(named)}{remark_on_noise(rates, 'engine')}"
    return words + (f"; not possible: {_reasons(chosen.refused)}" if chosen.refused else "")


def _reasons(refused: Mapping[str, str]) -> str:
    return ", ".join(f"{ENGINES[engine].title} ({reason})" for engine, reason in refused.items())
