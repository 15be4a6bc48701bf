"""The checks of tests/served, on Triton's own C++ backends: `BACKENDS=folder scripts/test tests/stock`."""

from __future__ import annotations

import os

import pytest

from tests.served.test_parity import (
    reference,
    test_embeddings_are_those_of_sentence_transformers,
    test_int8_keeps_the_promised_cosine,
    test_openvino_answers_each_text_alike_alone_and_in_a_batch,
    test_served_answer_is_transformers_answer,
)

if "BACKENDS" not in os.environ:
    pytest.skip(
        "BACKENDS is not set: a folder of Triton 24.10's backend libraries, NAME/libtriton_NAME.so",
        allow_module_level=True,
    )

__all__ = [
    "reference",
    "test_embeddings_are_those_of_sentence_transformers",
    "test_int8_keeps_the_promised_cosine",
    "test_openvino_answers_each_text_alike_alone_and_in_a_batch",
    "test_served_answer_is_transformers_answer",
]
