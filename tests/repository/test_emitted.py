"""The emitted Python of each family and engine is complete and minimal."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.distribution import RUNTIME
from builder.repository.layout.emitted import emitted_files, encoder_files, generation_files
from builder.runtime.contract import Arena, Chat, EncoderInput, LayerShape, Session
from tests.servings import decoder_serving, encoder_serving

LAYERS = (LayerShape(2, 8),)
IN_PROCESS = decoder_serving(executor="in-process", model="model.onnx")
SLOTS = replace(IN_PROCESS, session=Session(device="cuda"))
BLOCKS = replace(SLOTS, arena=Arena(slots=2, length=64, dtype="float16", layers=LAYERS, blocks=9))
GENERATING = {
    "onnxruntime": IN_PROCESS,
    "openvino": replace(IN_PROCESS, session=Session("openvino"), arena=BLOCKS.arena),
    "onnxruntime_cuda": SLOTS,
    "onnxruntime_cuda_blocks": BLOCKS,
    "onnxruntime_seq2seq": replace(IN_PROCESS, source=EncoderInput(64, LAYERS, "encoder.onnx", 64, 0)),
    "onnxruntime_hidden_states": replace(IN_PROCESS, hidden_size=8),
    "openvino_hidden_states": replace(IN_PROCESS, session=Session("openvino"), hidden_size=8),
    "bls": decoder_serving(),
    "bls_cuda": decoder_serving(session=Session(device="cuda")),
}
ENCODING = [file.stem for file in sorted((RUNTIME / "encoder" / "executors").glob("[!_]*.py"))]
TASKS = [file.stem for file in sorted((RUNTIME / "encoder" / "tasks").glob("[!_]*.py"))]
ENCODERS = {
    **{f"encoder {name}": encoder_serving(executor=name) for name in ENCODING},
    **{f"encoder {name}": encoder_serving(task=name) for name in TASKS},
}
EMITTED: Mapping[str, Mapping[str, Path]] = {
    **{name: generation_files(serving) for name, serving in GENERATING.items()},
    "chat": generation_files(decoder_serving(chat=Chat("{{ messages }}"))),
    **{name: encoder_files(serving) for name, serving in ENCODERS.items()},
    "shared": emitted_files("shared_model.py"),
    "tensorrt_llm": emitted_files("tensorrt_llm_model.py"),
}


def _named(package: str, *modules: str) -> tuple[str, ...]:
    return tuple(f"{package}.{module}" for module in modules)


NAMED: Mapping[str, tuple[str, ...]] = {  # modules that the emitted code imports by a name in serving.json
    **{n: _named("generation", s.prompts_module, f"executors.{s.executor_module}") for n, s in GENERATING.items()},
    "chat": _named("generation", "chat_prompts", "executors.bls"),
    **{n: _named("encoder", f"executors.{s.executor}", f"tasks.{s.task}") for n, s in ENCODERS.items()},
    "shared": (),
}
PROGRAM = """
import importlib, json, sys, types
from pathlib import Path

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("builder", "tests", "torch", "transformers", "onnx"):
            raise ImportError(f"emitted code imports {name}")

folder = Path(sys.argv[1])
sys.meta_path.insert(0, Refused())
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
sys.path[0] = str(folder)
for name in sys.argv[2:]:
    importlib.import_module(f"1.{name}")
files = [module.__file__ for name, module in sys.modules.items() if name.startswith("1.") and module.__file__]
print(json.dumps(sorted(str(Path(file).relative_to(folder)) for file in files)))
"""


def _path(source: Path) -> str:
    return str(source.relative_to(RUNTIME))


@pytest.mark.parametrize("name", NAMED)
def test_emitted_files_are_exactly_those_that_serving_imports(name: str, tmp_path: Path) -> None:
    """Import the files in a process without the builder: imports succeed, and every file is imported."""
    files = EMITTED[name]
    for target, source in files.items():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / target)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), "model", *NAMED[name]]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == sorted(files)


def test_emitted_code_imports_its_own_modules_only_at_the_top() -> None:
    """The test above does not detect imports inside functions."""
    for files in EMITTED.values():
        for source in files.values():
            tree = ast.parse(source.read_text("utf-8"))
            nested = {node for function in tree.body for node in ast.walk(function)} - set(tree.body)
            relative = [node for node in nested if isinstance(node, ast.ImportFrom) and node.level]
            allowed = {child for node in tree.body if isinstance(node, ast.If) for child in node.body}
            assert [node for node in relative if node not in allowed] == [], source


def test_emitted_executor_is_the_one_that_serving_json_names() -> None:
    executors = {file.stem for file in (RUNTIME / "generation" / "executors").glob("*.py")}
    for name, serving in GENERATING.items():
        assert serving.executor_module == name
        others = {f"1/generation/executors/{other}.py" for other in GENERATING if other != name}
        extended = {f"1/generation/executors/{engine}.py" for engine in ("onnxruntime", "openvino")}
        assert not EMITTED[name].keys() & others - extended
        assert name in executors


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "bls"])
def test_emitted_decoder_has_no_code_for_gpus_encoders_or_chats(name: str) -> None:
    unreachable = ("executors/cuda.py", "executors/encoding.py", "executors/padded_prefill.py", "encoder_cache.py")
    for file in (*unreachable, "source_texts.py", "chat.py", "sandbox.py"):
        assert (RUNTIME / "generation" / file).is_file()
        assert f"1/generation/{file}" not in EMITTED[name]


def test_emitted_files_include_all_of_the_runtime_between_them() -> None:
    emitted = {_path(source) for files in EMITTED.values() for source in files.values()}
    files = {_path(path) for path in RUNTIME.rglob("*.py")}
    assert emitted == files - {"__init__.py", "recipe/__init__.py", "recipe/compile.py"}
