"""How much memory a build takes: about its weights once, beside what the libraries take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.decoders import make_decoder_checkpoint

WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
AT_MOST = 3.0  # times the weights, in fp32; above 4 when every stage had a copy of its own

BUILD = """
import json, sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from builder.checkpoint.resolve import resolve
from builder.export.decoder import export_decoder
from builder.fleet.memory import peak_memory, reset_peak_memory
from builder.optimise.fusion import fuse
from builder.pipeline import build
from builder.spec import make_spec
from builder.variants import steps

steps.about_ms = steps.median_ms = lambda call: [call(), 1.0][1]  # once: times are not what is asked here
tiny, wide, output, samples = sys.argv[1:]
options = {"quality": 0.0, "perplexity": 1e9, "slots": 1, "max_length": 64, "samples": samples, "output": output}
model = resolve(make_spec(model=tiny, name="tiny", **options)).model
made = Path(tiny)
fuse(export_decoder(model, made, 64).graph, made)  # the libraries that an export loads
found = {"libraries": peak_memory()}

@contextmanager
def stage(name):
    reset_peak_memory()
    yield
    found[name] = peak_memory()

build(make_spec(model=wide, name="wide", **options), stage)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_build_takes_about_its_weights_once(tmp_path: Path) -> None:
    """Each copy of the weights that a stage makes is one more time their size."""
    tiny, wide, output = (tmp_path / name for name in ("tiny", "wide", "repository"))
    make_decoder_checkpoint(tiny, "llama")
    make_decoder_checkpoint(wide, "llama", **WIDE)
    output.mkdir()
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"text_input": "A fox jumps over a dog."}\n')
    weights = sum(file.stat().st_size for file in wide.glob("*.safetensors"))
    command = [sys.executable, "-c", BUILD, *map(str, (tiny, wide, output, samples))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peaks = json.loads(done.stdout.splitlines()[-1])
    base = peaks.pop("libraries")
    times = {stage: round((peak - base) / weights, 2) for stage, peak in peaks.items()}
    assert max(times.values()) < AT_MOST, f"times the weights, beside {base / 1e6:.0f} MB: {times}"
