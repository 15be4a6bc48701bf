"""The models of a shared front, as the gateway finds them in a repository folder that it loads models of."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from builder.runtime.hosted import HOSTED, HostedModel, dump_hosted
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.repository_models import RepositoryModels
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
def repository_models(tmp_path: Path) -> RepositoryModels:
    """Return two models of a shared front, and one with a front of its own."""
    make_models(tmp_path, "embeds-own")
    (tmp_path / "encoders" / "1").mkdir(parents=True)
    (tmp_path / "encoders" / "config.pbtxt").write_text(CONFIG)
    _host(tmp_path, one=_entry(1), two=_entry(3, prompt_name=True))
    return RepositoryModels(tmp_path)


def test_hosted_models_are_listed_without_their_front(repository_models: RepositoryModels) -> None:
    two = asyncio.run(repository_models.get("two"))
    assert (two.name, two.front, two.version, two.batch, two.max_input_length) == ("two", "encoders", "3", 4, 64)
    assert {name: field.optional for name, field in two.inputs.items()} == {"text_input": False, "prompt_name": True}
    assert two.outputs["embedding"].dims == (384,)
    assert two.is_embedder
    assert [model.name for model in asyncio.run(repository_models.all())] == ["embeds-own", "one", "two"]
    for name in ("encoders", "three", "../one"):
        with pytest.raises(ApiError, match="does not exist"):
            asyncio.run(repository_models.get(name))
    assert repository_models.configured("encoders").model is not None, "what is loaded for them"


def test_changed_hosted_json_applies_to_the_next_request(repository_models: RepositoryModels) -> None:
    asyncio.run(repository_models.all())
    _host(repository_models.repository, one=_entry(2))
    assert asyncio.run(repository_models.get("one")).version == "2"
    with pytest.raises(ApiError, match="does not exist"):
        asyncio.run(repository_models.get("two"))
    (repository_models.repository / "encoders" / "models" / HOSTED).write_text("{")
    assert [model.name for model in asyncio.run(repository_models.all())] == ["embeds-own"]
