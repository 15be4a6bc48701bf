"""Options that a card does not support are refused at build, by the table of requirements."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from builder.commands.build import parser
from builder.common.cards import CARDS
from builder.common.errors import SpecError
from builder.common.releases import GPU_WHEELS, RELEASES, GpuWheel
from builder.engines.cuda import refuse_head_sizes, refuse_wheel, refuse_windows
from builder.engines.decoding import engine_of
from builder.engines.gpu import SERVER_ON_CARD, refuse_card, refuse_size
from builder.graphs.onnx.graph import Graph
from builder.options import Gpu, make_spec
from scripts.gpu_architectures import CONTAINER, IMAGE, MAGIC, PTX, images_in


def _refuse(options: dict[str, Any]) -> None:
    spec = make_spec(model="x", **options)
    refuse_card(spec, spec.runs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu": "t4", "precision": "bf16", "target": "cuda"},
            r"bf16 on --target cuda.* needs compute capability 8\.0",
        ),
        ({"gpu": "a100", "precision": "fp8", "target": "tensorrt"}, r"capability 8\.9 .* one of l4, l40s, h100"),
        ({"gpu": "t4", "precision": "bf16", "engine": "vllm"}, r"capability 8\.0 \(vLLM"),
        ({"gpu": "v100", "target": "cuda", "triton": "25.08"}, r"needs compute capability 7\.5 \(CUDA 13\.0"),
        ({"gpu": "v100", "target": "tensorrt", "triton": "24.10"}, r"needs compute capability 7\.5 \(TensorRT"),
    ],
)
def test_refuse_card_names_the_requirement_and_its_source(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _refuse(options)


@pytest.mark.parametrize(
    "options",
    [
        {"target": "cuda", "precision": "bf16"},
        {"gpu": "t4", "target": "cuda", "precision": "fp16"},
        {"gpu": "v100", "target": "cuda", "precision": "fp16", "triton": "24.10"},
        {"gpu": "l4", "target": "tensorrt", "precision": "fp8"},
        {"gpu": {"card": "h100", "devices": [1]}, "engine": "vllm", "precision": "fp8"},
    ],
)
def test_refuse_card_accepts_supported_options_and_no_card(options: dict[str, Any]) -> None:
    _refuse(options)


def test_card_is_set_on_the_command_line_and_in_the_file() -> None:
    assert parser().parse_args(["x", "--gpu", "l4"]).gpu == "l4"
    assert make_spec(model="x", target="cuda", gpu="l4").gpu.card == "l4"
    with pytest.raises(SpecError, match=r"gpu\.card: the cards known are v100, .*found 'gtx'"):
        make_spec(model="x", target="cuda", gpu={"card": "gtx"})
    with pytest.raises(SpecError, match="`gpu:` is for --target cuda or tensorrt"):
        make_spec(model="x", gpu="l4")


def test_refuse_size_limits_memory_to_that_of_the_card() -> None:
    refuse_size(Gpu(), 10**15, "they", "use less", in_process=True)
    spec = make_spec(model="x", target="cuda", gpu="t4")
    room = int(0.9 * (15360 << 20)) - SERVER_ON_CARD
    refuse_size(spec.gpu, room - (1 << 20), "they", "use less", in_process=False)
    with pytest.raises(SpecError, match=r"the cache need 13\.8 GB and t4 has room for 13\.1 GB; use less"):
        refuse_size(spec.gpu, room - (1 << 20), "the cache", "use less", in_process=True)
    with pytest.raises(SpecError, match=r"t4 has room for 13\.8 GB"):
        refuse_size(spec.gpu, room + (2 << 20), "the cache", "use less", in_process=False)
    limited = make_spec(model="x", target="cuda", gpu={"card": "h100", "memory_limit_mb": 2048})
    with pytest.raises(SpecError, match=r"has room for 2\.1 GB"):
        refuse_size(limited.gpu, 3 << 30, "they", "use less", in_process=True)


def test_cuda_refuses_heads_and_windows_without_a_kernel(tmp_path: Path) -> None:
    refuse_head_sizes({64, 128, 256})
    for size in (20, 512):
        with pytest.raises(SpecError, match=f"its heads have {size} numbers"):
            refuse_head_sizes({64, size})
    node = helper.make_node("GroupQueryAttention", ["q"], ["o"], domain="com.microsoft", local_window_size=4)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "windows", [], [])), str(path))
    graph = Graph(path, (), (), (), opset=20, ir_version=9, operators=Counter(), size=0)
    refuse_windows("a10", graph)
    refuse_windows(None, graph)
    with pytest.raises(SpecError, match="--gpu t4: its attention has sliding windows"):
        refuse_windows("t4", graph)


def test_cards_have_memory_and_a_compute_capability() -> None:
    for card in CARDS.values():
        major, minor = card.compute_capability.split(".")
        assert 5 <= int(major) <= 12
        assert 0 <= int(minor) <= 9
        assert card.memory_mb >= 15 << 10


@pytest.mark.parametrize(
    ("triton", "refused"),
    [("26.08", {"v100": "7.0", "b200": "10.0"}), ("24.11", {"v100": "7.0", "b200": "10.0"}), ("24.10", {})],
)
def test_refuse_wheel_names_cards_without_kernels_in_process(triton: str, refused: dict[str, str]) -> None:
    """onnxruntime-gpu 1.31.1 has no kernels for them and no PTX; 1.23.2, of Python 3.10, has both."""
    for card in CARDS:
        if card in refused:
            with pytest.raises(SpecError, match=rf"compute capability {refused[card]}, and onnxruntime-gpu 1\.31\.1"):
                refuse_wheel(card, triton)
        else:
            refuse_wheel(card, triton)


def test_wheels_run_where_kernels_are_of_the_major_version() -> None:
    wheel = GpuWheel(("7.5", "8.6", "9.0"), "13", "580")
    fits = [name for name in ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0") if wheel.runs_on(name)]
    assert fits == ["7.5", "8.6", "8.9", "9.0"]
    assert replace(wheel, ptx="9.0").runs_on("10.0")
    assert not replace(wheel, ptx="9.0").runs_on("8.0")
    assert set(GPU_WHEELS) == {release.in_process for release in RELEASES.values()}


def test_decoder_for_a_card_without_kernels_is_refused() -> None:
    decoding = engine_of(make_spec(model="x", target="cuda", precision="fp16", gpu="b200"))
    with pytest.raises(SpecError, match=r"--gpu b200: this card has compute capability 10\.0"):
        decoding.refuse()
    through_backend = {"executor": "bls", "triton": "26.08"}
    engine_of(make_spec(model="x", target="cuda", precision="fp16", gpu="b200", **through_backend)).refuse()


def test_architectures_are_read_in_a_section_of_kernels() -> None:
    """Two containers with padding between them; the first has machine code for 8.0 and 8.6, the other PTX for 9.0."""

    def image(kind: int, capability: int, content: bytes) -> bytes:
        return IMAGE.pack(kind, 0x101, IMAGE.size, len(content), capability) + content

    first = image(2, 80, b"a" * 24) + image(2, 86, b"b" * 8)
    other = image(PTX, 90, b"c" * 16)
    headers = [CONTAINER.pack(MAGIC, 1, CONTAINER.size, len(images)) for images in (first, other)]
    assert images_in(headers[0] + first + bytes(16) + headers[1] + other) == {(2, 80), (2, 86), (PTX, 90)}
