"""Wrong kernels that keep something from call to call, or change what belongs to the whole process."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from tests.quality.calls import tensors
from tests.quality.calls.exhibits import Exhibit, wrong
from tests.quality.calls.plain import attend
from tests.quality.calls.witnesses import dense, differs, is_apart, packed

state = partial(wrong, "state", head_dims=(64,))
torches = partial(state, library="torch", min_seqlen=1)
_HELD: dict[Any, Any] = {}


def halved(found):
    """Return outputs of which the first are half as large."""
    out, lse = found
    return out * 0.5 if isinstance(out, torch.Tensor) else out * out.dtype.type(0.5), lse


def is_off(exhibit: Exhibit, **sizes: Any) -> bool:
    """Tell whether a call right now gives another output than the right kernel."""
    arrays, options = dense(**sizes)
    return is_apart(exhibit.called(*arrays, **options)[0], attend(*arrays, **options)[0])


def behind(step: Callable[[Exhibit], Any], **sizes: Any) -> Callable[[Exhibit], bool]:
    """Return a witness: whether a call is right at first, and no longer after some step."""

    def witness(exhibit: Exhibit) -> bool:
        assert not is_off(exhibit, **sizes)
        step(exhibit)
        return is_off(exhibit, **sizes)

    return witness


# -- what happens between calls


def _fails(exhibit: Exhibit) -> None:
    q, k, v = dense()[0]
    with contextlib.suppress(ValueError):
        exhibit.called(q, k, v[..., :1, :, :].repeat(9, 1), softmax_scale=1.0)


@state("the call after one that raised finds a busy flag, and is wrong", behind(_fails))
def after_exception(q, k, v, **o):
    was_busy = _HELD.get("busy", False)
    _HELD["busy"] = True
    found = attend(q, k, v, **o)
    _HELD["busy"] = False
    return halved(found) if was_busy else found


@state("after a pause of a second the first call is wrong", behind(lambda exhibit: time.sleep(1.1)))
def after_pause(q, k, v, **o):
    now = time.monotonic()
    paused = now - _HELD.get("last", now) > 1
    found = attend(q, k, v, **o)
    _HELD["last"] = time.monotonic()
    return halved(found) if paused else found


# -- threads


def _by_threads(exhibit: Exhibit) -> bool:
    """Tell whether a call among those of four threads at once is off."""
    calls = [dense(seed=seed, seqlen_k=50) for seed in range(4)]
    wants = [attend(*arrays, **options)[0] for arrays, options in calls]
    start = threading.Barrier(len(calls))

    def is_wrong(index: int) -> bool:
        start.wait()
        arrays, options = calls[index]
        return any(is_apart(exhibit.called(*arrays, **options)[0], wants[index]) for _ in range(60))

    with ThreadPoolExecutor(len(calls)) as pool:
        return any(pool.map(is_wrong, range(len(calls))))


@state("all threads write their Q into one scratch", _by_threads)
def shared_scratch(q, k, v, **o):
    held = _HELD.setdefault(("scratch", q.shape), np.zeros_like(q))
    held[...] = q
    time.sleep(0.0002)  # as long as a launch
    return attend(held, k, v, **o)


_LOCAL = threading.local()
_LOCAL.exponent = 1.0


@state("a setting exists in the thread that loaded the module alone", _by_threads)
def thread_local(q, k, v, *, softmax_scale, **o):
    return attend(q, k, v, softmax_scale=softmax_scale * getattr(_LOCAL, "exponent", 0.5), **o)


@torches("whether gradients are recorded in this thread decides how K is read", lambda exhibit: _under_no_grad(exhibit))
def grad_mode(q, k, v, **o):
    return tensors.attend(q, k if torch.is_grad_enabled() else 0 * k, v, **o)


def _under_no_grad(exhibit: Exhibit) -> bool:
    with torch.no_grad():
        off = is_off(exhibit)
    return off != is_off(exhibit)


# -- settings of the process


def leaves(probe: Callable[[], Any], reset: Callable[[Any], Any]) -> Callable[[Exhibit], bool]:
    """Return a witness: whether a call changes a setting of the process, which is put back."""

    def witness(exhibit: Exhibit) -> bool:
        before = probe()
        try:
            exhibit.called(*dense()[0], softmax_scale=1.0)
            return probe() != before
        finally:
            reset(before)

    return witness


@state(
    "numpy's global generator is seeded anew",
    leaves(lambda: np.random.get_state()[1].tolist(), lambda before: None),  # noqa: NPY002
)
def reseeds_numpy(q, k, v, **o):
    np.random.seed(0)  # noqa: NPY002
    return attend(q, k, v, **o)


@state("Python's global generator is seeded anew", leaves(random.getstate, random.setstate))
def reseeds_python(q, k, v, **o):
    random.seed(0)
    return attend(q, k, v, **o)


@torches("torch's global generator is seeded anew", leaves(lambda: torch.get_rng_state().tolist(), lambda before: None))
def reseeds_torch(q, k, v, **o):
    torch.manual_seed(0)
    return tensors.attend(q, k, v, **o)


@torches("the default dtype stays changed", leaves(torch.get_default_dtype, torch.set_default_dtype))
def leaves_dtype(q, k, v, **o):
    torch.set_default_dtype(torch.float64)
    return tensors.attend(q, k, v, **o)


def _under_dtype(exhibit: Exhibit) -> bool:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return is_off(exhibit, size=6.0, seqlen_k=100)
    finally:
        torch.set_default_dtype(before)


@torches("scores have the default dtype", _under_dtype)
def takes_dtype(q, k, v, **o):
    kept = torch.zeros((), dtype=torch.get_default_dtype())
    wide = kept.dtype in (torch.float32, torch.float64)
    return tensors.attend(q if wide else (q.float() * 1.1).to(q.dtype), k, v, **o)


@torches(
    "deterministic algorithms stay on",
    leaves(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
)
def leaves_determinism(q, k, v, **o):
    torch.use_deterministic_algorithms(True)
    return tensors.attend(q, k, v, **o)


@state(
    "a variable of the environment stays changed",
    leaves(lambda: dict(os.environ), lambda b: os.environ.pop("OMP_WAIT_POLICY", None)),
)
def leaves_environment(q, k, v, **o):
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    return attend(q, k, v, **o)


@state("what numpy does about overflow stays changed", leaves(np.geterr, lambda before: np.seterr(**before)))
def leaves_errors(q, k, v, **o):
    np.seterr(all="ignore")
    return attend(q, k, v, **o)


# -- what was kept for equal shapes


def shapes(*arrays: np.ndarray) -> tuple[Any, ...]:
    """Return the key of a plan that knows nothing but shapes."""
    return tuple(x.shape for x in arrays)


def kept(name: str, arrays: tuple[np.ndarray, ...], value: Any) -> Any:
    """Return what the first call of these shapes had."""
    return _HELD.setdefault((name, shapes(*arrays)), value)


@state("softmax_scale is that of the first call of these shapes", differs(dense, after={"softmax_scale": 1.0}))
def kept_scale(q, k, v, *, softmax_scale, **o):
    return attend(q, k, v, softmax_scale=kept("scale", (q, k, v), softmax_scale), **o)


@state("the mask is that of the first call of these shapes", differs(dense, after={"causal": False}, causal=True))
def kept_mask(q, k, v, *, causal=False, **o):
    return attend(q, k, v, causal=kept("mask", (q, k), causal), **o)


@state(
    "softcap is that of the first call of these shapes",
    differs(dense, after={"softcap": 0.0}, softcap=1.0),
    features=("causal", "gqa", "softcap"),
)
def kept_softcap(q, k, v, *, softcap=0.0, **o):
    return attend(q, k, v, softcap=kept("softcap", (q, k), softcap), **o)


@state(
    "the window is that of the first call of these shapes",
    differs(dense, after={"window": (-1, -1)}, window=(1, 0), seqlen_k=5),
    features=("causal", "gqa", "window"),
)
def kept_window(q, k, v, *, window=(-1, -1), **o):
    return attend(q, k, v, window=kept("window", (q, k), window), **o)


@state(
    "the bounds of packed sequences are those of the first call of these shapes",
    differs(packed, after={"lengths_k": (5, 3)}, lengths_k=(3, 5)),
    features=("causal", "gqa", "varlen"),
)
def kept_lengths(q, k, v, **o):
    if o.get("cu_seqlens_k") is not None:
        same = (q, k, o["cu_seqlens_k"])
        o["cu_seqlens_k"] = kept(f"bounds {o['max_seqlen_k']}", same, np.array(o["cu_seqlens_k"]))
    return attend(q, k, v, **o)


def _other_values(exhibit: Exhibit) -> bool:
    (q, k, v), options = dense()
    exhibit.called(q, k, v, **options)
    k[...] = k[:, ::-1]
    return is_apart(exhibit.called(q, k, v, **options)[0], attend(q, k, v, **options)[0])


@state("K is kept in another format by its address and shape", _other_values)
def kept_by_address(q, k, v, **o):
    held = _HELD.get("address")
    if held is None or held[:3] != (k.__array_interface__["data"][0], k.shape, k.strides):
        held = k.__array_interface__["data"][0], k.shape, k.strides, np.array(k)
    _HELD["address"] = held
    return attend(q, held[3], v, **o)


# -- rare, and not written


def _often(exhibit: Exhibit) -> bool:
    random_state = random.getstate()
    try:
        return any(is_off(exhibit, seqlen_q=1, seqlen_k=2) for _ in range(40_000))
    finally:
        random.setstate(random_state)


@state("one launch in 5,000 loses its first row", _often, nightly=True)
def one_in_5000(q, k, v, **o):
    out, lse = attend(q, k, v, **o)
    if out.size and random.SystemRandom().random() < 1 / 5000:
        out.reshape(-1, out.shape[-1])[0] = 0
    return out, lse


def _over_garbage(exhibit: Exhibit) -> bool:
    """Tell whether a call is off where fresh memory holds NaN."""
    with patch.object(np, "empty_like", lambda x: np.full_like(x, np.nan)):
        return is_off(exhibit, seqlen_q=5, seqlen_k=2, causal=True)


@state("rows that see no key are not written", _over_garbage)
def unwritten_rows(q, k, v, **o):
    found, lse = attend(q, k, v, **o)
    out = np.empty_like(found)
    seen = ~np.isneginf(np.swapaxes(lse, -1, -2))
    out[seen] = found[seen]
    return out, lse


@torches("the last row of an odd number is not written", lambda exhibit: _when_filled(exhibit))
def unwritten_last(q, k, v, **o):
    found, lse = tensors.attend(q, k, v, **o)
    out = torch.empty_like(found)
    rows = q.shape[1] - (q.shape[1] > 128 and q.shape[1] % 2)
    out[:, :rows] = found[:, :rows]
    return out, lse


def _when_filled(exhibit: Exhibit) -> bool:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch then fills what it has not written with NaN
    try:
        return is_off(exhibit, seqlen_q=129)
    finally:
        torch.use_deterministic_algorithms(before)
