"""Adapters of encoders on a real Triton and through its gateway, added and removed while both run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoModel, AutoModelForSequenceClassification

from builder.building.adapters import add_adapter
from builder.building.pipeline import build
from builder.commands.load_test import model_samples
from builder.common.errors import SpecError
from builder.options import make_spec
from builder.repository.adapters import remove_adapter
from builder.runtime.encoder.front import open_front
from builder.serving.client.client import Client
from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from tests.lora import save_lora
from tests.tiny_encoders import make_checkpoint

TEXTS = ("How do I renew my passport?", "The soup needs salt.")


def test_gateway_embeds_with_adapters_that_change_meanwhile(module_folder: Callable[[str], Path]) -> None:
    folder = module_folder("served-adapters")
    checkpoint, repository = make_checkpoint(folder / "checkpoint", "bert", "feature-extraction"), folder / "repository"
    options = {"pooling": "mean", "adapters": 2, "adapter_rank": 4}
    build(make_spec(model=str(checkpoint), name="m", output=repository, **options))
    model = AutoModel.from_pretrained(checkpoint)
    port = free_ports().http
    with (
        running(repository) as server,
        gateway(server.url, "127.0.0.1", port),
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as api,
    ):

        def listed() -> set[str]:
            return {model.id for model in api.models.list()}

        def embedded(adapter: str) -> np.ndarray:
            answer = api.embeddings.create(model=f"m:{adapter}" if adapter else "m", input=list(TEXTS))
            assert answer.model == (f"m:{adapter}" if adapter else "m")
            return np.array([one.embedding for one in answer.data])

        assert listed() == {"m"}
        for seed, name in enumerate(("a", "b", "c")):
            saved = save_lora(folder / name, model, ("query", "value"), seed=seed)
            add_adapter(repository, "m", name, str(saved), str(checkpoint))
        assert listed() == {"m", "m:a", "m:b", "m:c"}
        assert api.models.retrieve("m:b").id == "m:b"
        front = open_front(repository / "m" / "1")
        expected = {}
        for name in ("", "a", "b", "c"):
            tensors = {"text_input": np.array([[text] for text in TEXTS], object)}
            if name:
                tensors["lora_name"] = np.array([[name]] * len(TEXTS), object)
            (answer,) = front([tensors])
            assert isinstance(answer, dict)
            expected[name] = answer["embedding"]
        names = [*expected] * 8
        with ThreadPoolExecutor(8) as clients:  # more adapters than the stacks take, in the batches that form
            for name, vectors in zip(names, clients.map(embedded, names), strict=True):
                np.testing.assert_allclose(vectors, expected[name], rtol=0, atol=1e-5)
        remove_adapter(repository, "m", "b")
        with pytest.raises(openai.NotFoundError, match="it has a, c"):
            embedded("b")
        assert listed() == {"m", "m:a", "m:c"}


def test_gateway_classifies_and_ranks_with_adapters(module_folder: Callable[[str], Path]) -> None:
    """Each adapter has a head: with two or three labels, of a checkpoint without any, or with one that ranks.

    Regression: the default requests of load-test and promote to a model without a head named no adapter.
    """
    folder = module_folder("served-heads")
    repository, port = folder / "repository", free_ports().http
    checkpoints = {
        "moods": make_checkpoint(folder / "moods", "bert", "feature-extraction"),
        "ranks": make_checkpoint(folder / "ranks", "bert", "text-classification", num_labels=1),
    }
    options: dict[str, Any] = {"output": repository, "adapters": 1, "adapter_rank": 4}
    classifying = {"task": "text-classification", "adapter_labels": 3}
    build(make_spec(model=str(checkpoints["moods"]), name="moods", **classifying, **options))
    build(make_spec(model=str(checkpoints["ranks"]), name="ranks", task="text-ranking", **options))
    adapters = {"moods:two": 2, "moods:three": 3, "ranks:one": 1}
    with running(repository) as server, gateway(server.url, "127.0.0.1", port):

        def posted(route: str, **body: Any) -> Any:
            return httpx.post(f"http://127.0.0.1:{port}{route}", json=body).raise_for_status().json()

        def scores(model: str) -> Any:
            if model.startswith("moods"):
                return [one["probs"] for one in posted("/classify", model=model, input=TEXTS)["data"]]
            ranked = posted("/rerank", model=model, query=TEXTS[0], texts=TEXTS)
            return [one["score"] for one in sorted(ranked, key=lambda one: one["index"])]

        with pytest.raises(SpecError, match="moods answers only with adapters, and has none"):
            model_samples(server.url, "moods", None)
        expected = {}
        for seed, (label, labels) in enumerate(adapters.items()):
            name, _, adapter = label.partition(":")
            model = AutoModelForSequenceClassification.from_pretrained(checkpoints[name])
            saved = save_lora(folder / adapter, model, ("query", "value"), seed=seed, labels=labels)
            add_adapter(repository, name, adapter, str(saved), str(checkpoints[name]))
            tensors = {"lora_name": np.array([[adapter]] * len(TEXTS), object)}
            if name == "moods":
                tensors["text_input"] = np.array([[text] for text in TEXTS], object)
            else:
                tensors |= {"query": np.array([[TEXTS[0]]], object), "documents": np.array([TEXTS], object)}
            (answer,) = open_front(repository / name / "1")([tensors])
            assert isinstance(answer, dict)
            expected[label] = answer["class_scores"] if name == "moods" else answer["score"][0]
            assert expected[label].shape == ((len(TEXTS), labels) if name == "moods" else (len(TEXTS),))
        samples = model_samples(server.url, "moods", None)
        assert {sample["lora_name"] for sample in samples} == {"three"}
        with Client(server.url, "moods") as client:
            assert client.ask(samples[0])["label"][0].startswith("LABEL_")
        listed = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
        assert {one["id"] for one in listed} == {"moods", "ranks", *adapters}
        with ThreadPoolExecutor(8) as clients:
            for label, actual in zip([*adapters] * 4, clients.map(scores, [*adapters] * 4), strict=True):
                np.testing.assert_allclose(actual, expected[label], rtol=0, atol=1e-5)
        remove_adapter(repository, "moods", "two")
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            scores("moods:two")
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            scores("moods")
