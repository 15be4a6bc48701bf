"""On a real GPU: the memory of the card that a served model takes, beside what is planned for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from builder import Client, build, make_spec, running
from builder.common.samples import TEXTS
from builder.engines.gpu import HEADROOM, SERVER_ON_CARD
from builder.serving.plan.built import plan_built
from tests.models import minilm

pytestmark = pytest.mark.gpu
USED = ("nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def _used() -> int:
    """Return the bytes of the first card that are in use."""
    return int(subprocess.run(USED, capture_output=True, text=True, check=True).stdout) << 20


def test_served_encoder_takes_no_more_of_the_card_than_planned(tmp_path: Path) -> None:
    build(make_spec(model=str(minilm()), name="minilm", output=tmp_path, target="cuda", precision="fp16"))
    planned = SERVER_ON_CARD + plan_built(tmp_path, "minilm").gpu_memory[0]
    before = _used()
    with running(tmp_path) as server, Client(server.url, "minilm") as client:
        for text in (*TEXTS, " ".join(TEXTS)):
            assert np.isfinite(client.ask({"text_input": text})["embedding"]).all()
        taken = _used() - before
    print(f"minilm: {planned / 1e6:.0f} MB are planned and {taken / 1e6:.0f} MB were taken")
    assert 0 < taken <= planned / HEADROOM, "a tenth of the card is kept free for what is not planned"
