"""Files downloaded from the Hub: all that transformers reads, and no code."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from builder.checkpoints import fetch as fetch_module
from builder.checkpoints.fetch import fetch

READ = {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "merges.txt", "spiece.model",
    "1_Pooling/config.json", "source.spm", "README.md", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
}  # fmt: skip
LEFT = {"pytorch_model.bin", "modeling_own.py", "training_args.bin", "tf_model.h5", "onnx/model.onnx"}


@pytest.mark.parametrize("weights", [True, False])
def test_fetch_downloads_the_files_that_transformers_reads(
    weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a chat template in a separate file, as transformers saves it, was not downloaded."""
    fetched: set[str] = set()

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        fetched.update(filter_repo_objects(sorted(READ | LEFT), allow_patterns=allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(fetch_module, "snapshot_download", snapshot)
    fetch("org/writer", None, weights)
    assert fetched == (READ if weights else READ - {"model.safetensors"})
