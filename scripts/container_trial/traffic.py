"""Requests to `/v1/embeddings` of gateways, each answer compared with what PyTorch answers."""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from builder.common.samples import MORE_TEXTS, TEXTS
from scripts.container_trial.engine import TrialError

MODEL = "minilm"
MIN_COSINE = 0.9999  # of fp32 on another engine
MAX_TEXTS = 8  # of a request
LONG_EVERY = 8  # requests, one has long texts alone, which fill a call
REQUEST_TIMEOUT_S = 120  # longer than a gateway waits for memory: its error says more than a timeout
LONG = " ".join(" ".join(TEXTS).split()[:200])  # nearly as many tokens as the model reads


@dataclass(frozen=True)
class Answers:
    """Vectors that PyTorch computes with a model, by their texts."""

    vectors: Mapping[str, np.ndarray]
    model: str = MODEL

    @property
    def texts(self) -> list[str]:
        return list(self.vectors)


def pytorch_answers(checkpoint: Path, model: str = MODEL) -> Answers:
    """Return the answers of sentence-transformers to the project's sample texts, and to a long one."""
    from sentence_transformers import SentenceTransformer  # loads torch

    texts = [*TEXTS, *MORE_TEXTS, LONG]
    vectors = SentenceTransformer(str(checkpoint), device="cpu").encode(texts, normalize_embeddings=True)
    return Answers(dict(zip(texts, np.asarray(vectors), strict=True)), model)


@dataclass
class Load:
    """Outcome of requests so far."""

    requests: int = 0
    failures: list[str] = field(default_factory=list)
    lowest_cosine: float = 1.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def require(self, least: int) -> None:
        """Raise TrialError unless all requests, and at least `least`, were answered as PyTorch answers."""
        if self.failures:
            raise TrialError(f"{len(self.failures)} of {self.requests} requests failed: {self.failures[0]}")
        if self.requests < least:
            raise TrialError(f"only {self.requests} requests were answered, expected {least}")
        if self.lowest_cosine < MIN_COSINE:
            raise TrialError(f"the cosine to PyTorch is {self.lowest_cosine:.6f}, expected {MIN_COSINE}")

    def __str__(self) -> str:
        return f"{self.requests} requests, 0 failed, lowest cosine to PyTorch {self.lowest_cosine:.6f}"


def ask(connection: http.client.HTTPConnection, model: str, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors of `texts`, float32 [texts, size]. Raises TrialError and OSError."""
    body = json.dumps({"model": model, "input": list(texts)})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise TrialError(f"status {response.status}: {content.decode(errors='replace')[:200]}")
    return np.array([row["embedding"] for row in json.loads(content)["data"]], np.float32)


def ask_all(host: str, port: int, answers: Answers) -> Load:
    """Return the outcome of one request for each of the texts."""
    load, connection = Load(), http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
    for text in answers.texts:
        _ask_and_compare(load, connection, answers, [text])
    connection.close()
    return load


@contextmanager
def under_load(hosts: Sequence[str], port: int, models: Sequence[Answers], clients: int) -> Iterator[Load]:
    """Keep `clients` connections busy with requests of 1 to 8 texts while the block runs.

    They share the `hosts` equally, and ask the first of the `models` most: by Zipf's law.
    """
    load, stopping = Load(), threading.Event()
    weights = [1 / rank for rank, _ in enumerate(models, 1)]

    def client(index: int) -> None:
        chance = random.Random(index)
        connection = http.client.HTTPConnection(hosts[index % len(hosts)], port, timeout=REQUEST_TIMEOUT_S)
        for position in itertools.count(index, clients + 1):
            if stopping.is_set():
                break
            (answers,) = chance.choices(models, weights)
            _ask_and_compare(load, connection, answers, texts_of_request(answers, position))
        connection.close()

    threads = [threading.Thread(target=client, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def texts_of_request(answers: Answers, number: int) -> list[str]:
    """Return the texts of a request; the last one of `answers` is the longest."""
    if number % LONG_EVERY == 0:
        return [answers.texts[-1]] * MAX_TEXTS
    return [answers.texts[(number + i) % len(answers.texts)] for i in range(1 + number % MAX_TEXTS)]


def _ask_and_compare(
    load: Load, connection: http.client.HTTPConnection, answers: Answers, texts: Sequence[str]
) -> None:
    failure, cosine, began = None, 1.0, time.monotonic()
    try:
        vectors = ask(connection, answers.model, texts)
        cosine = float(min(np.sum(vectors * [answers.vectors[text] for text in texts], axis=1)))
    except (TrialError, OSError, http.client.HTTPException, ValueError) as error:
        failure = f"{answers.model} after {time.monotonic() - began:.0f} s: {type(error).__name__}: {error}"
        connection.close()
    with load.lock:
        load.requests += 1
        load.failures += [failure] if failure else []
        load.lowest_cosine = min(load.lowest_cosine, cosine)
