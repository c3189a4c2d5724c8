"""OpenVINO on a CPU, ScaledDotProductAttention of dynamic lengths: a first call of one key spoils later ones.

Behind it every call of 16 keys or more is wrong: over V = 1 one key of each 16 counts, and in the plugin's default
precision outputs overflow. Calls of fewer keys are right, and so is a model that began with two keys.
Expected: outputs that do not depend on earlier calls. Exit code 1 while they do.
"""

import sys

import numpy as np
import openvino as ov
import openvino.opset13 as op


def sdpa() -> ov.CompiledModel:
    qkv = [op.parameter(ov.PartialShape([1, 1, -1, 64]), ov.Type.f32) for _ in range(3)]
    model = ov.Model([op.scaled_dot_product_attention(*qkv)], qkv)
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def call(model: ov.CompiledModel, keys: int) -> float:
    """Attend to V of 1 everywhere: the output is 1."""
    q = np.zeros((1, 1, 1, 64), np.float32)
    return float(model([q, *[np.ones((1, 1, keys, 64), np.float32)] * 2])[0][0, 0, 0, 0])


model, other = sdpa(), sdpa()
call(model, 1)
call(other, 2)
found = {keys: (call(other, keys), call(model, keys)) for keys in (15, 16, 17, 1000)}
print(f"openvino {ov.__version__}: attention over V of 1, after a first call of two keys and of one key")
for keys, (after_two, after_one) in found.items():
    print(f"{keys} keys: {after_two:.6g}, {after_one:.6g}")
sys.exit(any(abs(x - 1) > 1e-5 for pair in found.values() for x in pair))
