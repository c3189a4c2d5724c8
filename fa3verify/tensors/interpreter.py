"""What Triton's interpreter does otherwise than a GPU, corrected where it runs a kernel that is judged.

The interpreter runs where the environment has ``TRITON_INTERPRET=1``. :func:`correct` applies :data:`CORRECTIONS`,
which are those of Triton 3.6.0, to the process. Without them right kernels fail:

- bf16 and FP8 are kept as integers, and products, sums and comparisons of bf16 are those of its codes. They become
  formats of ml_dtypes, in which arithmetic is that of the numbers.
- Conversions of binary32 to bf16 and FP8 cut off, or round without a carry. They become those of the hardware.
- A number that was loaded raises as a bound of a loop, where numpy is 2.4 or later.
- A float that a launch gives is multiplied with fp16 and bf16 as a number of their format. It becomes a float32.
- Autotuning times on a GPU. The first configuration runs.
- ``triton.runtime.driver.active`` raises without a GPU. A stand-in answers: the backend is "interpreter".

Two things it cannot show: products of float32 are in binary32, where a GPU has tf32, and sums of fp16 and bf16 within a
tile may be in binary32.
"""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from fa3_kernels.twin.convert import encode_f32

VERSION = "3.6.0"
ROUNDED = {"bf16": "bf16", "fp8e4nv": "e4m3", "fp8e5": "e5m2"}  # names of Triton and of encode_f32
FORMATS = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
BY_INTERPRETER = "a Triton kernel runs on a CPU where the environment has TRITON_INTERPRET=1"
ADVICE = {  # by whether the interpreter is on, and a part of a message
    False: {"active drivers (": BY_INTERPRETER, "cannot be accessed from Triton": BY_INTERPRETER},
    True: {
        "is out of range for type int32": "a GPU's compiler refuses it too: a tl.constexpr beyond 32 bits meets int32",
        "supported in interpreter mode": "only Triton's interpreter cannot do this: judge the kernel on a GPU",
        "Did you forget to add @triton.jit": "Triton's interpreter has no libdevice: use tl.math, or judge it on a GPU",
    },
}


def is_on() -> bool:
    """Tell whether the environment asks for the interpreter, in a word that Triton reads as yes."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def correct() -> str | None:
    """Correct the interpreter in this process, where the environment asks for it.

    Returns
    -------
    str or None
        Why it stays as it is; None where it is corrected, or not asked for.
    """
    return _corrected() if is_on() else None


def advised(words: str) -> str:
    """Return an error with what to do about it behind it in brackets, where it is one of Triton's that is known.

    Parameters
    ----------
    words : str
        The error.
    """
    told = next((told for part, told in ADVICE[is_on()].items() if part in words), None)
    told = told or ("Interpreter" in words and correct())
    return f"{words} ({told})" if told else words


@cache
def _corrected() -> str | None:
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError as error:
        return str(error)
    if triton.__version__ != VERSION:
        return f"Triton's interpreter is corrected in {VERSION} alone, got {triton.__version__}"
    for correction in CORRECTIONS:
        correction(triton, interpreter)
    return None


def _correct_driver(triton: Any, _: Any) -> None:
    """Let kernels ask which GPU there is."""
    import torch

    stand_in = SimpleNamespace(
        get_current_target=lambda: triton.backends.compiler.GPUTarget("interpreter", 0, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
        get_current_device=lambda: 0,
    )
    triton.runtime.driver.set_active(stand_in)


def _correct_loops(_: Any, interpreter: Any) -> None:
    """Let a loaded number bound a loop."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _correct_floats(triton: Any, interpreter: Any) -> None:
    """Have a float of a launch be a float32."""
    convert = interpreter._implicit_cvt
    float32 = triton.language.float32

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return triton.language.tensor(interpreter.TensorHandle(np.array([argument], np.float32), float32), float32)

    interpreter._implicit_cvt = converted


def _correct_formats(triton: Any, interpreter: Any) -> None:
    """Have arrays of bf16 and FP8 hold numbers, and round to them as the hardware does."""
    code_of = interpreter._get_np_dtype
    cut = interpreter._convert_float
    to_zero = triton._C.libtriton.ir.ROUNDING_MODE.RTZ

    def dtype_of(kind: Any) -> np.dtype:
        name = kind.scalar.name
        return FORMATS[name] if name in ROUNDED else code_of(kind)

    def convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if rounding == to_zero or not {source.name, target.name} <= FORMATS.keys():
            return cut(x, source, target, rounding)
        values = x.view(FORMATS[source.name])
        if target.name in ROUNDED and target.primitive_bitwidth < source.primitive_bitwidth:
            return encode_f32(values.astype(np.float32), ROUNDED[target.name])
        return values.astype(FORMATS[target.name])

    def get_bf16(_: Any, value: float) -> Any:
        return interpreter.TensorHandle(np.array([value], FORMATS["bf16"]), triton.language.bfloat16)

    interpreter._get_np_dtype = dtype_of
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.get_bf16 = get_bf16


def _correct_tuning(triton: Any, _: Any) -> None:
    """Have autotuning take the first configuration: all take as long."""
    triton.runtime.Autotuner._bench = lambda *args, **meta: [0.0, 0.0, 0.0]


CORRECTIONS = (_correct_driver, _correct_loops, _correct_floats, _correct_formats, _correct_tuning)
