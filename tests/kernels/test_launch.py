"""The host side of a launch with the GPU's part replaced: what threads that launch at once are given, and what is refused."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs torch (extra 'gpu')")
pytest.importorskip("triton", reason="needs triton: pip install triton==3.6.0")
pytestmark = pytest.mark.optional


@pytest.fixture
def launched(monkeypatch):
    """(call, layouts) of every kernel that would have been started."""
    from fa3_kernels.gluon import launch

    found = []
    operand = launch.operand
    monkeypatch.setattr(launch, "operand", lambda x: operand(x)._replace(device="cuda:0"))
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(launch, "BoundCall", lambda *given: lambda call, layouts, *rest: found.append((call, layouts)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    yield found
    launch.forget()


def keys_of(call) -> int:
    """Keys that a dense forward call says there are: the fifth of its sizes."""
    return call.arguments[9 + 4]


def test_threads_that_decode_at_once_are_given_their_own_number_of_keys(launched):
    from fa3_kernels.gluon.launch import forward

    q, cache = torch.zeros(1, 1, 8, 64, dtype=torch.float16), torch.zeros(1, 4096, 2, 64, dtype=torch.float16)
    forward(q, cache[:, :129], cache[:, :129])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda first=first: [forward(q, *(cache[:, : first + n],) * 2) for n in range(120)])
            for first in (129, 130, 131, 132)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(launched) == 481
    assert all(keys_of(call) == layouts["k"][1][1] for call, layouts in launched)


def test_a_request_is_checked_again_where_its_key_says_nothing(launched):
    from fa3_kernels.gluon.launch import forward

    q, cache = torch.zeros(2, 4, 8, 64, dtype=torch.float16), torch.zeros(2, 64, 2, 64, dtype=torch.float16)
    forward(q, cache, cache)
    with pytest.raises(ValueError, match="one shape but for head_dim"):
        forward(q, cache, cache[:, :32])
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        forward(torch.zeros(q.numel() + 8, dtype=q.dtype)[1 : q.numel() + 1].view(q.shape), cache, cache)
    odd = torch.zeros(2 * (64 * 128 + 4), dtype=torch.float16).as_strided((2, 64, 2, 64), (64 * 128 + 4, 128, 64, 1))
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        forward(q, odd, odd)


def test_no_keys_start_no_kernel_and_give_zero_and_minus_infinity(launched):
    from fa3_kernels.gluon.launch import forward

    q, none = torch.zeros(2, 4, 8, 64, dtype=torch.float16), torch.zeros(2, 0, 2, 64, dtype=torch.float16)
    out, lse = forward(q, none, none)
    assert not launched
    assert bool((out == 0).all() and (lse == -torch.inf).all())
