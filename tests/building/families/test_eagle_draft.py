"""A decoder with an EAGLE-3 draft: from hidden states that its graph returns, the draft guesses what EAGLE-3 does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from builder.building.keys import stage_keys
from builder.building.pipeline import build
from builder.common.errors import CheckpointError, SpecError
from builder.options import make_spec
from builder.repository.check import check
from builder.repository.report.record import BuildReport
from builder.runtime.contract import DRAFT, load_generation
from builder.runtime.generation.executors.base import HIDDEN_STATES
from builder.runtime.generation.executors.openvino_graph import BLOCK
from builder.runtime.generation.service import Service
from builder.runtime.generation.speculation import HiddenStatesDrafter
from builder.serving.plan.needs import needs_of, published
from tests.building.families.test_draft import LENGTH, OPTIONS, TEXTS, said
from tests.decoders import make_decoder_checkpoint
from tests.eagle_drafts import Eagle3, make_eagle3

LAYERS, SLOTS = 6, 8


@dataclass(frozen=True)
class Pair:
    """Target and a draft that learned its answer to the last of TEXTS, in `folder`."""

    folder: Path
    model: PreTrainedModel

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        return self.folder / "eagle"

    def spec(self, output: Path, draft: Path | None = None, **options: Any) -> Any:
        given = {"max_length": LENGTH, "slots": SLOTS, "output": output, **options}
        return make_spec(model=str(self.target), name="writes", draft=str(draft or self.draft), **given)

    def copied(self, to: Path, **settings: Any) -> Path:
        """Return a copy of the draft with other settings."""
        folder = Path(shutil.copytree(self.draft, to))
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**document, **settings}))
        return folder


@pytest.fixture(scope="module")
def pair(module_folder: Callable[[str], Path]) -> Pair:
    folder = module_folder("eagle-drafts")
    make_decoder_checkpoint(folder / "target", "llama", num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    ids = AutoTokenizer.from_pretrained(folder / "target")(TEXTS[-1], return_tensors="pt").input_ids
    text = model.generate(ids, max_new_tokens=75, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    draft = make_eagle3(folder / "eagle", model, known=model.config.vocab_size - 20)
    Eagle3(draft, model).train(draft, [text])
    return Pair(folder, model)


@dataclass(frozen=True)
class Built:
    report: BuildReport
    version: Path

    @property
    def is_exact(self) -> bool:
        return self.report.chosen == "fp32"

    @property
    def engine(self) -> str:
        return load_generation(self.version).session.engine


ROUNDED = {"quality": 0.0, "perplexity": 1e9}  # random weights have no quality
BUILDS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "int8": {"precision": "int8", **ROUNDED},
    "openvino": {"engine": "openvino", "precision": "fp32", "cache": "int8", **ROUNDED},
}


@pytest.fixture(scope="module", params=BUILDS)
def built(request: pytest.FixtureRequest, pair: Pair, module_folder: Callable[[str], Path]) -> Built:
    output = module_folder(f"eagle-{request.param}")
    report = build(pair.spec(output, **BUILDS[request.param]))
    return Built(report, output / "writes" / "1")


def test_eagle_draft_leaves_the_text_unchanged(built: Built, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(built.version, plain)
    shutil.rmtree(plain / DRAFT)
    # The last digit of a sum depends on the tokens of its call. An 8-bit cache may round it to another byte, which a
    # draw turns into another token.
    for options in OPTIONS[:1] if load_generation(built.version).arena.dtype == "uint8" else OPTIONS:
        texts, stats = said(built.version, **options)
        without, alone = said(plain, **options)
        assert texts == without, options
        assert alone.drafted_tokens == 0
        if not options:
            assert 0 <= stats.right_drafts < stats.drafted_tokens
            assert (stats.right_drafts > 0) == (stats.steps < alone.steps)
            assert stats.right_drafts > 0 or not built.is_exact, "what was learned is the text in fp32"
    texts, stats = said(built.version, guide=json.dumps({"regex": "[0-9]{12}"}), ignore_eos=False)
    assert [len(text) for (text,) in texts] == [12] * len(TEXTS)
    assert stats.drafted_tokens == 0


def test_eagle_draft_guesses_what_eagle3_guesses(built: Built, pair: Pair) -> None:
    """Compare every guess; the hidden states of a quantised target differ, so that only most guesses are the same."""
    proposals = proposals_of(built.version)
    reference = Eagle3(pair.draft, pair.model)
    equal = [tokens == reference.propose(before, len(tokens)) for before, tokens in proposals]
    assert len(equal) > 5
    assert max(len(tokens) for _, tokens in proposals) >= 4
    assert all(equal) or not built.is_exact
    assert sum(equal) > len(equal) / 2


def proposals_of(version: Path) -> list[tuple[list[int], list[int]]]:
    """Return all guesses, each after the tokens that it follows, of texts that run together and of one after them."""
    service, proposals = Service(version), list[tuple[list[int], list[int]]]()
    drafter = service.loop.scheduler.drafter
    assert isinstance(drafter, HiddenStatesDrafter)
    propose = drafter.propose

    def noted(number: int, tokens: Sequence[int], count: int, target_slot: int) -> list[int]:
        proposed = propose(number, tokens, count, target_slot)
        if proposed:
            proposals.append((list(tokens), proposed))
        return proposed

    drafter.propose = noted  # type: ignore[method-assign]
    for texts in (TEXTS, TEXTS[-1:]):  # the second time the prompt is cached
        for number, text in enumerate(texts, 1):
            tensors = {"text_input": np.array([text], object)}
            service.submit(tensors, {"max_tokens": 25 * number, "ignore_eos": True}, lambda answer, last: None)
        service.loop.run_until_idle()
    assert service.loop.stats.reused_tokens > 0
    return proposals


def test_eagle_draft_is_reported_checked_and_planned(built: Built, pair: Pair) -> None:
    report, version = built.report, built.version
    assert check(version.parents[1]) == []
    assert report.draft is not None
    assert report.draft["checkpoint"]["source"] == "eagle"
    assert report.draft["served"]["name"] == str(report.chosen).removesuffix(", int8 cache"), "its own cache is fp32"
    assert report.draft["served"]["quality"] > 0.5
    files = {name for name in report.files["writes"] if name.startswith(f"1/{DRAFT}/")}
    assert files == {f"1/{DRAFT}/model.onnx", f"1/{DRAFT}/serving.json"}
    assert f"1/generation/executors/{built.engine}_hidden_states.py" in report.files["writes"]
    serving, size = load_generation(version / DRAFT), pair.model.config.hidden_size
    assert (serving.arena.slots, serving.arena.length, serving.hidden_size) == (4, LENGTH, size)
    layer = serving.arena.layers[0]
    cache = 4 * LENGTH * 2 * layer.heads * layer.size * 4
    assert report.memory is not None
    assert report.memory["draft"] == cache + SLOTS * LENGTH * size * 4 + report.draft["served"]["size"]
    if built.engine == "openvino":
        assert (serving.arena.blocks, serving.session.entries["KV_CACHE_PRECISION"]) == (4 * LENGTH // BLOCK, "f32")
    assert published(version.parents[1], "writes").draft == report.memory["draft"]
    products = {node.op_type for node in onnx.load(str(version / DRAFT / "model.onnx")).graph.node}
    assert ("MatMulIntegerToFloat" in products) == (report.chosen == "int8")
    outputs = [output.name for output in onnx.load(str(version / "model.onnx")).graph.output]
    assert outputs.count(HIDDEN_STATES) == 1


def test_plan_before_a_build_counts_the_eagle_draft(pair: Pair, tmp_path: Path) -> None:
    needs = needs_of(pair.spec(tmp_path))
    size = pair.model.config.hidden_size
    weights = sum(
        value.numel()
        for name, value in load_file(pair.draft / "model.safetensors").items()
        if name not in ("fc.weight", "d2t", "t2d")
    )
    weights += pair.model.get_input_embeddings().weight.numel()
    assert needs.draft == 4 * weights + 4 * LENGTH * 2 * 2 * 8 * 4 + SLOTS * LENGTH * size * 4
    assert needs_of(pair.spec(tmp_path, cache="int8")).draft == needs.draft, "its own cache is fp32"


def test_export_key_depends_on_a_draft_that_reads_hidden_states(pair: Pair, tmp_path: Path) -> None:
    """The draft's layers and projection are in the target's graph; of a decoder as draft it has nothing."""
    small = make_decoder_checkpoint(tmp_path / "small", "llama")
    other = pair.copied(tmp_path / "other", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    plain = make_spec(model=str(pair.target), name="writes", max_length=LENGTH, slots=SLOTS, output=tmp_path)
    exports = [stage_keys(spec)["export"] for spec in (plain, *(pair.spec(tmp_path, d) for d in (small, None, other)))]
    assert exports[0] == exports[1]
    assert len(set(exports[1:])) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 99}, r"--draft .*: .* for a vocabulary of 99 tokens; the model has \d+"),
        ({"num_hidden_layers": 2}, "of 2 layers; expected one"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "reads the inputs of 3 layers, here 2, 3, 6; .* 6 layers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "reads the inputs of 3 layers, here 2, 3;"),
        ({"eagle_aux_hidden_state_layer_ids": ["a", 2, 3]}, "reads the inputs of 3 layers, here a, 2, 3;"),
        ({"draft_vocab_size": 7}, "d2t of .* has .* expected 7"),
        ({"hidden_size": 48}, r"has the shape .*: the draft was trained for another one"),
        ({"attention_bias": True}, "has no weight layers.0.self_attn.k_proj.bias"),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, "layer of the type qwen3; expected llama"),
        ({"transformer_layer_config": [1]}, r"transformer_layer_config is '\[1\]'; expected a mapping"),
    ],
)
def test_eagle_draft_of_another_model_is_refused(
    settings: dict[str, Any], message: str, pair: Pair, tmp_path: Path
) -> None:
    draft = pair.copied(tmp_path / "draft", **settings)
    with pytest.raises(CheckpointError, match=message):
        build(pair.spec(tmp_path / "repository", draft))
    assert not (tmp_path / "repository" / "writes").exists()


def test_eagle_draft_with_unknown_or_pickled_weights_is_refused(pair: Pair, tmp_path: Path) -> None:
    draft = pair.copied(tmp_path / "draft")
    weights = load_file(draft / "model.safetensors")
    save_file({**weights, "layers.1.mlp.up_proj.weight": torch.zeros(2)}, draft / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a weight layers\.1\.mlp\.up_proj\.weight, which is not known here"):
        build(pair.spec(tmp_path / "repository", draft))
    (draft / "model.safetensors").rename(draft / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only as a pickle"):
        build(pair.spec(tmp_path / "repository", draft))


def test_eagle_draft_is_refused_for_its_memory_and_for_states(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"hidden states that it reads, need .* GB"):
        build(pair.spec(tmp_path, machine={"memory_gb": 0.00085}))
    states = make_decoder_checkpoint(tmp_path / "states", "lfm2")
    with pytest.raises(SpecError, match="layers of lfm2 keep a state"):
        build(make_spec(model=str(states), draft=str(pair.draft), max_length=LENGTH, output=tmp_path / "repository"))
