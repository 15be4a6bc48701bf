"""serving.json round-trips, and other documents are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.runtime.contract import (
    FILE,
    SCHEMA,
    Batching,
    Chat,
    ContractError,
    Decay,
    EncoderInput,
    GenerationServing,
    Language,
    LayerShape,
    OpenVinoSession,
    Session,
    TokenBias,
    TokenRules,
    dump,
    load,
    load_encoder,
    load_generation,
)
from tests.servings import decoder_serving, encoder_serving

RULES = TokenRules(((4, 5),), (TokenBias((3,), -2.5),), (7,), (8,), Decay(4, 1.5), (1,))
LANGUAGES = {"en_XX": Language((9,), (2,), 9)}
SOURCE = EncoderInput(30, (LayerShape(2, 8),), "encoder.onnx", 64, 2, 5, languages=LANGUAGES, pairs={"a to b": ""})


@pytest.mark.parametrize(
    "serving",
    [
        encoder_serving(),
        encoder_serving(truncation_side="left", batching=Batching(64, 8, 4, ((8, 16), (1, 32)), "length")),
        encoder_serving(executor="onnxruntime", engine=None, model="model.onnx", session=Session(threads=2)),
        encoder_serving(
            executor="openvino",
            engine=None,
            model="model.xml",
            session=OpenVinoSession("bf16"),
            warm_up=({"input_ids": (5, 6)},),
        ),
        encoder_serving(batching=Batching(64, 8, 4, alike=2), not_on_cpus_with=("amx_bf16",)),
        decoder_serving(rules=RULES, chat=Chat("{{ messages }}", {"eos_token": "</s>", "additional": ["a"]})),
        decoder_serving(source=SOURCE, total_length=40),
    ],
)
def test_contract_round_trips_through_json(serving: Any, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(dump(serving), "utf-8")
    assert load(tmp_path) == serving


def changed(tmp_path: Path, **changes: Any) -> Path:
    document = {**json.loads(dump(decoder_serving())), **changes}
    (tmp_path / FILE).write_text(json.dumps({k: v for k, v in document.items() if v != "left out"}), "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": SCHEMA - 1}, rf"has schema {SCHEMA - 1} and the code beside it reads schema {SCHEMA}: .*Build the"),
        ({"schema": "left out"}, "has schema 1"),
        ({"kind": "codec"}, "of the kind 'codec'; known are encoder, generation"),
        ({"slots": 3}, "has an unknown field 'slots'"),
        ({"vocabulary": "left out"}, "lacks the field 'vocabulary'"),
        ({"vocabulary": "many"}, "serving.json.vocabulary is 'many'; expected int"),
        ({"prefix_cache": 1}, "serving.json.prefix_cache is 1; expected bool"),
        ({"executor": "handles"}, "serving.json.executor is 'handles'"),
        (
            {"arena": {"slots": 2, "length": 8, "dtype": "float64", "layers": []}},
            "serving.json.arena.dtype is 'float64'",
        ),
        ({"end_ids": ["a"]}, r"serving.json.end_ids\[0\] is 'a'; expected int"),
    ],
)
def test_contract_refuses_a_document_that_does_not_fit(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=message):
        load_generation(changed(tmp_path, **changes))


def test_contract_refuses_damaged_files_and_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / FILE).write_text("{", "utf-8")
    with pytest.raises(ContractError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / FILE).write_text("[]", "utf-8")
    with pytest.raises(ContractError, match="schema None"):
        load(tmp_path)
    with pytest.raises(ContractError, match="expected one of an encoder"):
        load_encoder(changed(tmp_path))
    assert isinstance(load(changed(tmp_path)), GenerationServing)
    (tmp_path / FILE).write_text(dump(replace(encoder_serving(), max_length=9)), "utf-8")
    with pytest.raises(ContractError, match="expected one of a model that generates"):
        load_generation(tmp_path)
