"""Record a call of a graph for the new engine, and repeat it as the engine's replay.py does. Prints the answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from builder.building.verify.recording import graph_case
from builder.building.verify.runtimes import replayed
from builder.graphs.onnx.graph import save_graph

folder = Path(sys.argv[1])
sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 3]) for name in "xy"]
identity = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", sides[:1], sides[1:])
model = helper.make_model(identity, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
graph = replace(save_graph(model, folder / "model.onnx"), engine="echo")
case = graph_case(graph, [{"x": np.zeros((2, 3), np.float32)}], 1)
(answers,) = replayed(folder, [case.job])
assert isinstance(answers, list), answers
print(json.dumps([answer["y"].tolist() for answer in answers]))
