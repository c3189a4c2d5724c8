"""The inputs of the golden device data, from integer-only PCG64 streams: the same bits with every numpy, and digests.

Eight families probe the tensor core; a family draws A (tiles, m, k), B (tiles, n, k) and C (tiles, m, n) as
bits. The order of draws is part of the data: the device saw exactly these arrays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fa3_kernels.twin.wgmma_exact import TENSOR_FORMATS, TensorFormat

GOLDEN = Path(__file__).with_name("golden")
DEVICE_NAMES = {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3", "e5m2": "e5m2"}
M, N = 64, 256
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly N(0, 1), float64: the sum of 12 uniforms, exact arithmetic on every machine."""
    uniform = rng.integers(0, 1 << 32, size=(12, *shape), dtype=np.uint64)
    return uniform.sum(0).astype(np.float64) / 2.0**32 - 6.0


def quantize(x: np.ndarray, fmt: TensorFormat) -> np.ndarray:
    """Round float64 to the bits of a format, nearest even, overflow to max finite."""
    x = np.asarray(x, np.float64)
    magnitude = np.abs(x)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - fmt.bias).astype(np.int64)
    significand = np.rint(np.ldexp(magnitude, fmt.fraction_bits - exponent)).astype(np.int64)
    code = ((exponent + fmt.bias - 1) << fmt.fraction_bits) + significand
    code = np.minimum(np.where(magnitude == 0, 0, code), fmt.max_finite)
    return (code | np.signbit(x).astype(np.int64) << (fmt.exponent_bits + fmt.fraction_bits)).astype(fmt.bits_dtype)


def f32_bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


@dataclass(frozen=True, slots=True)
class Draw:
    """One family's source of random numbers and its shapes."""

    rng: np.random.Generator
    fmt: TensorFormat
    a: tuple[int, ...]
    b: tuple[int, ...]
    c: tuple[int, ...]

    def normal(self, shape: tuple[int, ...]) -> np.ndarray:
        return normal(self.rng, shape)

    def quantize(self, x: np.ndarray) -> np.ndarray:
        return quantize(x, self.fmt)

    def one_in(self, n: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.integers(0, n, size=shape) == 0

    def bits(self, count: int, shape: tuple[int, ...]) -> np.ndarray:
        return self.rng.integers(0, 1 << count, size=shape, dtype=np.uint64)

    def exponents(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        """Unbiased exponents low..high-1 as biased fields."""
        return self.rng.integers(127 + low, 127 + high, size=shape, dtype=np.uint64)


def _with_exponent(bits: np.ndarray, field: np.ndarray) -> np.ndarray:
    return ((bits & np.uint64(0x807FFFFF)) | (field << np.uint64(23))).astype(np.uint32)


def _normal(d: Draw) -> Triple:
    a, b = d.quantize(d.normal(d.a)), d.quantize(d.normal(d.b))
    c = f32_bits(d.normal(d.c) * 4)
    c[len(c) // 2 :] = 0
    return a, b, c


def _outlier(d: Draw) -> Triple:
    def heavy(shape: tuple[int, ...]) -> np.ndarray:
        x, y = d.normal(shape), d.normal(shape) * 10
        return x + y * (d.rng.integers(0, 1000, size=shape) < (1 if d.a[-1] > 64 else 30))

    return d.quantize(heavy(d.a)), d.quantize(heavy(d.b)), f32_bits(d.normal(d.c) * 20)


def _range(d: Draw) -> Triple:
    """Uniformly random finite bit patterns; bf16 with exponents within 55 of zero."""
    fmt = d.fmt
    width, lowest_exponent_bit = 8 * fmt.dtype.itemsize, 1 << (fmt.exponent_bits + fmt.fraction_bits - 1)

    def finite(shape: tuple[int, ...]) -> np.ndarray:
        x = d.bits(width, shape).astype(fmt.bits_dtype)
        if not fmt.has_inf:
            return np.where((x & 0x7F) == 0x7F, x ^ fmt.bits_dtype.type(1), x)
        cleared = x & fmt.bits_dtype.type((1 << width) - 1 - lowest_exponent_bit)
        return np.where((x & fmt.magnitude_mask) > fmt.max_finite, cleared, x)

    a, b = finite(d.a), finite(d.b)
    if fmt.name == "bf16":
        a, b = (
            (x & 0x807F | (d.exponents(-55, 56, x.shape) << np.uint64(7)).astype(np.uint16)).astype(np.uint16)
            for x in (a, b)
        )
    c = d.bits(32, d.c)
    low, high = {"fp16": (-50, 33), "bf16": (-100, 121), "e4m3": (-24, 20), "e5m2": (-36, 34)}[fmt.name]
    return a, b, _with_exponent(c, d.exponents(low, high, d.c))


def _cancel(d: Draw) -> Triple:
    """Products that cancel in pairs, and in odd tiles a C that cancels the rest."""
    a, b = d.normal(d.a), d.normal(d.b)
    half = d.a[-1] // 2
    a[..., half:] = a[..., :half]
    b[..., half:] = -b[..., :half]
    a_bits, b_bits = d.quantize(a), d.quantize(b)
    b_bits = np.where(d.one_in(8, d.b), b_bits ^ d.fmt.bits_dtype.type(1), b_bits)
    order = np.argsort(d.rng.integers(0, 1 << 30, size=d.a[-1]))
    a_bits, b_bits = a_bits[..., order], b_bits[..., order]
    fixed_a, fixed_b = (
        np.rint(x.view(d.fmt.dtype).astype(np.float64) * 2.0**20).astype(np.int64) for x in (a_bits, b_bits)
    )
    rest = -np.matmul(fixed_a, fixed_b.transpose(0, 2, 1)).astype(np.float64) * 2.0**-40
    c = f32_bits(rest * (1 + d.normal(d.c) * 2.0**-20))
    c[::2] = f32_bits(d.normal(c[::2].shape) * 2.0**-8)
    return a_bits, b_bits, c


def _subnorm(d: Draw) -> Triple:
    """Subnormals and zeros, a few normals."""
    fmt = d.fmt
    sign = 1 << (fmt.exponent_bits + fmt.fraction_bits)

    def tiny(shape: tuple[int, ...]) -> np.ndarray:
        x = d.bits(fmt.fraction_bits + 1, shape)
        s = d.bits(1, shape) * np.uint64(sign)
        return np.where(d.one_in(4, shape), s, x | s).astype(fmt.bits_dtype)

    a, b = tiny(d.a), tiny(d.b)
    big = d.one_in(16, d.b)
    large = d.quantize(np.abs(d.normal(d.b)) * 8 + 0.01)
    b = np.where(big, (b & fmt.bits_dtype.type(sign)) | large, b)
    if fmt.name == "bf16":
        a[::2] = d.quantize(d.normal(a[::2].shape) * 2.0**4)
    c = d.bits(32, d.c)
    middle = {"fp16": -40, "bf16": -149, "e4m3": -14, "e5m2": -28}[fmt.name]
    field = d.rng.integers(127 + middle - 10, 127 + middle + 20, size=d.c, dtype=np.int64)
    c = _with_exponent(c, np.maximum(field, 0).astype(np.uint64))
    c[d.one_in(4, d.c)] = 0
    return a, b, c


def _zeros(d: Draw) -> Triple:
    """Zeros whose partners are as large as can be, beside small products."""
    a = d.normal(d.a) * 2.0 ** (-6 if d.fmt.dtype.itemsize == 1 else -8)
    b = d.normal(d.b) * 2.0**-2
    d.one_in(3, d.a)  # drawn and unused, when the device data were made
    big = d.rng.integers(0, 2, size=d.b) == 0
    largest = {"fp16": 60000.0, "bf16": 2.0**100, "e4m3": 448.0, "e5m2": 57344.0}[d.fmt.name]
    zero_k = d.one_in(2, (d.a[-1],))
    a[..., zero_k] = 0
    b[..., zero_k] = np.where(big[..., zero_k], largest, b[..., zero_k])
    c = f32_bits(d.normal(d.c) * 2.0**-10)
    c[d.one_in(2, d.c)] = 0
    c[d.one_in(8, d.c)] = 0x80000000
    return d.quantize(a), d.quantize(b), c


def _special(d: Draw) -> Triple:
    """NaN, Inf and FLT_MAX among normal numbers."""
    fmt = d.fmt
    top = fmt.bits_dtype.type(fmt.max_finite + 1)  # Inf; NaN for e4m3
    anything = d.bits(8 * fmt.dtype.itemsize, d.a).astype(fmt.bits_dtype)
    b = d.quantize(d.normal(d.b))
    keep = ~d.one_in(200, d.a)
    a = np.where(keep, d.quantize(d.normal(d.a)), anything)
    a[d.one_in(400, d.a)] = top
    b[d.one_in(800, d.b)] = top | fmt.bits_dtype.type(fmt.magnitude_mask + 1)
    b[d.one_in(50, d.b)] = 0
    c = f32_bits(d.normal(d.c))
    for one_in, value in ((100, 0x7F800000), (200, 0xFF800001), (20, 0x7F7FFFFF)):
        c[d.one_in(one_in, d.c)] = value
    return a, b, c


def _overflow(d: Draw) -> Triple:
    """C near FLT_MAX; with bf16 the products too."""
    large = d.fmt.name == "bf16"
    a = d.quantize(d.normal(d.a) * (2.0**60 if large else 1))
    b = d.quantize(d.normal(d.b) * (2.0**66 if large else 1))
    c = d.bits(32, d.c)
    return a, b, _with_exponent(c, d.exponents(118, 128, d.c))


FAMILIES: dict[str, Callable[[Draw], Triple]] = {
    "normal": _normal,
    "outlier": _outlier,
    "range": _range,
    "cancel": _cancel,
    "subnorm": _subnorm,
    "zeros": _zeros,
    "special": _special,
    "overflow": _overflow,
}


def tiles(fmt: str, family: str, count: int, m: int, n: int, k: int, seed: int) -> Triple:
    """Draw ``count`` tiles of a family: bits of A (count, m, k), B (count, n, k) and C (count, m, n)."""
    draw = Draw(generator(seed), TENSOR_FORMATS[fmt], (count, m, k), (count, n, k), (count, m, n))
    a, b, c = FAMILIES[family](draw)
    return np.ascontiguousarray(a), np.ascontiguousarray(b), np.ascontiguousarray(c)


def golden_tiles(fmt: str, family: str, k: int) -> Triple:
    """Return the tiles of which the device's first corner is known; k is one step or 512."""
    formats, families = list(TENSOR_FORMATS), list(FAMILIES)
    seed = 1000 * formats.index(fmt) + 10 * families.index(family) + (k > 64)
    return tiles(fmt, family, 4 if k > 64 else 16, M, N, k, seed)


def attention_operands(fmt: str, outliers: bool) -> Triple:
    """Return the bits of Q, K, V (2, 512, 64) that whole Triton attention kernels were given."""
    rng, shape = generator(777), (2, 512, 64)

    def draw() -> np.ndarray:
        x = normal(rng, shape)
        if outliers:
            y = normal(rng, shape) * 10
            x = x + y * (rng.integers(0, 1000, size=shape) < 1)
        return quantize(x, TENSOR_FORMATS[fmt])

    return draw(), draw(), draw()


def mufu_binades() -> np.ndarray:
    """float32 inputs of ``mufu_binades.npz``: the first, the last and some significands of every binade, both signs."""
    low = np.array([0, 1, 0xFFFF, 0x10000, 0x1FFFF, 0x20000, 0x3FFFFF, 0x400000, 0x7FFFFF], np.uint32)
    return (np.arange(1 << 9, dtype=np.uint32)[:, None] << np.uint32(23) | low).reshape(-1).view(np.float32)


def mufu_inputs() -> tuple[np.ndarray, np.ndarray]:
    """Return the float32 inputs of ``rnd_op*`` (65,536) and of ``rng_ex2`` (131,072)."""
    rng = generator(99)
    patterns = rng.integers(0, 1 << 32, size=1 << 18, dtype=np.uint64).astype(np.uint32)
    field = rng.integers(97, 135, size=1 << 20, dtype=np.uint64)
    ranged = _with_exponent(rng.integers(0, 1 << 32, size=1 << 20, dtype=np.uint64), field)
    return patterns[: 1 << 16].view(np.float32), ranged[: 1 << 17].view(np.float32)


def digest(arrays: tuple[np.ndarray, ...]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of all bytes."""
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()[:16]


def stored_digest(key: str) -> str:
    """Return the digest of the inputs that the device was given."""
    return json.loads((GOLDEN / "input_hashes.json").read_text())[key]


def is_of_the_device(key: str, got: np.ndarray) -> bool:
    """Tell whether an output has every bit of what the device returned."""
    return digest((np.ascontiguousarray(got),)) == json.loads((GOLDEN / "output_hashes.json").read_text())[key]
