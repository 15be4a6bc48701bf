"""The checks of tests/served, on Triton's own C++ backends: `BACKENDS=folder scripts/test tests/stock`."""

from __future__ import annotations

import os

import pytest

from tests.served.test_parity import (
    reference,
    test_embeddings_equal_sentence_transformers,
    test_int8_embeddings_stay_close_to_fp32,
    test_openvino_answers_do_not_depend_on_the_batch,
    test_served_answer_equals_transformers,
)

if "BACKENDS" not in os.environ:
    pytest.skip(
        "BACKENDS is not set: a folder of Triton 24.10's backend libraries, NAME/libtriton_NAME.so",
        allow_module_level=True,
    )

__all__ = [
    "reference",
    "test_embeddings_equal_sentence_transformers",
    "test_int8_embeddings_stay_close_to_fp32",
    "test_openvino_answers_do_not_depend_on_the_batch",
    "test_served_answer_equals_transformers",
]
