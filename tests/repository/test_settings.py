"""Settings changed without a build equal, byte for byte, those of a build with these options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import RepositoryError, SpecError
from builder.options import make_spec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.config.render import CONFIG, render
from builder.repository.layout.encoder import lay_out, serving_document
from builder.repository.settings import read_settings, with_settings
from builder.runtime.contract import Arena, EncoderInput, dump
from builder.runtime.fields import Field
from tests.golden.repositories import graph
from tests.servings import decoder_serving


def _entry(**options: Any) -> RepositoryEntry:
    """Return an encoder's front in the layout of a build."""
    spec = make_spec(model="org/encoder", machine={"cores": 4}, **options)
    served = graph(options.get("engine", "onnxruntime"))
    serving = serving_document(spec, "feature_extraction", served, 256, {"input_ids": 0}, {})
    fields = [Field("text_input", "TYPE_STRING")], [Field("embedding", "TYPE_FP32", (384,))]
    return lay_out(spec, serving, "{}", served, {}, fields, [])[0]


def _written(folder: Path, entry: RepositoryEntry) -> Path:
    """Write the configuration and the serving.json into a folder as published; return the version's folder."""
    (folder / "1").mkdir()
    (folder / CONFIG).write_text(render(entry.config))
    serving = entry.files["1/serving.json"]
    assert isinstance(serving, bytes)
    (folder / "1" / "serving.json").write_bytes(serving)
    return folder / "1"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": "openvino", "precision": "bf16"},
        {"serving": {"rate_limiter": [{"name": "memory", "count": 7}], "queue": {"max_size": 9}}},
    ],
)
def test_encoder_settings_equal_those_of_a_build(options: dict[str, Any], tmp_path: Path) -> None:
    version = _written(tmp_path, _entry(**options))
    settings = {
        "instances": 2,
        "threads": 2,
        "max_batch_size": 24,
        "max_queue_delay_us": 700,
        "serving.token_budget": 4096,
        "serving.call_cost": 32,
    }
    serving = {**options.get("serving", {}), "token_budget": 4096, "call_cost": 32}
    wanted = _entry(
        **{**options, "serving": serving}, instances=2, threads=2, max_batch_size=24, max_queue_delay_us=700
    )
    changed = with_settings(version, settings)
    assert changed[CONFIG].decode() == render(wanted.config)
    assert changed["1/serving.json"] == wanted.files["1/serving.json"]
    for name, content in changed.items():
        (tmp_path / name).write_bytes(content)
    assert read_settings(version) == settings


def test_no_settings_change_nothing(tmp_path: Path) -> None:
    version = _written(tmp_path, _entry())
    assert all((tmp_path / name).read_bytes() == content for name, content in with_settings(version, {}).items())


def test_token_budget_fits_at_least_one_text(tmp_path: Path) -> None:
    version = _written(tmp_path, _entry())
    changed = with_settings(version, {"serving.token_budget": 16})
    assert changed["1/serving.json"] == _entry(serving={"token_budget": 16}).files["1/serving.json"]


def _decoder(folder: Path, **changes: Any) -> Path:
    (folder / "1").mkdir()
    (folder / CONFIG).write_text('name: "writes"\nbackend: "python"\nmax_batch_size: 0\n')
    serving = decoder_serving(executor="in-process", **changes)
    (folder / "1" / "serving.json").write_text(dump(serving))
    return folder / "1"


def test_decoder_has_as_many_beams_as_slots_by_default(tmp_path: Path) -> None:
    version = _decoder(tmp_path, beams=2)
    settings = {"threads": 3, "slots": 8, "serving.prefill_tokens": 64, "serving.queue.max_size": 40}
    changed = with_settings(version, settings)
    arena = replace(decoder_serving().arena, slots=8)
    session = replace(decoder_serving().session, threads=3)
    wanted = decoder_serving(executor="in-process", beams=8, arena=arena, session=session, prefill_tokens=64, queue=40)
    assert changed["1/serving.json"].decode() == dump(wanted)
    (tmp_path / "1" / "serving.json").write_bytes(changed["1/serving.json"])
    assert read_settings(version) == settings


def test_settings_that_need_a_build_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("encoder", "bls", "decoder", "paged", "reads"):
        (tmp_path / name).mkdir()
    encoder = _written(tmp_path / "encoder", _entry(serving={"preferred_batch_sizes": [16]}))
    with pytest.raises(SpecError, match=r"precision needs a build; without one, instances, threads"):
        with_settings(encoder, {"precision": 8})
    with pytest.raises(SpecError, match="preferred batch size 16 exceeds max_batch_size 8"):
        with_settings(encoder, {"max_batch_size": 8})
    with pytest.raises(SpecError, match="its engine is a Triton model of its own"):
        read_settings(_written(tmp_path / "bls", _entry(executor="bls")))
    source = EncoderInput(max_length=32, layers=(), encoder="encoder.onnx", token_budget=64, start=0)
    with pytest.raises(SpecError, match="a search of 4 beams needs as many slots, and 2 are asked for"):
        with_settings(_decoder(tmp_path / "reads", beams=4, source=source), {"slots": 2})
    blocks = Arena(slots=2, length=64, dtype="float32", layers=(), blocks=8)
    with pytest.raises(SpecError, match="slots that share the blocks of a cache need a build"):
        with_settings(_decoder(tmp_path / "paged", arena=blocks), {"slots": 4})
    config = tmp_path / "encoder" / CONFIG
    config.write_text(config.read_text() + "instance_group {\n  count: 2\n}\n")
    with pytest.raises(RepositoryError, match="has 2 lines for instances"):
        with_settings(encoder, {"instances": 2})


def test_damaged_serving_document_is_an_error_of_the_repository(tmp_path: Path) -> None:
    """Regression: `build-repo tune` ended in a traceback."""
    version = _written(tmp_path, _entry())
    (version / "serving.json").write_text("{")
    with pytest.raises(RepositoryError, match=r"serving\.json"):
        read_settings(version)
