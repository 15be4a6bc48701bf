"""Every encoder-decoder of the support table: answers equal transformers', greedy and beam search in one batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from builder.building.pipeline import build
from builder.building.verify.emitted import PromptedRequest, answer
from builder.building.verify.runtimes import difference, replayed
from builder.building.verify.seq2seq import Graphs, Seq2SeqReference, pytorch_answer, recorded
from builder.common.errors import ExportError, VerificationError
from builder.engines.optimise.fusion import fuse
from builder.graphs.export import cached_attention
from builder.graphs.export.seq2seq import export_seq2seq
from builder.graphs.onnx.graph import nodes_of
from builder.graphs.onnx.searches import for_searches
from builder.graphs.onnx.shared_tables import with_shared_tables
from builder.options import make_spec
from builder.runtime.generation.executors.base import CallPart, ScoredCandidates
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from tests.seq2seqs import BART, SEQ2SEQS, SPECIAL, T5, make_seq2seq
from tests.tiny_encoders import VOCABULARY, make_tokenizer

LENGTHS = (5, 40, 17, 1, 30)
START, END = 2, 3
BEAMS = 4
SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "true"},
    {"num_beams": 4, "length_penalty": 0.4, "early_stopping": "never", "no_repeat_ngram_size": 2},
    {"num_beams": 3, "encoder_no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_tokens": 5},
    {"no_repeat_ngram_size": 3, "min_tokens": 4},
)
FORCED: dict[str, Any] = {"num_beams": 4, "length_penalty": -0.5}  # with a forced first and last token
SEARCHED = ("bart", "t5")  # with every search of every text; of the others, each text has half of the searches


def sources() -> list[tuple[int, ...]]:
    generator = np.random.default_rng(0)
    return [tuple(generator.integers(5, VOCABULARY, length).tolist()) for length in LENGTHS]


def graphs_of(model: PreTrainedModel, folder: Path, beams: int = BEAMS) -> Graphs:
    exported = export_seq2seq(model, folder, beams)
    encoder, decoder = fuse(exported.encoder, folder), fuse(exported.decoder, folder)
    if beams > 1:
        decoder = for_searches(decoder, beams, folder)
    return Graphs(encoder, decoder, exported.caches, exported.cross, beams, VOCABULARY)


def asked(source: tuple[int, ...], options: dict[str, Any], count: int, **more: Any) -> PromptedRequest:
    chosen = RequestOptions(temperature=0.0, **options)
    return PromptedRequest((START,), Rules(chosen, (END,), source=source, max_tokens=count, **more), source)


def expected(model: PreTrainedModel, source: tuple[int, ...], options: dict[str, Any], count: int, **more: Any) -> Any:
    settings = dict(options)
    stopping = {"true": True, "false": False, "never": "never"}[settings.pop("early_stopping", "false")]
    settings["min_new_tokens"] = settings.pop("min_tokens", None)
    settings["num_return_sequences"] = settings.pop("n", 1)
    return pytorch_answer(model, source, START, [END], count, early_stopping=stopping, **settings, **more)


@pytest.mark.every_architecture
@pytest.mark.parametrize("model_type", SEQ2SEQS)
def test_seq2seq_answers_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Greedy rows and searches of 2, 3 and 4 beams, over texts of unequal length, together in 8 slots."""
    model, whole = make_seq2seq(model_type), model_type in SEARCHED
    graphs = graphs_of(model, tmp_path)
    executor = graphs.executor(slots=8, max_length=40, max_source=40, threads=1)
    together: list[tuple[tuple[int, ...], dict[str, Any], int, dict[str, Any]]] = []
    for number, source in enumerate(sources()):
        for index, options in enumerate(SEARCHES):
            if whole or (number // 2 + index) % 2 == 0:  # in pairs of texts, so that all lengths of answers stay
                together.append((source, options, 12 + (number + index) % 4 * 8, {}))
        if whole or number < 2:
            together.append((source, FORCED, 14, {"first": 7, "last": (END,)}))
    answers = answer(executor, [asked(source, options, count, **more) for source, options, count, more in together])
    for (source, options, count, more), hypotheses in zip(together, answers, strict=True):
        forced = {"forced_bos_token_id": 7, "forced_eos_token_id": END} if more else {}
        wanted = expected(model, source, options, count, **forced)
        assert [hypothesis.tokens for hypothesis in hypotheses] == wanted, (options, len(source))
    layers = len(graphs.caches)
    assert graphs.decoder.operators["GroupQueryAttention"] == 2 * layers, "a call runs one branch"
    assert graphs.decoder.operators["If"] == layers + 1, "of texts for one row or for four, and of candidates"
    assert graphs.encoder.operators["MultiHeadAttention"] == model.config.num_hidden_layers
    for graph in (graphs.encoder, graphs.decoder):
        assert graph.operators["Softmax"] == 0, "an attention was left unfused"


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_seq2seq_returns_the_n_best_and_their_scores(model_type: str, tmp_path: Path) -> None:
    model = make_seq2seq(model_type)
    executor = graphs_of(model, tmp_path).executor(8, 40, 40, threads=1)
    source = sources()[1]
    options = {"num_beams": 4, "n": 3, "length_penalty": 1.5}
    (hypotheses,) = answer(executor, [asked(source, options, 16)])
    assert [hypothesis.tokens for hypothesis in hypotheses] == expected(model, source, options, 16)
    for hypothesis in hypotheses:
        ids = torch.tensor([[START, *hypothesis.tokens[:-1]]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=ids).logits[0]
        total = torch.log_softmax(logits, -1).gather(-1, torch.tensor(hypothesis.tokens)[:, None]).sum()
        assert hypothesis.score == pytest.approx(float(total) / len(hypothesis.tokens) ** 1.5, rel=1e-4)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_beam_search_reads_the_likeliest_tokens_alone(model_type: str, tmp_path: Path) -> None:
    """Beside greedy rows and with banned tokens; only forced tokens require all logits."""
    model = make_seq2seq(model_type)
    executor = graphs_of(model, tmp_path).executor(11, 40, 40, threads=1)
    asks: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({"num_beams": 4, "length_penalty": 2.0}, {"first": 7}, {"forced_bos_token_id": 7}),
        (
            {"num_beams": 3, "no_repeat_ngram_size": 2, "min_tokens": 4},
            {"bad_words": ((9,), (11, 12))},
            {"bad_words_ids": [[9], [11, 12]]},
        ),
        ({"num_beams": 3, "encoder_no_repeat_ngram_size": 2}, {}, {}),
        ({}, {}, {}),
    ]
    counts: list[int] = []
    runs: list[int] = []
    likeliest, run = executor.likeliest, executor.run

    def counted(part: CallPart, count: int) -> ScoredCandidates:
        counts.append(count)
        return likeliest(part, count)

    def ran(*part: Any) -> np.ndarray:
        runs.append(len(part[1]))
        return run(*part)

    executor.likeliest = counted  # type: ignore[method-assign]
    executor.run = ran  # type: ignore[assignment, method-assign]
    source = sources()[1]
    prompted = [asked(source, options, 20, **more) for options, more, _ in asks]
    found = answer(executor, prompted)
    for (options, _, wanted), hypotheses in zip(asks, found, strict=True):
        assert [hypothesis.tokens for hypothesis in hypotheses] == expected(model, source, options, 20, **wanted)
    assert runs[0] == 4, "the first step, at which one row's token is forced"
    assert all(rows == 1 for rows in runs[1:]), "the row that is not searched, once it is alone"
    assert len(counts) >= 10
    assert all(count % 16 == 0 for count in counts)
    executor.has_likeliest = False
    assert [[one.tokens for one in best] for best in answer(executor, prompted)] == [
        [one.tokens for one in best] for best in found
    ]


def test_likeliest_tokens_are_those_of_the_logits(tmp_path: Path) -> None:
    """Return as many as requested, all of a smaller vocabulary, and those of the requested rows."""
    model = make_seq2seq("t5")
    executor = graphs_of(model, tmp_path).executor(3, 8, 40, threads=1)
    for row, encoded in enumerate(executor.encode(sources()[:3])):
        executor.attach(row, encoded)
        executor.assign(row, row, 0)
    part = CallPart(0, np.array([[START], [5], [6]]), np.zeros(3, np.int64), np.array([2, 0]))
    logits = torch.from_numpy(executor.run(*part).copy())
    for count in (1, 16, 2 * VOCABULARY):
        found = executor.likeliest(part, count)
        values, tokens = logits.topk(min(count, VOCABULARY))
        np.testing.assert_array_equal(found.logits, values)
        np.testing.assert_array_equal(found.tokens, tokens)
        np.testing.assert_allclose(found.totals, logits.logsumexp(-1, keepdim=True), atol=1e-5)
    np.testing.assert_array_equal(executor.run(*part), logits)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_rows_without_beams_attend_once(model_type: str, tmp_path: Path) -> None:
    """Logits and caches equal those of a graph in which every beam attends, with one beam and with two."""
    model = make_seq2seq(model_type)
    graphs = graphs_of(model, tmp_path)
    every = fuse(export_seq2seq(model, tmp_path / "every", BEAMS).decoder, tmp_path / "every")
    executors = [replace(graphs, decoder=decoder).executor(3, 8, 40, threads=1) for decoder in (graphs.decoder, every)]
    for beams in ([0, 0, 0], [0, 1, 0]):
        found = []
        for executor in executors:
            for row, encoded in enumerate(executor.encode(sources()[:3])):
                executor.attach(row, encoded)
                executor.assign(row, row - beams[row], beams[row])
            attended = sorted({row - beam for row, beam in enumerate(beams)})
            before = {name: tensor[attended] for name, tensor in executor.texts.cross_arena.items()}
            found.append(executor.run(0, np.array([[START], [5], [6]]), np.zeros(3, np.int64)).copy())
            for name, tensor in executor.texts.cross_arena.items():
                np.testing.assert_array_equal(tensor[attended], before[name])
        np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_beam_search_is_replayed_on_the_serving_version(tmp_path: Path) -> None:
    """Replay the most probable tokens, then steps without a search; choosing the least probable tokens is detected."""
    graphs = graphs_of(make_seq2seq("t5"), tmp_path)
    case = recorded(graphs, Seq2SeqReference(tuple(sources()[:3]), START, None, (END,), (), (), (), 2, (), ()), 1)
    made = Counter(name for name, _ in case.job["calls"])
    assert made["likeliest"] == 4, "one for each token of the search"
    assert made["run"] >= 4, "once it has ended"
    wrong = onnx.load(graphs.decoder.path)
    (chosen,) = [node for node in nodes_of(wrong.graph) if node.op_type == "TopK"]
    chosen.attribute.append(onnx.helper.make_attribute("largest", 0))
    onnx.save(wrong, tmp_path / "wrong.onnx")
    spoiled = {**case.job, "models": [str(tmp_path / "wrong.onnx"), *case.job["models"][1:]]}
    same, other = replayed(tmp_path / "this build's own", [case.job, spoiled])
    assert not isinstance(same, str), same
    assert not isinstance(other, str), other
    assert difference(list(case.answers), same) <= case.tolerance
    assert difference(list(case.answers), other) > 0.1


def test_build_for_one_beam_serves_greedy_rows_alone(tmp_path: Path) -> None:
    model = make_seq2seq("t5")
    executor = graphs_of(model, tmp_path, beams=1).executor(2, 40, 40, threads=1)
    answers = answer(executor, [asked(source, {}, 20) for source in sources()])
    assert [one[0].tokens for one in answers] == [expected(model, source, {}, 20)[0] for source in sources()]


def test_tables_of_both_graphs_are_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word embeddings are shared, and answers equal those of graphs with a table each."""
    monkeypatch.setattr("builder.graphs.onnx.shared_tables.MIN_TABLE_BYTES", 10_000)
    model = make_seq2seq("t5")
    graphs = graphs_of(model, tmp_path)
    decoder, encoder = with_shared_tables([graphs.decoder, graphs.encoder], tmp_path / "served")
    files = {*decoder.files, *encoder.files}
    assert {file.name for file in files} == {"model.onnx", "encoder.onnx", "shared.data"}
    table = model.get_input_embeddings().weight.nbytes
    assert sum(file.stat().st_size for file in files) < graphs.size - 0.9 * table
    executor = replace(graphs, decoder=decoder, encoder=encoder).executor(5, 40, 40, threads=1)
    answers = answer(executor, [asked(source, {}, 20) for source in sources()])
    assert [one[0].tokens for one in answers] == [expected(model, source, {}, 20)[0] for source in sources()]
    others = [decoder, graphs_of(make_seq2seq("bart"), tmp_path / "bart").encoder]
    assert with_shared_tables(others, tmp_path / "none") == others


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("prophetnet", {"hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}),
        ("fsmt", {**BART, "langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}),
        ("led", {**BART, "max_encoder_position_embeddings": 128, "attention_window": 8}),
        ("switch_transformers", {**T5, "num_experts": 4}),
    ],
)
def test_export_refuses_unsupported_models_by_name(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type, **{"vocab_size": VOCABULARY, **SPECIAL, **options})
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with pytest.raises(ExportError, match=f"{model_type} cannot be served for generation"):
        export_seq2seq(model, tmp_path, 1)


def test_build_refuses_graphs_that_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LongT5's bias is for a single row and position. Unless it is refused by name, it fails on the samples."""
    sizes = {**SPECIAL, **T5, "num_layers": 1, "num_decoder_layers": 1}
    config = AutoConfig.for_model("longt5", vocab_size=VOCABULARY, local_radius=7, **sizes)
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "checkpoint")
    make_tokenizer("bpe", type_ids=False).save_pretrained(tmp_path / "checkpoint")
    spec = make_spec(model=str(tmp_path / "checkpoint"), name="m", output=tmp_path / "out", max_length=32, slots=2)
    with pytest.raises(ExportError, match="longt5 cannot be served for generation: its bias on positions is for"):
        build(spec)
    monkeypatch.setattr(cached_attention, "statically_known_true", lambda condition: False)
    with pytest.raises(VerificationError, match="do not run on the samples"):
        build(spec)
    assert not (tmp_path / "out").exists()
