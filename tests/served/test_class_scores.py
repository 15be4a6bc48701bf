"""Scores of all classes, as NVIDIA Dynamo and Triton's own classification read them."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as triton

from builder.serving.server.triton import TritonServer
from tests.models import SERVED

TEXTS = ["The museum opens late", "A recipe"]


def test_class_scores_are_in_the_order_of_the_labels(server: TritonServer) -> None:
    """Compare them, and Triton's own classification of them, with the front's labels and scores."""
    labels = SERVED["flags"].labels
    assert labels is not None
    inputs = [triton.InferInput("text_input", [2, 1], "BYTES"), triton.InferInput("top_k", [2, 1], "INT32")]
    inputs[0].set_data_from_numpy(np.array([[text.encode()] for text in TEXTS], object))
    inputs[1].set_data_from_numpy(np.full((2, 1), len(labels), np.int32))
    with triton.InferenceServerClient(server.url) as direct:
        answer = direct.infer("flags", inputs)
        named = direct.infer("flags", inputs, outputs=[triton.InferRequestedOutput("class_scores", class_count=3)])
    scores = answer.as_numpy("class_scores")
    order = np.argsort(-scores, axis=-1)
    best = [[labels[int(index)] for index in row] for row in order]
    assert [[label.decode() for label in row] for row in answer.as_numpy("label")] == best
    np.testing.assert_array_equal(answer.as_numpy("score"), np.take_along_axis(scores, order, axis=-1))
    for row, texts, indices in zip(scores, named.as_numpy("class_scores"), order, strict=True):
        assert [text.decode() for text in texts] == [f"{row[i]:.6f}:{i}:{labels[int(i)]}" for i in indices]
