"""The names that transformers' models offer are found in one search instead of two."""

from __future__ import annotations

from transformers.utils import import_utils

from builder.checkpoints.offered import MODELS, load_models, offered


def test_offered_models_equal_a_second_search() -> None:
    look = import_utils.define_import_structure
    assert offered() == look.__wrapped__(str(MODELS / "__init__.py"))
    load_models()
    assert import_utils.define_import_structure is look, "it is put back"
