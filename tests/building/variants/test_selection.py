"""Selection finds the fastest variant of sufficient quality, and verifies as few as possible."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path

import pytest

from builder.building.variants import timing
from builder.building.variants.candidates import VariantMaker, requested_variants
from builder.building.variants.encoder import EncoderCandidates, Measurements
from builder.building.variants.evaluator import Evaluator
from builder.building.variants.generating import PrecisionCandidates, Required
from builder.building.variants.selection import Selection, select
from builder.building.variants.traffic import Rates
from builder.building.verify.parity import BatchReference
from builder.building.verify.quality import Quality
from builder.checkpoints.tasks.base import Sample
from builder.common.errors import ExportError, VerificationError
from builder.common.speed import Latencies
from builder.engines import Infer
from builder.engines.encoding import Variant
from builder.engines.optimise import Quantised
from builder.graphs.onnx.graph import Graph
from builder.options import make_spec
from builder.repository.report.record import MeasuredVariant

FAST, MIDDLE, SLOW = (Variant(name, "onnxruntime") for name in ("int8", "int8-static", "fp32"))
SPEEDS = ("fp32", "int8", "int4-weights")
SPEED = {"int8": 4.0, "int8-static": 2.0, "fp32": 1.0}


@pytest.fixture(autouse=True)
def _twice_as_slow_is_not_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.building.variants.selection.MAX_SLOWDOWN", 1.9)


def graph_of(variant: Variant, left_alone: int) -> Graph:
    """Return a graph without a file, whose path encodes its origin."""
    return Graph(Path(variant.precision, str(left_alone)), (), (), (), 20, 9, Counter(), size=1)


def made_of(graph: Graph) -> tuple[str, int]:
    """Return the precision of a graph, and the number of its layers left in fp32."""
    return graph.path.parent.name, int(graph.path.name)


def quality_of(mean: float) -> Quality:
    return Quality(mean, worst=mean, error=0.0, where="", ranking={}, batch_agreement=1.0, padding=0.0, scores={})


class FakeEvaluator(Evaluator):
    """Evaluator with given qualities and speeds by the origin of a graph."""

    metric = "cosine"
    min_ranking: Mapping[str, float] = {}
    samples: tuple[Sample, ...] = ({},) * 32

    def __init__(self, quality: dict[tuple[str, int], float]) -> None:
        self.rankings: dict[tuple[str, int], dict[str, float]] = {}
        self.qualities = quality
        self.on_some: dict[tuple[str, int], float] = {}  # quality on the first 8 samples
        self.timed: list[tuple[str, int]] = []
        self.scored: list[tuple[str, int]] = []
        self.served: list[list[str]] = []
        self.rates: dict[str, tuple[float, ...]] = {}

    def latency(self, graph: Graph, infer: Infer | None = None) -> Latencies:
        self.timed.append(made_of(graph))
        precision, left = made_of(graph)
        return {"1x16": (1 + 0.3 * left) / SPEED[precision]}

    def opened(self, graph: Graph, mapped: bool = False) -> Infer:
        return lambda feeds: {}

    def traffic(self, graphs: Mapping[str, Graph]) -> dict[str, Rates]:
        self.served.append(sorted(graphs))
        return {name: Rates(dict.fromkeys((1, 16), self.rates.get(name, (10.0, 10.0, 10.0)))) for name in graphs}

    def judged(
        self,
        measured: MeasuredVariant,
        graph: Graph,
        infer: Infer,
        more: Sequence[BatchReference] = (),
        min_mean: float | None = None,
    ) -> tuple[MeasuredVariant, Quality]:
        self.scored.append(made_of(graph))
        on_some = self.on_some.get(made_of(graph), 1.0)
        if min_mean is not None and (8 * on_some + 32) / 40 < min_mean:
            return replace(measured, quality=on_some, judged_samples=8), replace(quality_of(on_some), samples=8)
        quality = quality_of(self.qualities.get(made_of(graph), 1.0))
        return replace(measured, quality=quality.mean, ranking=self.rankings.get(made_of(graph), {})), quality

    def relative_quality(self, measured: MeasuredVariant) -> float:
        return measured.quality or 0.0


class FakeMaker(VariantMaker):
    """Maker of graphs with eight layers, any of which can stay in fp32; it does not support fp16.

    Each layer has `_share` of the error of the one before it.
    """

    _share = 0.1

    def make(self, variant: Variant, left_alone: Sequence[str] = ()) -> Quantised:
        if variant.precision == "fp16":
            raise ExportError("no fp16 here")
        return Quantised(graph_of(variant, len(left_alone)), matmuls=1)

    def discard(self, variant: Variant, quantised: Quantised) -> None:
        self._discarded.append(made_of(quantised.graph))

    @cached_property
    def _discarded(self) -> list[tuple[str, int]]:
        return []

    def sensitive(self, variant: Variant) -> Mapping[str, float]:
        return {} if variant.precision == "fp32" else {f"layer {n}": self._share**n for n in range(8)}


@pytest.mark.parametrize(("fake", "real"), [(FakeEvaluator, Evaluator), (FakeMaker, VariantMaker)])
def test_fakes_have_the_signatures_of_the_real_classes(fake: type, real: type) -> None:
    """Every method of a fake exists in the real class with the same parameters."""
    calls = {name: code for name, code in vars(fake).items() if callable(code) and not name.startswith("_")}
    for name, code in calls.items():
        assert list(inspect.signature(getattr(real, name)).parameters) == list(inspect.signature(code).parameters)
    for name in {name for name in vars(fake) if not name.startswith("_")} - set(calls):
        assert hasattr(real, name) or name in {one.name for one in fields(real)}


def a_maker() -> FakeMaker:
    return FakeMaker(make_spec(model="org/encoder"), graph_of(SLOW, 0), Path("nowhere"), ())


def search(
    evaluator: FakeEvaluator,
    options: Sequence[Variant],
    known: Measurements | None = None,
    maker: FakeMaker | None = None,
    compares_times: bool = True,
    threshold: float = 0.99,
) -> Selection[Variant]:
    base = MeasuredVariant("PyTorch fp32", 1, {"1x16": 2.0})
    exact = MeasuredVariant("exact", 1, {"1x16": 1.0}, quality=1.0), quality_of(1.0)
    candidates = EncoderCandidates(
        evaluator, maker or a_maker(), base, exact, threshold, known or Measurements(), "", compares_times
    )
    return select(candidates, options, lambda name: nullcontext())


def test_selection_judges_only_the_fastest_if_it_is_good_enough() -> None:
    evaluator = FakeEvaluator({})
    selection = search(evaluator, (SLOW, FAST, MIDDLE))
    assert selection.chosen.measured.name == "int8"
    assert evaluator.scored == [("int8", 0)]
    assert [measured.name for measured in selection.tried] == ["fp32", "int8-static", "int8"]
    assert selection.choice is not None
    assert "chose int8: 8.0x PyTorch's speed" in selection.choice
    assert "slower: int8-static (4.0x), fp32 (2.0x)" in selection.choice


def test_selection_does_not_measure_the_verified_variant_again() -> None:
    evaluator = FakeEvaluator({("int8", left): 0.9 for left in range(9)})
    exact = Variant("exact", "onnxruntime")
    selection = search(evaluator, (exact, FAST))
    assert selection.chosen.measured.name == "exact"
    assert ("exact", 0) not in evaluator.timed + evaluator.scored


def test_selection_leaves_layers_in_fp32_while_that_is_fastest() -> None:
    """int8 misses the quality with zero or one layer in fp32; with two it suffices and is still the fastest."""
    evaluator = FakeEvaluator({("int8", 0): 0.9, ("int8", 1): 0.95})
    selection = search(evaluator, (SLOW, FAST, MIDDLE))
    assert selection.chosen.measured.name == "int8, 2 layers fp32"
    assert evaluator.scored == [("int8", 0), ("int8", 1), ("int8", 2), ("int8-static", 0)], "the last is nearly as fast"


def test_selection_refuses_a_variant_that_ranks_differently() -> None:
    """int8 keeps the mean agreement; its nearest neighbours are others until two layers stay in fp32."""
    evaluator = FakeEvaluator({})
    evaluator.min_ranking = {"recall@10": 0.85}
    evaluator.rankings = {("int8", left): {"recall@10": recall} for left, recall in ((0, 0.7), (1, 0.8), (2, 0.9))}
    selection = search(evaluator, (SLOW, FAST))
    assert selection.chosen.measured.name == "int8, 2 layers fp32"
    assert selection.choice is not None
    assert "missed it: int8 (8.0x, cosine of 1.0000, recall@10 of 0.7000)" in selection.choice
    evaluator.rankings = {("int8", left): {"recall@10": 0.7} for left in range(9)}
    with pytest.raises(VerificationError, match=r"cosine of 1\.0000, recall@10 of 0\.7000 .* 0\.9900, 0\.8500 is req"):
        search(evaluator, (FAST,))


def test_selection_ignores_rankings_without_a_limit() -> None:
    """Regression: with --quality, which replaces all limits, a ranking below zero was refused all the same."""
    evaluator = FakeEvaluator({})
    evaluator.rankings = {("int8", 0): {"rank correlation": -0.3}}
    assert search(evaluator, (FAST,)).chosen.measured.name == "int8"


NEAR = Variant("int8-dynamic", "onnxruntime")


def test_auto_serves_8_bit_weights_where_nothing_as_good_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use MiniLM's speeds over fixed shapes and its qualities on 2 cores of an AMD EPYC."""
    speeds = {"int8": 8.5, "int8-static": 7.0, "int8-weights": 5.0, "bf16": 4.5, "fp32": 3.3}
    for precision, speed in speeds.items():
        monkeypatch.setitem(SPEED, precision, speed)
    rounded = {"int8": 0.9935, "int8-static": 0.9977, "int8-weights": 0.9990}
    evaluator = FakeEvaluator({(precision, left): rounded[precision] for precision in rounded for left in range(5)})
    evaluator.rates = {"int8-weights OpenVINO": (12.0, 12.0, 12.0)}
    options = requested_variants(make_spec(model="org/encoder", precision="auto"), ("avx512_vnni", "avx512_bf16"))
    selection = search(evaluator, options, threshold=0.9985)
    assert selection.chosen.measured.name == "int8-weights OpenVINO"


def test_selection_prefers_the_finalist_with_most_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant is slower over fixed shapes but faster as served; much slower ones are not measured again."""
    monkeypatch.setitem(SPEED, "int8-dynamic", 2.2)
    evaluator = FakeEvaluator({})
    evaluator.rates = {"int8": (10.0, 11.0, 10.5), "int8-dynamic": (12.0, 12.5, 11.5)}
    selection = search(evaluator, (SLOW, FAST, NEAR))
    assert selection.chosen.measured.name == "int8-dynamic"
    assert evaluator.served == [["int8", "int8-dynamic"]]
    assert selection.choice is not None
    assert "chose int8-dynamic: 4.4x PyTorch's speed over fixed shapes" in selection.choice
    assert (
        "requests a second as served, at 1 and at 16 clients: int8 10 (10 to 11) and 10 (10 to 11)" in selection.choice
    )
    assert "equally fast" not in selection.choice
    assert "busy" not in selection.choice


def test_selection_prefers_quality_among_equally_fast_finalists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPEED, "int8-dynamic", 2.2)
    evaluator = FakeEvaluator({("int8", 0): 0.991, ("int8-dynamic", 0): 0.998})
    evaluator.rates = {"int8": (20.0, 11.0, 30.0), "int8-dynamic": (19.0, 12.0, 20.0)}
    selection = search(evaluator, (FAST, NEAR))
    assert selection.chosen.measured.name == "int8-dynamic"
    assert selection.choice is not None
    assert "equally fast within the noise, and int8-dynamic has the better quality" in selection.choice
    assert "the machine was busy: the rounds of one variant are 95% apart" in selection.choice


def test_selection_ignores_quality_of_a_finalist_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounds may have run while the machine was idle, unlike those of the finalists measured to the end."""
    monkeypatch.setitem(SPEED, "int8-dynamic", 2.2)
    evaluator = FakeEvaluator({("int8", 0): 0.991, ("int8-dynamic", 0): 0.998})
    evaluator.rates = {"int8": (71.0, 60.0, 55.0), "int8-dynamic": (65.0, 65.0)}
    assert search(evaluator, (FAST, NEAR)).chosen.measured.name == "int8"


def test_selection_drops_a_variant_that_fp32_layers_make_slow() -> None:
    evaluator = FakeEvaluator({("int8", left): 0.9 for left in range(9)})
    selection = search(evaluator, (SLOW, FAST, MIDDLE))
    assert selection.chosen.measured.name == "int8-static"
    assert selection.choice is not None
    assert "missed it: int8 (8.0x, cosine of 0.9000)" in selection.choice


def test_selection_error_names_the_best_quality_reached() -> None:
    evaluator = FakeEvaluator({("int8", left): 0.9 + left / 100 for left in range(9)})
    with pytest.raises(VerificationError, match=r"int8, 4 layers fp32 reaches a cosine of 0\.9400 .* 0\.9900 is req"):
        search(evaluator, (FAST,))
    assert evaluator.scored == [("int8", 0), ("int8", 1), ("int8", 2), ("int8", 4)], "at most half of the layers"


def test_selection_skips_numbers_of_layers_that_cannot_suffice() -> None:
    """Regression: layers that lose equally were left in fp32 in all steps, each built, timed and judged."""
    evaluator, maker = FakeEvaluator({("int8", left): 0.9 for left in range(9)}), a_maker()
    maker.__dict__["_share"] = 1.0
    with pytest.raises(VerificationError, match="the best of 2 tried"):
        search(evaluator, (FAST,), maker=maker)
    assert evaluator.scored == [("int8", 0), ("int8", 4)], "seven of eight seem to be needed, and half are allowed"


def test_selection_tries_half_as_many_layers_as_seem_to_suffice() -> None:
    """The loss of 0.016 has to fall to 0.01: three layers of eight. More in fp32 than needed would only be slower."""
    evaluator, maker = FakeEvaluator({("int8", 0): 0.984, ("int8", 1): 0.986}), a_maker()
    maker.__dict__["_share"] = 1.0
    assert search(evaluator, (FAST,), maker=maker).chosen.measured.name == "int8, 2 layers fp32"


def test_selection_times_a_single_option_once_it_keeps_the_quality() -> None:
    """Regression: every int8 form that missed the quality was timed, although no other precision was allowed."""
    evaluator = FakeEvaluator({("int8", left): 0.9 for left in range(2)})
    selection = search(evaluator, (FAST,), compares_times=False)
    assert evaluator.timed == [("int8", 2)]
    assert [bool(measured.latency_ms) for measured in selection.tried].count(True) == 1
    assert selection.chosen.measured.latency_ms == {"1x16": pytest.approx(0.4)}


def test_selection_names_variants_that_cannot_be_built() -> None:
    half = Variant("fp16", "onnxruntime")
    selection = search(FakeEvaluator({}), (SLOW, half))
    assert selection.chosen.measured.name == "fp32"
    assert selection.choice is not None
    assert "not possible: fp16 (no fp16 here)" in selection.choice
    with pytest.raises(ExportError, match="no fp16 here"):
        search(FakeEvaluator({}), (half,))


def test_selection_reuses_measurements_but_judges_the_served_variant(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    quality = {("int8", left): 0.9 for left in range(9)}
    search(FakeEvaluator(quality), (SLOW, FAST, MIDDLE), Measurements(path))
    evaluator = FakeEvaluator(quality)
    selection = search(evaluator, (SLOW, FAST, MIDDLE), Measurements(path))
    assert selection.chosen.measured.name == "int8-static"
    assert evaluator.timed == []
    assert evaluator.scored == [("int8-static", 0)]
    path.write_text("{broken")
    assert search(FakeEvaluator({}), (FAST,), Measurements(path)).chosen.measured.name == "int8"


def test_selection_judges_again_what_missed_on_some_samples(tmp_path: Path) -> None:
    """Regression: a build that required less refused int8 by its quality on the samples that another build judged."""
    path = tmp_path / "measured.json"
    evaluator = FakeEvaluator({("int8", 0): 0.986})
    evaluator.on_some = {("int8", 0): 0.93}
    strict = search(evaluator, (SLOW, FAST), Measurements(path))
    assert strict.choice is not None
    assert "missed it: int8 (8.0x, cosine of 0.9300 on 8 of 32 samples)" in strict.choice
    lenient = search(evaluator, (SLOW, FAST), Measurements(path), threshold=0.95)
    assert (lenient.chosen.measured.name, lenient.chosen.measured.quality) == ("int8", 0.986)


def test_refusal_prefers_variants_judged_on_all_samples() -> None:
    evaluator = FakeEvaluator({("int8", left): 0.9 for left in range(9)})
    evaluator.on_some = {("int8", 0): 0.92, ("int8", 1): 0.94}
    with pytest.raises(
        VerificationError, match=r"int8, 2 layers fp32 reaches a cosine of 0\.9000 .* best of 2 judged on all"
    ):
        search(evaluator, (FAST,))
    evaluator.on_some = {("int8", left): 0.9 + left / 100 for left in range(9)}
    with pytest.raises(VerificationError, match=r"0\.9400 on 8 of 32 samples, the best of 4 tried"):
        search(evaluator, (FAST,))


def test_selection_discards_variants_as_soon_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph below the quality is dropped before its successor is built, a slower one before the next measurement."""
    monkeypatch.setattr("builder.building.variants.selection.MAX_SLOWDOWN", 3.0)
    evaluator, maker = FakeEvaluator({("int8", 0): 0.9}), a_maker()
    gone: list[list[tuple[str, int]]] = []
    measured = evaluator.traffic

    def traffic(graphs: Mapping[str, Graph]) -> dict[str, Rates]:
        gone.append(list(maker._discarded))
        return measured(graphs)

    monkeypatch.setattr(evaluator, "traffic", traffic)
    evaluator.rates = {"int8, 1 layers fp32": (20.0, 20.0, 20.0)}
    selection = search(evaluator, (SLOW, FAST, MIDDLE), maker=maker)
    assert selection.chosen.measured.name == "int8, 1 layers fp32"
    assert gone == [[("int8", 0), ("fp32", 0)]]
    assert maker._discarded == [("int8", 0), ("fp32", 0), ("int8-static", 0)]


def test_selection_removes_files_of_rejected_precisions(tmp_path: Path) -> None:
    candidates = replace(precisions({"int4-weights": (0.95, 1.06), "int8": (0.99, 1.0)}, []), graphs=_files(tmp_path))
    for name in SPEEDS:
        (tmp_path / name).mkdir()
        for file in ("model.onnx", "model.onnx.data", "encoder.onnx"):
            (tmp_path / name / file).touch()
    assert select(candidates, SPEEDS, lambda name: nullcontext()).chosen.option == "int8"
    left = {name: sorted(file.name for file in (tmp_path / name).iterdir()) for name in SPEEDS}
    every = ["encoder.onnx", "model.onnx", "model.onnx.data"]
    assert left == {"fp32": every, "int8": every, "int4-weights": ["encoder.onnx"]}


def _files(folder: Path) -> Callable[[str], list[Graph]]:
    return lambda name: [replace(graph_of(SLOW, 0), path=folder / name / "model.onnx")]


def precisions(figures: Mapping[str, tuple[float, float]], judged_names: list[str]) -> PrecisionCandidates[str]:
    """Return the candidates of a generating model: the kept share of PyTorch's tokens, and the perplexity.

    The judged names are appended to `judged_names`.
    """
    base = MeasuredVariant("PyTorch fp32", 1, {"token, 1 rows": 4.0, "prompt of 128": 1.0}, perplexity=20.0)
    speed = {"fp32": 2.0, "int8": 1.0, "int4-weights": 0.5}

    def judged(measured: MeasuredVariant, name: str) -> MeasuredVariant:
        judged_names.append(name)
        return replace(measured, quality=figures[name][0], perplexity=figures[name][1] * 20.0)

    return PrecisionCandidates(
        base,
        (
            MeasuredVariant("fp32", 1, {"token, 1 rows": 2.0, "prompt of 128": 9.0}, quality=1.0, perplexity=20.0),
            "fp32",
        ),
        Required(0.9, 1.05),
        "agreement",
        make=str,
        timed=lambda name, precision: MeasuredVariant(
            name, 1, {"token, 1 rows": speed[precision], "prompt of 128": 99.0}
        ),
        judged=judged,
        graphs=lambda precision: (),
    )


@pytest.mark.parametrize(
    ("int4", "int8", "chosen", "judged"),
    [
        ((0.95, 1.01), (0.99, 1.0), "int4-weights", ["int4-weights"]),
        ((0.95, 1.06), (0.99, 1.0), "int8", ["int4-weights", "int8"]),
        ((0.85, 1.01), (0.89, 1.0), "fp32", ["int4-weights", "int8"]),
    ],
)
def test_precisions_are_selected_by_speed_and_quality(
    int4: tuple[float, float], int8: tuple[float, float], chosen: str, judged: list[str]
) -> None:
    """Agreement counts tokens, not prompts; agreement and perplexity must both suffice; fp32 always does."""
    judged_names: list[str] = []
    candidates = precisions({"int4-weights": int4, "int8": int8}, judged_names)
    selection = select(candidates, ("fp32", "int8", "int4-weights"), lambda name: nullcontext())
    assert (selection.chosen.measured.name, judged_names) == (chosen, judged)
    assert selection.choice is not None
    assert f"chose {chosen}: {dict(zip(SPEEDS, (2, 4, 8), strict=True))[chosen]}.0x" in selection.choice
    if chosen == "int8":
        assert (
            "missed it: int4-weights (8.0x, agreement of 0.9500 and 1.0600 of PyTorch's perplexity)" in selection.choice
        )
        assert "slower: fp32 (2.0x)" in selection.choice


def test_precision_below_quality_is_refused_with_both_measures() -> None:
    candidates = precisions({"int8": (0.85, 1.2)}, [])
    with pytest.raises(VerificationError, match=r"int8 has a agreement of 0\.8500 .* perplexity is 1\.2000 of PyTorch"):
        select(candidates, ("int8",), lambda name: nullcontext())


@pytest.mark.parametrize(("waited", "message"), [(9, "threads waited for one 90% of the time"), (0, None)])
def test_choice_mentions_that_other_programs_used_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: int, message: str | None
) -> None:
    (tmp_path / "1").mkdir()
    counted = tmp_path / "1" / "schedstat"
    counted.write_text("100 100 7\n")
    monkeypatch.setattr(timing, "TASKS", tmp_path)

    class Slowed(FakeEvaluator):
        def latency(self, graph: Graph, infer: Infer | None = None) -> Latencies:
            counted.write_text(f"{100 + len(self.timed) + 1} {100 + waited * (len(self.timed) + 1)} 8\n")
            return super().latency(graph, infer)

    choice = search(Slowed({}), (SLOW, FAST)).choice
    assert choice is not None
    assert (message in choice) if message else ("other programs" not in choice)


def test_choice_without_cpu_wait_counters_mentions_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "TASKS", tmp_path / "none")
    assert timing.CpuWaitMeter().share == 0.0
