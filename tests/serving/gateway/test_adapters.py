"""Adapters of a model in the gateway: named as MODEL:ADAPTER, and listed with the models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from builder.repository.config.render import CONFIG
from builder.runtime.adapter_files import ADAPTER
from builder.runtime.fields import Field
from builder.runtime.generation.options import OUTPUTS, PROMPT_OUTPUTS
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.residency.repository_models import RepositoryModels
from builder.serving.gateway.served_model import ServedModel
from tests.serving.gateway.fake_triton import GUIDED, MODELS, OPTIONS, FakeTriton
from tests.serving.gateway.requests import fetch, gateway

MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
}


@pytest.fixture(autouse=True)
def _adapted_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in have models that take adapters: one that generates, an embedder, and a classifier."""
    fields = (*OPTIONS, ADAPTER), (*OUTPUTS, *PROMPT_OUTPUTS)
    monkeypatch.setitem(MODELS, "adapted", ("text-generation", *fields, GUIDED))
    task, inputs, outputs, parameters = MODELS["embeds"]
    monkeypatch.setitem(MODELS, "tuned", (task, (*inputs, ADAPTER), outputs, parameters))
    task, inputs, outputs, parameters = MODELS["topics"]
    own = Field("class_scores", "TYPE_FP32", (-1,))
    monkeypatch.setitem(MODELS, "moods", (task, (*inputs, ADAPTER), (*outputs, own), parameters))


@pytest.fixture
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.mark.parametrize("path", BODIES)
def test_model_name_selects_the_adapter(triton: FakeTriton, path: str) -> None:
    app = gateway(triton)
    answer = fetch(path, {"model": "adapted:sql", **BODIES[path]}, app)
    assert (answer.status, answer.json["model"]) == (200, "adapted:sql")
    assert triton.requests.pop()["lora_name"] == ["sql"]
    answer = fetch(path, {"model": "adapted", **BODIES[path]}, app)
    assert (answer.status, answer.json["model"]) == (200, "adapted")
    assert "lora_name" not in triton.requests.pop()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/v2/embed", {"texts": ["one"], "input_type": "search_query", "embedding_types": ["float"]}),
        ("/embed", {"inputs": "one"}),
        ("/pooling", {"input": "one"}),
    ],
)
def test_model_name_selects_the_adapter_of_an_embedder(triton: FakeTriton, path: str, body: dict[str, Any]) -> None:
    app = gateway(triton)
    answer = fetch(path, {"model": "tuned:sql", **body}, app)
    assert answer.status == 200, answer.json
    sent = triton.requests.pop()
    assert sent["lora_name"] == [["sql"]] * len(sent["text_input"])
    assert "model" not in answer.json or answer.json["model"] == "tuned:sql"
    assert fetch(path, {"model": "tuned", **body}, app).status == 200
    assert "lora_name" not in triton.requests.pop()


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/classify", {"input": "one"}, {"label": "z", "probs": [0.25, 0.75], "num_classes": 2}),
        ("/pooling", {"input": "one"}, {"data": [0.25, 0.75]}),
        ("/predict", {"inputs": "one"}, [{"label": "z", "score": 0.75}, {"label": "y", "score": 0.25}]),
        (
            "/v1/tasks/text-classification",
            {"inputs": "one"},
            [[{"label": "z", "score": 0.75}, {"label": "y", "score": 0.25}]],
        ),
    ],
)
def test_adapter_of_a_classifier_answers_with_its_own_labels(
    triton: FakeTriton, path: str, body: dict[str, Any], expected: Any
) -> None:
    """Probabilities are in the order of its labels, which the parameters of the model do not have."""
    answer = fetch(path, {"model": "moods:sql", **body}, gateway(triton))
    assert answer.status == 200, answer.json
    assert triton.requests.pop()["lora_name"] == [["sql"]]
    (one,) = answer.json["data"] if isinstance(expected, dict) else [answer.json]
    assert one == expected if isinstance(expected, list) else expected.items() <= one.items()


def test_unknown_adapter_of_an_embedder_is_an_unknown_model(triton: FakeTriton) -> None:
    body = {"model": "tuned:other", "input": ["a"] * 20}  # more than one request to the model
    refused = fetch("/v1/embeddings", body, gateway(triton))
    assert (refused.status, refused.error["code"], refused.error["param"]) == (404, "model_not_found", "model")
    assert "it has poems, sql" in refused.error["message"]


def test_adapters_are_listed_after_their_model(triton: FakeTriton) -> None:
    app = gateway(triton)
    listed = {model["id"]: model["parent"] for model in fetch("/v1/models", app=app).json["data"]}
    names = list(listed)
    at = names.index("adapted")
    assert names[at : at + 3] == ["adapted", "adapted:poems", "adapted:sql"]
    assert {name: parent for name, parent in listed.items() if parent} == {
        f"{model}:{adapter}": model for model in ("adapted", "tuned", "moods") for adapter in ("poems", "sql")
    }
    assert fetch("/v1/models/adapted:sql", app=app).json["parent"] == "adapted"
    labels = [fetch(f"/v1/models/{name}", app=app).json["labels"] for name in ("moods", "moods:sql")]
    assert labels == [["a", "b"], []], "Regression: an adapter was listed with its model's labels"
    triton.adapter_names = ["new"]
    assert fetch("/v1/models/adapted:new", app=app).json["id"] == "adapted:new"
    unknown = fetch("/v1/models/adapted:sql", app=app)
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert "adapted:new" in unknown.error["message"]


def test_models_are_listed_if_one_does_not_tell_its_adapters(
    triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unable(model: ServedModel) -> list[str]:
        raise ApiError(504, f"{model.name} does not list its adapters")

    monkeypatch.setattr(triton, "adapters", unable)
    names = [model["id"] for model in fetch("/v1/models", app=gateway(triton)).json["data"]]
    assert "adapted" in names
    assert not any(":" in name for name in names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adapted:other", "it has poems, sql"),
        ("guided:sql", "guided was built without --adapters"),
        ("adapted:", "'' is not the name of an adapter"),
        ("adapted:*", "'*' is not the name of an adapter"),
        ("nothing:sql", "the model 'nothing' does not exist"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_adapters_are_unknown_models(triton: FakeTriton, name: str, message: str, stream: bool) -> None:
    body = {"model": name, **BODIES["/v1/completions"], "stream": stream}
    refused = fetch("/v1/completions", body, gateway(triton))
    assert (refused.status, refused.error["code"], refused.error["param"]) == (404, "model_not_found", "model")
    assert message in refused.error["message"]


def test_field_of_a_request_names_the_adapter_too(triton: FakeTriton) -> None:
    app, body = gateway(triton), {**BODIES["/v1/completions"], "lora_name": "sql"}
    assert fetch("/v1/completions", {"model": "adapted", **body}, app).status == 200
    assert triton.requests.pop()["lora_name"] == ["sql"]
    assert fetch("/v1/completions", {"model": "adapted:sql", **body}, app).status == 200
    two = fetch("/v1/completions", {"model": "adapted:poems", **body}, app)
    assert (two.status, two.error["param"]) == (400, "lora_name")


@pytest.mark.parametrize(
    "body", [{"inputs": "a", "lora_name": "sql"}, {"inputs": [{"text_input": "a", "lora_name": "sql"}]}]
)
def test_field_of_a_request_names_the_adapter_of_an_embedder_too(triton: FakeTriton, body: dict[str, Any]) -> None:
    """Regression: the adapter of the model's name silently replaced that of the field."""
    app, path = gateway(triton), "/v1/tasks/feature-extraction"
    for model in ("tuned", "tuned:sql"):
        assert fetch(path, {"model": model, **body}, app).status == 200
        assert triton.requests.pop()["lora_name"] == [["sql"]]
    two = fetch(path, {"model": "tuned:poems", **body}, app)
    assert (two.status, two.error["param"]) == (400, "lora_name")


def test_repository_lists_adapters_of_models_that_are_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "adapters").mkdir(parents=True)
    (folder / "1").mkdir()
    (folder / CONFIG).write_text(
        'name: "m" backend: "python" parameters { key: "task" value { string_value: "text-generation" } } '
        'input { name: "lora_name" data_type: TYPE_STRING dims: [ 1 ] optional: true }'
    )
    for name in ("b.npz", "a.npz", "notes.txt"):
        (folder / "adapters" / name).touch()
    models = RepositoryModels(tmp_path)
    assert asyncio.run(models.adapter_names(asyncio.run(models.get("m")))) == ["a", "b"]
