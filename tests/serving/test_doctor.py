"""`build-repo doctor`: what is found on a machine, what is advised, what stops a build."""

from __future__ import annotations

import shutil
import socket
from importlib import util
from importlib.metadata import version
from pathlib import Path

import pytest
from huggingface_hub import constants

from builder.cli import main
from builder.common.cards import GpuModel
from builder.serving.doctor import folders, hub, machine, software


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the examination off the network and this user's caches."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("BUILD_REPO_CACHE", str(tmp_path / "cache"))


def test_doctor_succeeds_where_a_build_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--repository", str(tmp_path / "models")]) == 0
    shown = capsys.readouterr().out
    assert f"ONNX Runtime     {version('onnxruntime')}" in shown
    assert "24.10, which build-repo serve starts" in shown, "the embedded Triton was run"


def test_doctor_fails_for_a_folder_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert main(["doctor", "--repository", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "a build has no room" in shown.out
    assert "no build works until this is mended: repository, temporary files\n" in shown.err


def test_doctor_stops_for_a_requirement_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not software.find_software().stops
    monkeypatch.setattr(software, "version", lambda name: "0.1" if name == "onnx" else version(name))
    found = software.find_software()
    assert found.stops
    assert "onnx <1.24,>=1.23 (found 0.1)" in found.found
    assert "install it again: pip install" in found.advice
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    assert "install it again: uv pip install" in software.find_software().advice, "Regression: it named pip without pip"


def test_extra_whose_requirement_is_not_met_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        software.find_extras().found == "azure, evaluate, gateway, gcs, limits, openvino, ray, s3, sign, stores, tune"
    )
    monkeypatch.setattr(software, "version", lambda name: "0.1" if name == "gcsfs" else version(name))
    assert "azure, evaluate, gateway, limits, openvino, ray, s3, sign, tune; not installed: gcs, stores" in (
        software.find_extras().found
    )
    assert software.unmet_requirements() == [], "the project itself does not need it"


def test_hub_that_does_not_answer_is_advice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    found = hub.find_hub()
    assert "does not answer (<urlopen error [Errno 111]" in found.found
    assert "HTTPS_PROXY" in found.advice
    assert not found.stops


def test_gpu_without_cuda_provider_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.subject for one in machine.find_gpus()] == ["GPU"]
    monkeypatch.setattr(machine, "gpus", lambda: (GpuModel("NVIDIA L4", "8.9", 23034),))
    monkeypatch.setattr(machine, "driver_version", lambda: "580.82")
    (found,) = machine.find_gpus()
    assert found.found == "NVIDIA L4, 22 GiB, compute capability 8.9, driver 580.82"
    assert "pip install" in found.advice
    assert "[gpu]" in found.advice
    monkeypatch.setattr(machine, "unmet_requirements", lambda extra: [])
    monkeypatch.setattr(machine, "version", lambda name: "1.31.1")
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    (found,) = machine.find_gpus()
    expected = "uv pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.1"
    assert expected in found.advice, "Regression: it named pip without pip"


@pytest.mark.parametrize(("flags", "needs_advice"), [(["avx2"], True), (["avx2", "avx_vnni"], False)])
def test_processor_is_judged_by_its_instructions(
    flags: list[str], needs_advice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.common.machine.cpu", lambda: {"model": "CPU", "flags": flags})
    assert ("VNNI" in machine.find_processor().advice) is needs_advice


def test_wrong_cache_limit_stops_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_REPO_CACHE_GB", "much")
    *_, found = folders.find_folders(tmp_path)
    assert found.stops
    assert "BUILD_REPO_CACHE_GB is 'much'" in found.advice
