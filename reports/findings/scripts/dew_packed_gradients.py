"""FlashAttention-3 (dew-flash-attn), gradients of packed sequences: NaN in one sequence reaches the one before it.

The last tile of a sequence reads on into the next one. Expected: sequences that do not touch each other. Exit code 1
while that is not so. An argument names the library; without one it is dew-flash-attn's.
"""

import ctypes
import hashlib
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

installed = "libdew_flash_attn3.so"
library = Path(sys.argv[1]) if sys.argv[1:] else Path(find_spec("dew_flash_attn").origin).with_name(installed)
FORWARD = "dew_flash3_mha_varlen_fwd"
BACKWARD = "dew_flash3_mha_varlen_bwd"
for name in (FORWARD, BACKWARD):
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.CDLL(str(library))[name]), platform="CUDA")
shapes = [(n, 1, 64) for n in (170, 218, 218, 170)]
q, k, v, dout = (jax.random.normal(jax.random.key(n), shape, jnp.float16) for n, shape in enumerate(shapes))
starts = (jnp.array([0, 70, 170], jnp.int32), jnp.array([0, 128, 218], jnp.int32))
call = {"max_seqlen": np.int64(100), "max_seqlen_k": np.int64(128), "softmax_scale": np.float64(0.125)}
call |= {"is_causal": False, "window_size_left": np.int64(-1), "window_size_right": np.int64(-1)}
like = jax.ShapeDtypeStruct
floats = [like(shape, jnp.float32) for shape in ((1, 170), (1, 1, 1, 1), (1, 1, 1), (170 + 128 * 3,))]
forward = jax.ffi.ffi_call(FORWARD, (like(q.shape, q.dtype), *floats[:3]))
backward = jax.ffi.ffi_call(BACKWARD, (*(like(x.shape, x.dtype) for x in (q, k, v)), floats[3], floats[3]))
out, lse, *_ = forward(q, k, v, *starts, **call)
found = {}
for value in (1.0, jnp.nan):  # one element of dO, in the first row of the second sequence
    got = backward(dout.at[70, 0, 3].set(value), q, k, v, out, lse, *starts, **call)
    found[value] = [int((~jnp.isfinite(x[:rows])).sum()) for x, rows in zip(got, (70, 128, 128), strict=False)]
digest = hashlib.sha256(library.read_bytes()).hexdigest()
print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {library.name} sha256 {digest}")
print(f"{'shows' if any(map(sum, found.values())) else 'mended'}: NaN in dQ, dK, dV of the first sequence {found}")
sys.exit(any(map(sum, found.values())))
