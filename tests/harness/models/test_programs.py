"""Right programs of every kind give the same bits while they are watched, raise nothing, and have no finding."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fa3verify

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.optional
F = torch.nn.functional
Program = Callable[[], Any]


def drawn(*shape: int, dtype: Any = None, requires_grad: bool = False, seed: int = 0) -> Any:
    """Return a normal tensor."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)
    return x.requires_grad_(requires_grad)


def three(**options: Any) -> tuple[Any, Any, Any]:
    """Return q, k and v of 2 sequences, 4 heads, 24 rows and 16 channels."""
    return tuple(drawn(2, 4, 24, 16, seed=seed, **options) for seed in range(3))  # type: ignore[return-value]


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Call torch's function by the name that everybody uses."""
    return F.scaled_dot_product_attention(q, k, v, **options)


def in_place_after() -> Any:
    q, k, v = three()
    out = attend(q, k, v)
    return q.zero_(), k.add_(1), out.mul_(2)


def in_place_on_out() -> Any:
    q, k, v = three(requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attend(q, k, v).mul_(2).sum().backward()
    return q.grad, k.grad, v.grad


def one_tensor_for_all() -> Any:
    x = drawn(2, 4, 24, 16, requires_grad=True)
    attend(x, x, x, is_causal=True).square().sum().backward()
    return x.grad


def backward_twice() -> Any:
    q, k, v = three(requires_grad=True)
    out = attend(q, k, v)
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()
    return q.grad, k.grad, v.grad


def double_backward() -> Any:
    q, k, v = three(requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        dq.square().sum().backward()
    return q.grad, k.grad, v.grad


def one_gradient_after_another() -> Any:
    q, k, v = three(requires_grad=True)
    out = attend(q, k, v)
    dv = torch.autograd.grad(out.sum(), v, retain_graph=True)
    return dv, torch.autograd.grad(out.square().sum(), (q, k, v))


def hooks_of_the_user() -> Any:
    q, k, v = three(requires_grad=True)
    out = attend(q, k, v)
    out.register_hook(lambda gradient: gradient * 3)
    q.register_hook(lambda gradient: gradient * 5)
    k.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", x.grad * 7))
    out.square().sum().backward()
    return q.grad, k.grad, v.grad


def functional_transforms() -> Any:
    q, k, v = three()
    gradients = torch.func.grad(lambda x: attend(x, k, v).square().sum())(q)
    return gradients, torch.vmap(attend)(*(x[None].expand(3, -1, -1, -1, -1) for x in (q, k, v)))


def forward_mode() -> Any:
    q, k, v = three()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.func.jvp(lambda x: attend(x, k, v), (q,), (k,))


def checkpoints() -> Any:
    gradients = []
    for use_reentrant in (False, True):
        q, k, v = three(requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
        out.square().sum().backward()
        gradients += [q.grad, k.grad, v.grad]
    return gradients


def selective_checkpoint() -> Any:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(*_: Any, **__: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE

    def shifted(q: Any, k: Any, v: Any) -> Any:
        views = [x.view(8, 24, 16).view(2, 4, 24, 16) for x in (q, k, v)]
        return attend(*views).view(8, 24, 16).detach().aminmax()[0] + attend(*(x + 1 for x in views))

    found = []
    for _ in range(8):
        q, k, v = three(requires_grad=True)
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        checkpoint(shifted, q, k, v, use_reentrant=False, context_fn=contexts).square().sum().backward()
        found += [q.grad, k.grad, v.grad]
    return found


def autocast() -> Any:
    q, k, v = three(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k, v, attn_mask=drawn(24, 24))
    out.float().square().sum().backward()
    return out, q.grad, k.grad, v.grad


def half_precision() -> Any:
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        q, k, v = three(dtype=dtype, requires_grad=True)
        out = attend(q, k, v, is_causal=True, scale=0.3)
        out.square().sum().backward()
        found += [out, q.grad, k.grad, v.grad]
    return found


def threads() -> Any:
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        q, k, v = three(requires_grad=True)
        attend(q * i, k, v).sum().backward()
        found[i] = q.grad

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [found[i] for i in sorted(found)]


def nested_tensors() -> Any:
    x = torch.nested.nested_tensor([drawn(2, 5, 16), drawn(2, 7, 16)], layout=torch.jagged)
    q = torch.nested.nested_tensor([drawn(5, 32), drawn(7, 32)], layout=torch.jagged)
    del x
    y = q.unflatten(-1, [2, 16]).transpose(1, 2)
    return attend(y, y, y).values()


class Named(torch.Tensor):
    """A subclass that handles torch's function by itself."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._nn.scaled_dot_product_attention:
            return args[0] + 1
        return super().__torch_function__(func, types, args, kwargs or {})


def a_subclass() -> Any:
    q, k, v = three()
    return attend(q.as_subclass(Named), k, v).as_subclass(torch.Tensor)


class ByName(torch.overrides.TorchFunctionMode):
    """A mode that replaces attention, which it knows by its public name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return (args[0] @ args[1].mT / 4).softmax(-1) @ args[2]
        return func(*args, **kwargs or {})


def a_mode() -> Any:
    with ByName():
        return attend(*three())


def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def script_and_trace() -> Any:
    x = drawn(2, 4, 24, 16)
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        return torch.jit.script(scripted)(x), torch.jit.trace(scripted, (x,))(x)


def fake_tensors() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 4, 24, 16) for _ in range(3))
        return torch.zeros(tuple(attend(q, k, v).shape)).shape


class Attention(torch.nn.Module):
    """Attention as a module."""

    def forward(self, x: Any) -> Any:
        return attend(x, x, x)


def exported() -> Any:
    graph = torch.export.export(Attention(), (drawn(2, 4, 24, 16),)).graph
    return [str(node.target) for node in graph.nodes]


def flops() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = three(requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v).sum().backward()
    return torch.tensor(counter.get_total_flops())


def packed_by_saved_tensor_hooks() -> Any:
    q, k, v = three(requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy().copy(), torch.from_numpy):
        out = attend(q, k, v)
    out.sum().backward()
    return q.grad, k.grad


def strided_and_shared() -> Any:
    q = drawn(2, 24, 4, 16).transpose(1, 2)
    k = drawn(2, 1, 24, 16, seed=1).expand(2, 4, 24, 16)
    v = drawn(2, 1, 24, 32, seed=2)[..., ::2].expand(2, 4, 24, 16)
    grouped = attend(q, k[:, :2], v[:, :2], enable_gqa=True)
    return attend(q, k, v), grouped, attend(q[:, :1, :0], k[:, :1], v[:, :1]), attend(q[0], k[0], v[0])


def masks() -> Any:
    q, k, v = three()
    visible = torch.ones(2, 1, 24, 24, dtype=torch.bool).tril()
    hidden = visible.clone()
    hidden[:, :, 3] = False
    bias = drawn(4, 24, 24)
    return [attend(q, k, v, attn_mask=mask) for mask in (visible, hidden, bias, bias[:1], visible[0])]


def dropout() -> Any:
    torch.manual_seed(3)
    q, k, v = three()
    return attend(q, k, v, dropout_p=0.5), torch.rand(3)


def inference() -> Any:
    with torch.inference_mode():
        return attend(*three()) + 1


def learned_bias() -> Any:
    q, k, v = three(requires_grad=True)
    bias = drawn(1, 4, 24, 24, requires_grad=True)
    attend(q, k, v, attn_mask=bias).square().sum().backward()
    return q.grad, bias.grad


def parameters_and_frozen_operands() -> Any:
    q, k, v = (torch.nn.Parameter(x, requires_grad=i > 0) for i, x in enumerate(three()))
    attend(q, k, v).square().sum().backward()
    return k.grad, v.grad


def default_device() -> Any:
    with torch.device("meta"):
        return attend(*three()).shape


PROGRAMS = [
    x for x in list(globals().values()) if callable(x) and getattr(x, "__annotations__", None) == {"return": "Any"}
]


@pytest.mark.filterwarnings("ignore")  # torch's own, of what is slow or a prototype
@pytest.mark.parametrize(("program", "one_in"), [*((x, 1) for x in PROGRAMS), (selective_checkpoint, 2)])
def test_a_right_program_gives_the_same_bits_while_it_is_watched(
    program: Program, one_in: float, tmp_path: Path
) -> None:
    expected = program()
    with fa3verify.watch(one_in=one_in, budget=math.inf, folder=tmp_path) as found:
        got = program()
    assert torch.utils._pytree.tree_all(
        lambda same: same,
        torch.utils._pytree.tree_map(
            lambda x, y: torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, got, expected
        ),
    )
    assert found, str(found)
    assert not [x for x in found.reasons if "failures of the watch" in x], str(found)


def test_what_torch_raises_of_a_wrong_call_is_what_the_program_sees(tmp_path: Path) -> None:
    q, k, v = three()
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path):
        for args, options in (((q, k[..., :8], v), {}), ((q, k), {}), ((q, k, v), {"nonsense": 1})):
            with pytest.raises((RuntimeError, TypeError)):
                attend(*args, **options)


class Copying(torch.autograd.Function):
    """Attention whose backward has copies of the operands."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Any:
        ctx.operands = [x.detach().clone().requires_grad_() for x in operands]
        with torch.enable_grad():
            ctx.out = torch._C._nn.scaled_dot_product_attention(*ctx.operands)
        return ctx.out.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return torch.autograd.grad(ctx.out, ctx.operands, gradients)


def test_operands_and_outputs_that_are_overwritten_before_the_backward_are_judged_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *operands: Copying.apply(*operands))

    def program() -> Any:
        leaves = three(requires_grad=True)
        operands = [x * 1 for x in leaves]
        out = attend(*operands)
        loss = (out * drawn(2, 4, 24, 16, seed=5)).sum()
        for x in (*operands, out):
            x.detach().zero_()
        loss.backward()
        return [x.grad for x in leaves]

    expected = program()
    with fa3verify.watch(one_in=1, budget=math.inf, folder=tmp_path) as found:
        got = program()
    assert all(map(torch.equal, got, expected))
    assert found, str(found)
    assert [part.kind for part in found.checked] == ["outputs", "gradients"]
