"""A trial of `tune` on a real Triton: the model under other settings, in a copy of links."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.common.errors import ServeError
from builder.serving.client.client import Client
from builder.serving.plan.needs import served_version
from builder.serving.tune.trials import serve_copy


def test_trial_serves_other_settings_without_changing_the_model(
    repository: Path, client: Callable[[str], Client]
) -> None:
    model = repository / "writes"
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    request = {"text_input": "The museum in Oslo", "max_tokens": 20, "ignore_eos": True}
    settings = {"threads": 1, "slots": 2, "serving.prefill_tokens": 16}
    with serve_copy(served_version(model), settings) as url, Client(url, "writes") as tried:
        answer = tried.ask(request)
        with pytest.raises(ServeError, match=r"at most 2\b"):
            tried.ask({**request, "num_beams": 3})
    assert answer["text_output"] == client("writes").ask(request)["text_output"]
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before
