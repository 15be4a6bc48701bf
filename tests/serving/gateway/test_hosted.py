"""The models of a shared front, as the gateway finds them in a repository folder that it loads models of."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from builder.runtime.contract import HOSTED, HostedModel, dump_hosted
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.offered import Offered
from tests.serving.gateway.fake_control import make_models

CONFIG = """
name: "encoders" backend: "python" max_batch_size: 8
input { name: "model" data_type: TYPE_STRING dims: [ 1 ] }
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] optional: true }
input { name: "prompt_name" data_type: TYPE_STRING dims: [ 1 ] optional: true }
output { name: "embedding" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "models" data_type: TYPE_STRING dims: [ 1 ] }
parameters { key: "task" value { string_value: "feature-extraction" } }
parameters { key: "shared" value { string_value: "true" } }
"""


def _entry(version: int, **inputs: bool) -> HostedModel:
    parameters = {"task": "feature-extraction", "max_input_length": "64"}
    return HostedModel(version, "build", {"text_input": False, **inputs}, {"embedding": (384,)}, parameters, 4)


def _host(repository: Path, **models: HostedModel) -> None:
    folder = repository / "encoders" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "written").write_text(dump_hosted(models))
    os.replace(folder / "written", folder / HOSTED)


@pytest.fixture
def offered(tmp_path: Path) -> Offered:
    """Return two models of a shared front, and one with a front of its own."""
    make_models(tmp_path, "embeds-own")
    (tmp_path / "encoders" / "1").mkdir(parents=True)
    (tmp_path / "encoders" / "config.pbtxt").write_text(CONFIG)
    _host(tmp_path, one=_entry(1), two=_entry(3, prompt_name=True))
    return Offered(tmp_path)


def test_hosted_models_are_offered_and_their_front_is_not(offered: Offered) -> None:
    two = asyncio.run(offered.get("two"))
    assert (two.name, two.front, two.version, two.batch, two.max_input_length) == ("two", "encoders", "3", 4, 64)
    assert {name: field.optional for name, field in two.inputs.items()} == {"text_input": False, "prompt_name": True}
    assert two.outputs["embedding"].dims == (384,)
    assert two.embeds
    assert [model.name for model in asyncio.run(offered.all())] == ["embeds-own", "one", "two"]
    for name in ("encoders", "three", "../one"):
        with pytest.raises(ApiError, match="does not exist"):
            asyncio.run(offered.get(name))
    assert offered.offer("encoders").model is not None, "what is loaded for them"


def test_another_list_counts_from_the_next_request_on(offered: Offered) -> None:
    asyncio.run(offered.all())
    _host(offered.repository, one=_entry(2))
    assert asyncio.run(offered.get("one")).version == "2"
    with pytest.raises(ApiError, match="does not exist"):
        asyncio.run(offered.get("two"))
    (offered.repository / "encoders" / "models" / HOSTED).write_text("{")
    assert [model.name for model in asyncio.run(offered.all())] == ["embeds-own"]
