"""Repositories that are broken one field at a time, each with its rule; and whole ones, without one.

test_server.py compares them with a server: an error is a model that does not load, or answers nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx
from onnx import TensorProto, helper

PYTHON = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in arrays]
"""
SENDING = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(flags=1)
"""
CALL = """
    def call(self, inputs):
        return pb_utils.InferenceRequest(model_name="whole", requested_output_names=["y"], inputs=inputs).exec()
"""
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
ON_CPU = "instance_group { count: 1 kind: KIND_CPU }\n"
WHOLE = f'backend: "python"\nmax_batch_size: 8\n{TENSORS}{ON_CPU}'
ONNX = (
    f'backend: "onnxruntime"\nmax_batch_size: 8\n{TENSORS}{ON_CPU}'
    'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
)
STEP = """  step {
    model_name: "whole" model_version: -1
    input_map { key: "x" value: "a" } output_map { key: "y" value: "b" }
  }
"""
STEPS = f"ensemble_scheduling {{\n{STEP}}}\n"
ENSEMBLE = f"""platform: "ensemble"
max_batch_size: 8
input {{ name: "a" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "b" data_type: TYPE_FP32 dims: [ 4 ] }}
{STEPS}"""
DYNAMIC = "dynamic_batching { }\n"
MORE = 'inputs { key: "z" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }'
WARM_UP = 'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] %s } } }\n'


def parameter(name: str, value: str) -> str:
    """Return a parameter of a configuration."""
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def graph(inputs: tuple[int | str, ...] = ("batch", 4), external: str | None = None) -> bytes:
    """Return an ONNX graph, y = x + 1, that the ONNX Runtime of every release reads."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [4], [1.0] * 4)
    if external is not None:
        del one.float_data[:]
        one.data_location = TensorProto.EXTERNAL
        one.external_data.add(key="location", value=external)
        one.external_data.add(key="length", value="16")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, inputs)
    body = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "g", [x], [y], [one])
    model: onnx.ModelProto = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@dataclass(frozen=True)
class Case:
    """Repository of one model. `code`: of the broken rule; None: whole. `files`: beside config.pbtxt.

    `alone`: nothing else may be loading meanwhile, because it needs other models, or Triton 24.10 ends now and then as
    it loads it. `hangs`: Triton 24.10 never finishes loading it. `loads`: it loads, and every request fails.
    """

    config: str | bytes | None
    code: str | None = None
    files: Mapping[str, str | bytes] = field(default_factory=lambda: {"1/model.py": PYTHON})
    alone: bool = False
    hangs: bool = False
    loads: bool = False

    def write(self, folder: Path) -> None:
        config = {} if self.config is None else {"config.pbtxt": self.config}
        for name, content in {**self.files, **config}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def _onnx(config: str, code: str | None = None, content: bytes | None = None) -> Case:
    return Case(config, code, {"1/model.onnx": graph() if content is None else content})


def _python(files: Mapping[str, str | bytes], code: str | None = None, config: str = WHOLE) -> Case:
    return Case(config, code, {"1/model.py": PYTHON, **files})


def _ensemble(config: str, code: str | None = None) -> Case:
    return Case(config, code, {"1/empty": ""}, alone=True)


def _sequence(control: str) -> str:
    return WHOLE + f"sequence_batching {{ control_input {{ {control} }} }}\n"


START = "kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ]"
CASES: dict[str, Case] = {
    "whole": Case(WHOLE),
    # folders and versions
    "nothing": Case(None, "TR102", {"readme": "a folder that is no model"}),
    "unknown_field": Case(f"max_batchsize: 8\n{WHOLE}", "TR104"),
    "two_schedulers": Case(f"{WHOLE}{DYNAMIC}sequence_batching {{ }}", "TR104"),
    "comment_of_bytes": Case(WHOLE.encode() + b"# \xff"),
    "name_of_bytes": Case(WHOLE.encode().replace(b'"y"', b'"\xff"')),
    "other_name": Case(f'name: "another"\n{WHOLE}', "TR105"),
    "unknown_platform": Case(WHOLE.replace('backend: "python"', 'platform: "onnx"'), "TR106"),
    "backend_by_its_file": Case(WHOLE.replace('backend: "python"\n', "")),
    "platform_of_another": _onnx(f'platform: "tensorrt_plan"\n{ONNX}', "TR107"),
    "no_version": Case(WHOLE, "TR151", {"model.py": PYTHON}),
    "policy_of_none": Case(f"{WHOLE}version_policy {{ specific {{ versions: [ 7 ] }} }}", "TR151"),
    "policy_of_no_latest": Case(f"{WHOLE}version_policy {{ latest {{ }} }}", "TR151"),
    "policy_of_one_more": Case(f"{WHOLE}version_policy {{ specific {{ versions: [ 1, 7 ] }} }}", "TR152"),
    "leading_zero": _python({"02/model.py": "raise SystemError"}, "TR153"),
    "old_copy": Case(WHOLE, "TR154", {"1/model.py": PYTHON, "2_old/model.py": PYTHON}, hangs=True),
    "old_copy_beside": _python({"old_2/model.py": PYTHON}),
    "two_versions": _python({"2/model.py": PYTHON}),
    "broken_old_version": Case(WHOLE, "TR155", {"1/nothing.py": "", "2/model.py": PYTHON}),
    "no_file": Case(WHOLE, "TR155", {"1/other.py": PYTHON}, hangs=True),
    "other_file": Case(f'default_model_filename: "other.py"\n{WHOLE}', None, {"1/other.py": PYTHON}),
    "no_labels": Case(WHOLE.replace("output {", 'output { label_filename: "labels"'), "TR108"),
    "labels": _python({"labels": "a\nb"}, None, WHOLE.replace("output {", 'output { label_filename: "labels"')),
    # tensors
    "no_data_type": Case(WHOLE.replace("data_type: TYPE_FP32 dims", "dims", 1), "TR204"),
    "no_dims": Case(WHOLE.replace("dims: [ 4 ]", "", 1), "TR204"),
    "no_name": Case(WHOLE.replace('name: "x"', "", 1), "TR204"),
    "size_of_zero": Case(WHOLE.replace("[ 4 ]", "[ 0 ]", 1), "TR204"),
    "size_of_minus_two": Case(WHOLE.replace("[ 4 ]", "[ -2 ]", 1), "TR204"),
    "reshape": Case(WHOLE.replace("[ 4 ]", "[ 4 ] reshape { shape: [ 2, 2 ] }", 1)),
    "reshape_to_less": Case(WHOLE.replace("[ 4 ]", "[ 4 ] reshape { shape: [ 3 ] }", 1), "TR205"),
    "reshape_to_nothing": Case(WHOLE.replace("[ 4 ]", "[ 4 ] reshape { }", 1), "TR205"),
    "reshape_across": Case(WHOLE.replace("[ 4 ]", "[ 2, -1, 6 ] reshape { shape: [ -1, 12 ] }", 1), "TR205"),
    "two_of_a_name": Case(
        WHOLE.replace("output", 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }\noutput', 1), "TR206"
    ),
    "flat_image": Case(WHOLE.replace("[ 4 ]", "[ 4 ] format: FORMAT_NCHW", 1), "TR207"),
    "shape_tensor": Case(WHOLE.replace("[ 4 ]", "[ 4 ] is_shape_tensor: true", 1), "TR207"),
    "batch_input": Case(
        f'{WHOLE}batch_input {{ kind: BATCH_ITEM_SHAPE target_name: "s" data_type: TYPE_INT64 source_input: "x" }}',
        "TR208",
    ),
    "batch_input_of_another": Case(
        f'{WHOLE}batch_input {{ kind: BATCH_ITEM_SHAPE target_name: "s" data_type: TYPE_INT32 source_input: "z" }}',
        "TR208",
    ),
    "onnx": _onnx(ONNX),
    "onnx_rubbish": _onnx(ONNX, "TR201", b"version https://git-lfs.github.com/spec/v1"),
    "onnx_type": _onnx(ONNX.replace("TYPE_FP32", "TYPE_INT64", 1), "TR202"),
    "onnx_name": _onnx(ONNX.replace('"x"', '"z"'), "TR202"),
    "onnx_size": _onnx(ONNX.replace("[ 4 ]", "[ 5 ]"), "TR202"),
    "onnx_of_fixed_batch": _onnx(ONNX, "TR202", graph((8, 4))),
    "onnx_optional": _onnx(ONNX.replace("[ 4 ]", "[ 4 ] optional: true", 1), "TR602"),
    "onnx_threads": _onnx(ONNX.replace('"1"', '"many"'), "TR602"),
    "onnx_spinning": _onnx(ONNX + parameter("spin", "0"), "TR603"),
    "onnx_weights": _onnx(ONNX, "TR604", graph(external="model.onnx.data")),
    # batching
    "negative_batch": Case(WHOLE.replace("max_batch_size: 8", "max_batch_size: -1"), "TR301"),
    "preferred_above": Case(f"{WHOLE}dynamic_batching {{ preferred_batch_size: [ 16 ] }}", "TR302"),
    "preferred_of_none": Case(f"{WHOLE}dynamic_batching {{ preferred_batch_size: [ 0 ] }}", "TR302"),
    "batcher_of_one": Case(WHOLE.replace("max_batch_size: 8", "max_batch_size: 0") + DYNAMIC, "TR303"),
    "queue_of_a_decoupled": Case(
        WHOLE.replace("max_batch_size: 8", "max_batch_size: 0")
        + f"{DYNAMIC}model_transaction_policy {{ decoupled: true }}",
        None,
        {"1/model.py": SENDING},
    ),
    "seconds_of_delay": Case(f"{WHOLE}dynamic_batching {{ max_queue_delay_microseconds: 3000000 }}", "TR304"),
    "no_default_priority": Case(f"{WHOLE}dynamic_batching {{ priority_levels: 2 }}", "TR305"),
    "policy_of_no_level": Case(
        f"{WHOLE}dynamic_batching {{ priority_levels: 2 default_priority_level: 1 "
        "priority_queue_policy { key: 3 value { } } }",
        "TR305",
    ),
    "ordered_priorities": Case(
        f"{WHOLE}dynamic_batching {{ preserve_ordering: true priority_levels: 2 default_priority_level: 1 }}", "TR306"
    ),
    "ordered_delays": Case(
        f"{WHOLE}dynamic_batching {{ preserve_ordering: true default_queue_policy {{ timeout_action: DELAY "
        "default_timeout_microseconds: 5 } }",
        "TR306",
    ),
    "streaming_cache": Case(
        f"{WHOLE}model_transaction_policy {{ decoupled: true }}\nresponse_cache {{ enable: true }}", "TR309"
    ),
    "sequence_cache": Case(f"{WHOLE}sequence_batching {{ }}\nresponse_cache {{ enable: true }}", "TR309"),
    "no_library": Case(WHOLE + parameter("TRITON_BATCH_STRATEGY_PATH", "/no/batch.so"), "TR311"),
    "limited_queue": Case(f"{WHOLE}dynamic_batching {{ default_queue_policy {{ max_queue_size: 4 }} }}", "TR307"),
    "uneven": Case(WHOLE.replace("[ 4 ]", "[ -1 ]") + DYNAMIC, "TR308"),
    "cached": Case(f"{WHOLE}response_cache {{ enable: true }}", "TR310"),
    # warm-ups and sequences
    "warm_up": Case(WHOLE + WARM_UP % "zero_data: true"),
    "warm_up_of_no_rows": Case(WHOLE + WARM_UP.replace("batch_size: 1", "") % "zero_data: true", "TR351"),
    "warm_up_of_a_file": _python({"warmup/x": bytes(16)}, None, WHOLE + WARM_UP % 'input_data_file: "x"'),
    "warm_up_of_no_file": Case(WHOLE + WARM_UP % 'input_data_file: "x"', "TR352"),
    "warm_up_of_a_short_file": _python({"warmup/x": bytes(12)}, "TR352", WHOLE + WARM_UP % 'input_data_file: "x"'),
    "warm_up_of_nothing": Case(WHOLE + WARM_UP % "", "TR352"),
    "warm_up_of_any_size": Case(WHOLE + WARM_UP.replace("[ 4 ]", "[ -1 ]") % "zero_data: true", "TR353"),
    "warm_up_of_another_type": Case(WHOLE + WARM_UP.replace("TYPE_FP32", "TYPE_INT32") % "zero_data: true", "TR353"),
    "warm_up_of_another_size": Case(WHOLE + WARM_UP.replace("[ 4 ]", "[ 5 ]") % "zero_data: true", "TR353"),
    "warm_up_without_x": Case(WHOLE + WARM_UP.replace('"x"', '"z"') % "zero_data: true", "TR353"),
    "warm_up_of_more": Case(WHOLE + WARM_UP.replace("inputs", f"{MORE} inputs") % "zero_data: true", "TR354"),
    "warm_up_of_many": Case(
        WHOLE + WARM_UP.replace("batch_size: 1", "batch_size: 16") % "zero_data: true", "TR355", alone=True
    ),
    "sequence": Case(_sequence(f'name: "START" control {{ {START} }}')),
    "control_of_one_value": Case(
        _sequence('name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 1 ] }'), "TR361"
    ),
    "control_without_name": Case(_sequence(f"control {{ {START} }}"), "TR361"),
    "control_twice": Case(_sequence(f'name: "S" control {{ {START} }} control {{ {START} }}'), "TR361"),
    "id_of_a_real": Case(
        _sequence('name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 }'), "TR361"
    ),
    "slots_in_percent": Case(f"{WHOLE}sequence_batching {{ direct {{ minimum_slot_utilization: 50 }} }}", "TR362"),
    # instances
    "gpu_of_a_cpu": Case(WHOLE.replace("KIND_CPU", "KIND_CPU gpus: [ 0 ]"), "TR401"),
    "profile_of_python": Case(WHOLE.replace("KIND_CPU", 'KIND_CPU profile: [ "0" ]'), "TR402"),
    # Python and releases
    "no_execute": Case(WHOLE, "TR706", {"1/model.py": PYTHON.replace("execute", "run")}, loads=True),
    "returns": Case(f"{WHOLE}model_transaction_policy {{ decoupled: true }}", "TR707", loads=True),
    "calls_nobody": Case(WHOLE, "TR502", {"1/model.py": PYTHON + CALL.replace("whole", "hole")}),
    "asks_for_nothing": Case(WHOLE, "TR502", {"1/model.py": PYTHON + CALL.replace('"y"', '"z"')}),
    "calls": Case(WHOLE, None, {"1/model.py": PYTHON + CALL}),
    "no_class": Case(WHOLE, "TR705", {"1/model.py": PYTHON.replace("TritonPythonModel", "Model")}),
    "not_python": Case(WHOLE, "TR701", {"1/model.py": f"{PYTHON}\ndef"}),
    "no_environment": Case(WHOLE + parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/e.tar.gz"), "TR708"),
    "metrics_of_later": Case(
        f"{WHOLE}model_metrics {{ }}", "TR607", {"1/model.py": PYTHON, "build.json": json.dumps({"triton": "24.10"})}
    ),
    # ensembles
    "ensemble": _ensemble(ENSEMBLE),
    "ensemble_without_platform": _ensemble(ENSEMBLE.replace('platform: "ensemble"\n', ""), "TR551"),
    "ensemble_with_backend": _ensemble(f'backend: "python"\n{ENSEMBLE}', "TR551"),
    "ensemble_of_nothing": _ensemble(ENSEMBLE.replace(STEPS, ""), "TR551"),
    "ensemble_with_instances": _ensemble(f"{ENSEMBLE}{ON_CPU}", "TR552"),
    "ensemble_with_warm_up": _ensemble(f"{ENSEMBLE}{WARM_UP % 'zero_data: true'}", "TR552"),
    "ensemble_that_batches": _ensemble(f"{ENSEMBLE}{DYNAMIC}", "TR104"),
    "step_without_map": _ensemble(ENSEMBLE.replace('output_map { key: "y" value: "b" }', ""), "TR553"),
    "step_in_a_circle": _ensemble(ENSEMBLE.replace('value: "a"', 'value: "b"'), "TR553"),
    "step_that_waits": _ensemble(
        ENSEMBLE.replace(STEP, STEP + STEP.replace('"a"', '"c"').replace('"b"', '"d"')), "TR553"
    ),
    "step_for_nobody": _ensemble(ENSEMBLE.replace(STEP, STEP + STEP.replace('value: "b"', 'value: "c"')), "TR553"),
    "written_twice": _ensemble(ENSEMBLE.replace(STEP, STEP + STEP), "TR553"),
    "step_of_no_model": _ensemble(ENSEMBLE.replace('"whole"', '"hole"'), "TR554"),
    "step_of_no_version": _ensemble(ENSEMBLE.replace("model_version: -1", "model_version: 7"), "TR554"),
    "one_calls_two": _ensemble(ENSEMBLE.replace('"whole"', '"two_calls_one"'), "TR555"),
    "two_calls_one": _ensemble(ENSEMBLE.replace('"whole"', '"one_calls_two"'), "TR555"),
    "step_of_no_input": _ensemble(ENSEMBLE.replace('key: "x"', 'key: "z"'), "TR556"),
    "step_of_no_output": _ensemble(ENSEMBLE.replace('key: "y"', 'key: "z"'), "TR556"),
    "step_of_another_type": _ensemble(ENSEMBLE.replace("TYPE_FP32", "TYPE_FP16", 1), "TR557"),
    "step_of_another_size": _ensemble(ENSEMBLE.replace("[ 4 ]", "[ 5 ]", 1), "TR557"),
    "step_of_any_size": _ensemble(ENSEMBLE.replace("[ 4 ]", "[ -1 ]", 1)),
    "caches_a_stream": _ensemble(ENSEMBLE.replace('"whole"', '"returns"') + "response_cache { enable: true }", "TR559"),
    "batches_above_its_step": _ensemble(ENSEMBLE.replace("max_batch_size: 8", "max_batch_size: 9"), "TR558"),
}
