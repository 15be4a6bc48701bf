"""16-bit checkpoints are loaded in fp32 from mapped files, whose pages can be released."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from builder.checkpoints.mapped import give_back, widened
from builder.common.errors import RepositoryError
from builder.common.workplace import PREFIX
from tests.decoders import make_decoder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_converts_only_16_bit_floats_to_fp32(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read in chunks, the last of which is smaller."""
    monkeypatch.setattr("builder.checkpoints.mapped.PIECE", 1000)
    make_decoder("llama").to(dtype).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {**load_file(file), "odd": torch.arange(3, dtype=torch.uint8), "none": torch.zeros((0, 2), dtype=dtype)}
    save_file(stored, file, {"format": "pt"})
    with widened(tmp_path, [file]) as folder:
        wide = load_file(folder / file.name)
        assert {path.name for path in folder.iterdir()} == {path.name for path in tmp_path.iterdir()}
    assert not folder.exists()
    assert wide.keys() == stored.keys()
    for name, tensor in stored.items():
        assert wide[name].dtype == (torch.uint8 if name == "odd" else torch.float32)
        assert torch.equal(wide[name], tensor.to(wide[name].dtype))


def test_widened_converts_a_sharded_checkpoint(tmp_path: Path) -> None:
    """The index of the shards still finds every tensor."""
    model = make_decoder("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    with widened(tmp_path, shards) as folder:
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert len(shards) == len([*folder.glob("*.safetensors")]) > 1
    wide = loaded.state_dict()
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in model.state_dict().items())


def test_widened_refuses_a_full_disk_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_decoder("llama").to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    file, disk = tmp_path / "narrow" / "model.safetensors", tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    usage = SimpleNamespace(free=int(1.5 * file.stat().st_size))
    monkeypatch.setattr("builder.common.workplace.shutil.disk_usage", lambda place: usage)
    refused = pytest.raises(RepositoryError, match=r"the weights in fp32 .* as much again\) take about 0\.0 GB")
    with refused, widened(file.parent, [file]):
        pass
    assert list(disk.iterdir()) == []
    usage.free = 2 * file.stat().st_size
    with widened(file.parent, [file]) as folder:
        assert folder.parent == disk
        assert folder.name.startswith(PREFIX), "the next build takes it away where this one is killed"


def test_widened_reads_an_fp32_checkpoint_in_place(tmp_path: Path) -> None:
    make_decoder("llama").save_pretrained(tmp_path)
    with widened(tmp_path, list(tmp_path.glob("*.safetensors"))) as folder:
        assert folder == tmp_path


@pytest.mark.parametrize("changed", [False, True])
def test_weights_are_unchanged_after_their_pages_are_given_back(changed: bool, tmp_path: Path) -> None:
    """Weights that were modified after loading are not in the file."""
    make_decoder("llama", hidden_size=64).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    if changed:
        with torch.no_grad():
            model.lm_head.weight.add_(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    give_back(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_changed_weights_in_swap_are_not_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: changed pages that are swapped out do not count as anonymous memory."""
    make_decoder("llama", hidden_size=64).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    before = model.lm_head.weight.clone()
    regions = psutil.Process().memory_maps(grouped=False)
    swapped = [region._replace(anonymous=0, swap=region.anonymous) for region in regions]
    monkeypatch.setattr(psutil.Process, "memory_maps", lambda process, grouped: swapped)
    give_back(model)
    assert torch.equal(model.lm_head.weight, before)
