"""Scripts about kernels of a GPU decide rightly: a sound library is mended, one with the defect shows it.

Each is run here on a CPU, with a stand-in for its library that computes in float64.
"""

from __future__ import annotations

import contextlib
import ctypes
import runpy
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch (extra 'adapters')")
from torch.overrides import TorchFunctionMode  # noqa: E402

from tests.reports.test_issue import ON_A_CPU  # noqa: E402

FOLDER = Path(__file__).parents[2] / "reports" / "findings" / "scripts"
# Arguments of the operators of vLLM and SGLang, of which the stand-in takes these.
NAMES = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "seqused_k",
    "max_seqlen_q",
    "q_descale",
    "k_descale",
    "v_descale",
    "softmax_scale",
    "window_size_right",
    "k_new",
    "v_new",
    "rotary_cos",
    "rotary_sin",
)


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that a script wants on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        return func(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))


def attend(q, k, v):
    """Return out and lse of one sequence, (rows, heads, head_dim), in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v), s.logsumexp(-1)


def rotated(defect, q, k, v, given):
    """Return out of a call that appends and rotates, whose window has no left side."""
    stored, count, right = int(given["seqused_k"][0]), len(q), given["window_size_right"]

    def turned(x, positions):
        cos, sin = (given[name].double()[positions][:, None] for name in ("rotary_cos", "rotary_sin"))
        a, b = x.double().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    own = stored + torch.arange(count)
    q = turned(q, torch.full_like(own, stored) if defect == "wide" and right >= count - 1 else own)
    k = torch.cat([k[0, :stored].double(), turned(given["k_new"][0], own)])
    v = torch.cat([v[0, :stored], given["v_new"][0]]).double()
    s = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.arange(len(k)) > (own + right)[:, None]
    return torch.einsum("hqk,khd->qhd", s.masked_fill(hidden, -torch.inf).softmax(-1), v)


def flash3(defect):
    """Return a forward like that of FlashAttention-3, with a defect or without."""

    def forward(q, k, v, **given):
        descale = given.get("q_descale")
        small = descale is not None and float(descale.flatten()[0]) ** 2 < 2.0**-124
        if k.ndim == 4 and k.shape[1] > 2048:  # the output is 1
            lost = k.shape[1] / 2**18 if defect == "chained" else 0.0
            return torch.full(q.shape, 1 - lost), None
        q, k, v = (x.double() for x in (q, k, v))
        if "cu_seqlens_q" in given and "cu_seqlens_k" in given:
            ends = list(zip(*(given[f"cu_seqlens_{x}"].tolist() for x in "qk"), strict=True))
            parts = [(q[a:c], k[b:d], v[b:d]) for (a, b), (c, d) in pairwise(ends)]
        else:
            used = given["seqused_k"].tolist()[0] if "seqused_k" in given else k.shape[1]
            parts = [(q.reshape(-1, *q.shape[-2:]), k[0, :used], v[0, :used])]
        outs, lses = zip(*(attend(*part) for part in parts), strict=True)
        out = torch.cat(outs).bfloat16()
        lse = torch.cat(lses, 1)
        if defect == "leak" and v.isnan().any():
            out = out * torch.nan
        if defect == "flush" and small:
            out = out * torch.nan
            lse = lse - torch.inf
        if defect == "empty" and not k.shape[0]:
            lse = -lse
        if defect == "tile" and len(out) == 1:
            out = out * 1.01
        is_batch = "cu_seqlens_q" not in given
        return (out[None], lse[None]) if is_batch else (out, lse)

    return forward


def flash2(defect):
    def forward(q, k, v, *_):
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        out, lse = (s.softmax(-1) @ v.double()).half(), s.logsumexp(-1)
        if defect == "weights":
            out = torch.where(lse[..., None] > 1e4, out * 1.002, out)
        return out, lse.nan_to_num(1.0) if defect == "nan" else lse

    return forward


def efficient(defect):
    def forward(q, k, v, *_):
        out, lse = flash2(None)(q, k, v)
        return out, torch.where(lse.isinf(), 0.0, lse) if defect else lse

    return forward


def served(defect):
    def operator(*given):
        call = {name: x for name, x in zip(NAMES, given, strict=True) if x is not None}
        if "rotary_cos" in call:
            return (rotated(defect, call["q"], call["k"], call["v"], call),)
        return flash3(defect)(**call)

    schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in NAMES])
    return SimpleNamespace(
        default=type("Operator", (), {"_schema": schema, "__call__": lambda self, *x: operator(*x)})()
    )


def cudnn_backward(defect):
    def backward(dout, q, k, v, out, lse, *_):
        is_broken = defect and float(lse.mean()) < -88.7
        return [x * torch.nan if is_broken else x for x in (q, k, v)]

    return backward


def strided(monkeypatch, defect):
    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return q + k + v

        @staticmethod
        def backward(ctx, dout):
            misread = dout * torch.nan if defect and not dout.is_contiguous() else dout
            return misread, misread, misread

    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", Added.apply)


def dew(monkeypatch, defect):
    jax = pytest.importorskip("jax", reason="needs JAX")
    jnp = jax.numpy

    def ffi_call(name, results):
        def call(*operands, **attributes):
            made = [jnp.zeros(x.shape, x.dtype) for x in results]
            is_broken = defect and name.endswith("bwd") and bool(jnp.isnan(operands[0]).any())
            return [x * jnp.nan for x in made] if is_broken else made

        return call

    monkeypatch.setattr(
        ctypes, "CDLL", lambda path: dict.fromkeys(("dew_flash3_mha_varlen_fwd", "dew_flash3_mha_varlen_bwd"))
    )
    monkeypatch.setattr(jax.ffi, "pycapsule", lambda function: function)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *x, **y: None)
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)


# The defect of each stand-in, as the script is to find it; of those that start a process, how it ends.
SCRIPTS = {
    "flash3_small_descales": "flush",
    "flash3_lse_without_keys": "empty",
    "flash3_one_query": "tile",
    "flash3_chained_accumulator": "chained",
    "flash3_packed_neighbour": "leak",
    "flash3_nan_behind_a_cache": "leak",
    "vllm_nan_behind_a_cache": "leak",
    "sglang_nan_behind_a_cache": "leak",
    "sglang_rotary_of_a_wide_window": "wide",
    "dew_packed_gradients": "leak",
    "flash2_weights_of_splits": "weights",
    "flash2_nan_in_a_split": "nan",
    "flash2_packed_groups": (1, "Traceback\nRuntimeError: shape '[2, 1, 2, 64]' is invalid for input of size 128"),
    "efficient_lse_without_weight": "finite",
    "cudnn_low_scores": "low",
    "cudnn_one_query_and_key": (-11, ""),
    "cudnn_broadcast_bias": (1, "torch.AcceleratorError: CUDA error: misaligned address"),
    "sdpa_unaligned_operands": (1, "torch.AcceleratorError: CUDA error: misaligned address"),
    "cudnn_strided_gradient": "gaps",
}


def test_every_script_that_needs_a_gpu_is_decided_here():
    needing = {path.stem for path in FOLDER.glob("*.py") if path not in ON_A_CPU}
    assert needing == set(SCRIPTS)


@pytest.mark.parametrize("is_right", [True, False], ids=["sound", "defect"])
@pytest.mark.parametrize("stem", SCRIPTS)
def test_a_sound_library_is_mended_and_a_defect_shows(stem, is_right, tmp_path, monkeypatch, capsys):
    defect = None if is_right else SCRIPTS[stem]
    library = tmp_path / "library"
    library.touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "no GPU")
    monkeypatch.setattr(torch.ops, "fa3_fwd", SimpleNamespace(fwd=flash3(defect)), raising=False)
    for space in ("_vllm_fa3_C", "sgl_kernel"):
        monkeypatch.setattr(torch.ops, space, SimpleNamespace(fwd=served(defect)), raising=False)
    aten = torch.ops.aten
    monkeypatch.setattr(aten, "_scaled_dot_product_flash_attention", flash2(defect))
    monkeypatch.setattr(aten, "_scaled_dot_product_efficient_attention", efficient(defect))
    monkeypatch.setattr(aten, "_scaled_dot_product_cudnn_attention", lambda *x: (*flash2(None)(*x[:3]), *range(7)))
    monkeypatch.setattr(aten, "_scaled_dot_product_cudnn_attention_backward", cudnn_backward(defect))
    code, said = defect if isinstance(defect, tuple) else (0, "")
    process = SimpleNamespace(returncode=code, stderr=said, stdout="" if defect else "differs by 0")
    monkeypatch.setattr(subprocess, "run", lambda *x, **y: process)
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"")
    if stem.startswith("dew"):
        dew(monkeypatch, defect)
    if stem == "cudnn_strided_gradient":
        strided(monkeypatch, defect)
    monkeypatch.setattr(sys, "argv", [stem, str(library)])
    with OnCpu(), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{stem}.py"))
    printed = capsys.readouterr().out
    assert ("mended: " in printed, "shows: " in printed, int(ended.value.code)) == (
        is_right,
        not is_right,
        not is_right,
    )
