"""ONNX Runtime on a CPU, Attention of opset 23 and 24 with is_causal, past keys and one query: the mask is left out.

Query i sees the past keys and new ones up to i. One query before several new keys sees them all.
Expected: what ONNX's own reference evaluator gives. Exit code 1 while it differs.
"""

import sys

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from onnx.reference import ReferenceEvaluator

PAST, NEW = 2, 4
names = {"q": 1, "k": NEW, "v": NEW, "past_key": PAST, "past_value": PAST}
feeds = {name: np.zeros((1, 1, n, 8), np.float32) for name, n in names.items()}
feeds["v"] += 6  # of the six keys the query sees the past ones, with V = 0, and the first new one: 2
node = helper.make_node("Attention", ["q", "k", "v", "", "past_key", "past_value"], ["y", "pk", "pv"], is_causal=1)
float32 = onnx.TensorProto.FLOAT
inputs = [helper.make_tensor_value_info(name, float32, x.shape) for name, x in feeds.items()]
outputs = [helper.make_tensor_value_info(name, float32, None) for name in node.output]
wrong = False
print(f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}: one query, {PAST} past and {NEW} new keys")
for opset in (23, 24):
    graph = helper.make_graph([node], "attention", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    due = float(ReferenceEvaluator(model).run(None, feeds)[0].flat[0])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = float(session.run(None, feeds)[0].flat[0])
    print(f"opset {opset}: the reference gives {due:.4f}, ONNX Runtime {got:.4f}")
    wrong |= abs(due - got) > 1e-4
sys.exit(wrong)
