"""The library's face: FlashAttention-3's signature, operators torch can trace, short refusals. Needs torch, no GPU."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.kernels.no_gpu import no_gpu

pytestmark = pytest.mark.optional
torch = pytest.importorskip("torch", reason="needs torch")

# Upstream's parameters, in order (hopper/flash_attn_interface.py of FlashAttention-3).
UPSTREAM = [
    *("q", "k", "v", "softmax_scale", "causal", "qv", "q_descale", "k_descale", "v_descale", "window_size"),
    *("attention_chunk", "softcap", "num_splits", "pack_gqa", "deterministic", "sm_margin", "return_attn_probs"),
]
UPSTREAM_VARLEN = [
    *UPSTREAM[:3],
    *["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k"],
    *UPSTREAM[3:],
]
FORMATS = ("float16", "bfloat16", "float8_e4m3fn")


def api():
    from fa3_kernels import api

    return api


def tensors(dtype: str = "float16", *, batch=2, seqlen_q=8, seqlen_k=16, nheads=4, nheads_kv=2, d=64, dv=64):
    kind = getattr(torch, dtype)
    shapes = ((batch, seqlen_q, nheads, d), (batch, seqlen_k, nheads_kv, d), (batch, seqlen_k, nheads_kv, dv))
    return [torch.zeros(shape, dtype=torch.float32).to(kind) for shape in shapes]


def fake(function, *args, **options):
    """Run a function on fake CUDA tensors, as torch.compile does; needs no GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def on_gpu(x):
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

    with FakeTensorMode():
        return function(*map(on_gpu, args), **{name: on_gpu(x) for name, x in options.items()})


def test_signatures_begin_with_upstreams():
    for function, want in ((api().flash_attn_func, UPSTREAM), (api().flash_attn_varlen_func, UPSTREAM_VARLEN)):
        parameters = inspect.signature(function).parameters
        assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == want
    defaults = {n: p.default for n, p in inspect.signature(api().flash_attn_func).parameters.items()}
    assert (defaults["window_size"], defaults["num_splits"], defaults["softcap"]) == ((-1, -1), 1, 0.0)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("dv", [64, 32])
def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones(dtype, dv):
    q, k, v = tensors(dtype, dv=dv)
    out, lse = fake(api().flash_attn_func, q, k, v, return_attn_probs=True)
    assert out.shape == (2, 8, 4, dv)
    assert out.dtype == {"float8_e4m3fn": torch.bfloat16}.get(dtype, q.dtype)
    assert out.is_contiguous()
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 8), torch.float32, True)


@pytest.mark.parametrize("dtype", FORMATS)
def test_fake_outputs_of_packed_sequences(dtype):
    q, k, v = (x.flatten(0, 1) for x in tensors(dtype))
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    out, lse = fake(api().flash_attn_varlen_func, q, k, v, starts, 2 * starts, 8, 16, return_attn_probs=True)
    assert (out.shape, lse.shape, lse.dtype) == ((16, 4, 64), (4, 16), torch.float32)


def test_outputs_are_contiguous_for_views_of_a_packed_projection():
    packed = torch.zeros(2, 8, 3, 4, 64, dtype=torch.float16)
    assert fake(api().flash_attn_func, *packed.unbind(2)).is_contiguous()


def test_operators_are_registered_with_a_functional_schema():
    api()
    for name, arguments, returns in (
        ("forward", 18, 2),
        ("forward_varlen", 22, 2),
        ("inference", 18, 2),
        ("inference_varlen", 22, 2),
        ("backward", 14, 3),
        ("backward_varlen", 18, 3),
    ):
        schema = getattr(torch.ops.fa3verify, name).default._schema
        assert len(schema.arguments) == arguments
        assert [str(r.type) for r in schema.returns] == ["Tensor"] * returns
        assert not schema.is_mutable


def test_the_functions_can_be_traced_without_a_graph_break():
    function = torch.compile(
        lambda q, k, v: api().flash_attn_func(q, k, v, causal=True), backend="eager", fullgraph=True
    )
    with torch.no_grad():
        shapes = fake(lambda *x: function(*x).shape, *tensors())
    assert shapes == (2, 8, 4, 64)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_code_has_the_operator_with_a_gradient(strict):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return api().flash_attn_func(q, k, v)

    exported = fake(lambda *x: torch.export.export(Attention(), x, strict=strict), *tensors())
    assert "fa3verify.forward.default" in {str(x.target) for x in exported.graph.nodes}


REFUSALS = (
    ({"qv": 1}, "qv .* is not supported"),
    ({"sm_margin": -1}, "sm_margin must be >= 0, got -1"),
    ({"softmax_scale": -1.0}, "softmax_scale must be finite and > 0, got -1"),
    ({"softcap": float("nan")}, "softcap must be finite and >= 0, got nan"),
    ({"descale_blocks": (64, 0, 0)}, "blocks of 64 rows for q_descale, which is None"),
)


@pytest.mark.parametrize(("options", "message"), REFUSALS)
def test_an_unsupported_option_is_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        fake(api().flash_attn_func, *tensors(), **options)
    assert "\n" not in str(caught.value)


def test_illegal_tensors_are_refused():
    def flash(*args, **options):
        return fake(api().flash_attn_func, *args, **options)

    q, k, v = tensors()
    with pytest.raises(ValueError, match="must share float16, bfloat16 or float8_e4m3fn"):
        flash(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match=r"nheads must be a multiple of nheads_kv, got 3 and 2"):
        flash(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8 \(TMA\), got 60"):
        flash(*(x[..., :60] for x in (q, k, v)))
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16"):
        flash(*(x[..., :56] for x in tensors("float8_e4m3fn")))
    with pytest.raises(ValueError, match=r"strides of k must be multiples of 16 bytes"):
        flash(q, torch.zeros(2, 16, 2, 68, dtype=torch.float16)[..., :64], v)
    with pytest.raises(ValueError, match="one shape but for head_dim"):
        flash(q, k, v[:, :8])
    with pytest.raises(ValueError, match=r"must be \(batch, seqlen, nheads, head_dim\)"):
        flash(q[0], k[0], v[0])


def test_descales_must_fit():
    def flash(*args, **options):
        return fake(api().flash_attn_func, *args, **options)

    fp8, fp16 = tensors("float8_e4m3fn"), tensors()
    good = torch.ones(2, 2)
    assert flash(*fp16, v_descale=good).dtype == torch.float16  # ignored, as upstream's
    with pytest.raises(ValueError, match=r"q_descale must be \(2, 2\) \(batch, nheads_kv\), got \(2, 4\)"):
        flash(*fp8, q_descale=torch.ones(2, 4))
    with pytest.raises(ValueError, match="k_descale must be float32"):
        flash(*fp8, k_descale=good.double())
    with pytest.raises(ValueError, match=r"must be \(2, 2, blocks\)"):
        flash(*fp8, k_descale=good, descale_blocks=(0, 128, 0))
    assert flash(*fp8, q_descale=good, k_descale=good, v_descale=good).dtype == torch.bfloat16


def test_a_number_is_the_descale_of_every_sequence_and_head(monkeypatch):
    given = []
    monkeypatch.setattr(api(), "forward", lambda *args, descales, **more: given.append(descales) or (None, None))
    q, k, v = tensors("float8_e4m3fn")
    starts = torch.tensor([0, 8, 16, 16], dtype=torch.int32)
    api().flash_attn_func(q, k, v, k_descale=0.5, v_descale=torch.ones(2, 2))
    api().flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, 2 * starts, 8, 16, q_descale=3)
    assert torch.equal(given[0].k, torch.full((2, 2), 0.5))
    assert (given[0].q, given[0].v.tolist()) == (None, [[1, 1], [1, 1]])
    assert torch.equal(given[1].q, torch.full((3, 2), 3.0))
    for x in (0.0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match="v_descale must be a float32 tensor, or a number that is finite and > 0"):
            api().flash_attn_func(q, k, v, v_descale=x)


def test_a_number_is_a_descale_for_the_traced_operators_too():
    q, k, v = tensors("float8_e4m3fn")
    assert fake(api().flash_attn_func, q, k, v, q_descale=0.5, k_descale=2).shape == q.shape


def test_descales_of_16_bits_change_nothing_that_a_kernel_gets():
    q, k, v = tensors()
    cache = k.unflatten(0, (2, 1)).flatten(0, 1)
    given = {"q_descale": torch.ones(7), "k_descale": 0.5, "v_descale": torch.full((2, 2), torch.nan)}
    for run in (
        lambda **x: api().flash_attn_func(q, k, v, **x),
        lambda **x: api().flash_attn_with_kvcache(q, cache, cache, **x),
    ):
        with no_gpu() as started:
            run()
            run(**given)
        half = len(started) // 2
        assert [(x.kernel, len(x.arguments)) for x in started[:half]] == [
            (x.kernel, len(x.arguments)) for x in started[half:]
        ]


def test_packed_sequences_need_sound_starts():
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be int32 \(3,\), contiguous, on cuda:0, got torch.int64"):
        fake(api().flash_attn_varlen_func, q, k, v, starts.long(), starts, 8, 16)
    with pytest.raises(ValueError, match="must have one length, got 3 and 2"):
        fake(api().flash_attn_varlen_func, q, k, v, starts, starts[:2], 8, 16)
    with no_gpu() as started:
        for name in ("seqused_q", "seqused_k"):
            for used in (starts, starts[:2].long(), starts[:1]):
                with pytest.raises(ValueError, match=rf"{name} must be int32 \(2,\) on cpu, got"):
                    api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, 8, 16, **{name: used})
    assert not started


@pytest.mark.parametrize("one", [np.int64, np.int32, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)])
def test_the_longest_length_may_be_any_integer(one):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    cache = torch.zeros(2, 16, 2, 64, dtype=q.dtype)
    with no_gpu() as started:
        for longest in (8, one(8)):
            api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, longest, 2 * longest)
            api().flash_attn_with_kvcache(q, cache, cache, cu_seqlens_q=starts, max_seqlen_q=longest)
            api().flash_attn_with_kvcache(q.view(2, 8, 4, 64), cache, cache, max_seqlen_k=longest)
        kernels = [x.kernel for x in started]
    assert kernels == 2 * kernels[: len(kernels) // 2] != []


@pytest.mark.parametrize("longest", [8.0, torch.tensor(8.0), torch.tensor([8, 8]), None, "8"])
def test_the_longest_length_must_be_an_integer(longest):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_seqlen_q must be an integer, got"):
        api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, longest, 16)
    with pytest.raises(ValueError, match="max_seqlen_k must be an integer, got"):
        api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, 8, longest)


@pytest.mark.parametrize("missing", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_starts_of_queries_and_of_keys_come_together(missing, is_traced):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": 2 * starts} | {missing: None}
    run = api().flash_attn_varlen_func
    options = {**given, "max_seqlen_q": 8, "max_seqlen_k": 16}
    with pytest.raises(ValueError, match=f"must be given together, got None for {missing}"):
        fake(run, q, k, v, **options) if is_traced else run(q, k, v, **options)


def test_only_hopper_is_accepted():
    from fa3_kernels.gluon import launch as operators

    operators.check_capability((9, 0), "H200")
    for capability in ((8, 0), (10, 0)):
        with pytest.raises(ValueError, match=rf"compute capability 9.0\) is needed, got GPU with {capability[0]}.0"):
            operators.check_capability(capability, "GPU")


def test_cpu_tensors_are_refused():
    q, k, v = tensors()
    for operand in (q, q.detach().requires_grad_()):
        with pytest.raises(ValueError, match="must be on one Hopper GPU, got cpu"):
            api().flash_attn_func(operand, k, v)


LENGTHS = st.lists(st.tuples(*(st.integers(0, 9),) * 4), min_size=1, max_size=6)  # queries, keys, and of both used


@given(LENGTHS, st.booleans(), st.booleans())
def test_used_rows_are_sequences_and_all_other_rows_meet_nothing(lengths, is_q, is_k):
    from fa3_kernels.gluon.arguments import Packed, with_used

    all_q, all_k, used_q, used_k = (torch.tensor(x, dtype=torch.int32) for x in zip(*lengths, strict=True))
    starts = [torch.nn.functional.pad(x.cumsum(0), (1, 0)).int() for x in (all_q, all_k)]
    used = (used_q if is_q else None, used_k if is_k else None)
    q = torch.zeros(int(all_q.sum()), 1, 8)
    given = Packed(*starts, 9, 9)
    packed, parts = with_used(q, given, *used)
    assert parts == 1 + is_q + is_k
    assert (packed is given) == (parts == 1)
    found, want = (torch.zeros(int(all_q.sum()), int(all_k.sum())) for _ in "fw")
    for i, (a, b) in enumerate(zip(*(packed[j].tolist() for j in (0, 1)), strict=True)):
        if i < parts * len(lengths):
            found[a : packed[0][i + 1], b : packed[1][i + 1]] = i // parts + 1
    for i in range(len(lengths)):
        rows = min(used_q[i], all_q[i]) if is_q else all_q[i]
        keys = min(used_k[i], all_k[i]) if is_k else all_k[i]
        want[starts[0][i] : starts[0][i] + rows, starts[1][i] : starts[1][i] + keys] = i + 1
    assert torch.equal(found, want)
    for x, original in zip(packed[:2], starts, strict=True):
        assert x.dtype == torch.int32
        assert (x.diff() >= 0).all()
        assert x[-1] == original[-1]


def test_a_descale_of_a_sequence_is_that_of_all_its_parts(monkeypatch):
    given = []
    monkeypatch.setattr(
        api(), "forward", lambda *_, descales, packed, **__: given.append((descales, packed)) or (None, None)
    )
    q, k, v = (x.flatten(0, 1) for x in tensors("float8_e4m3fn"))
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    used = torch.tensor([3, 8], dtype=torch.int32)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    api().flash_attn_varlen_func(q, k, v, starts, 2 * starts, 8, 16, used, used, k_descale=scales, v_descale=0.5)
    ((descales, packed),) = given
    assert packed.cu_seqlens_q.tolist() == [0, 3, 8, 8, 16, 16, 16]
    assert packed.cu_seqlens_k.tolist() == [0, 3, 3, 16, 24, 24, 32]
    assert descales.k.tolist() == [[1.0, 2.0]] * 3 + [[3.0, 4.0]] * 3
    assert (descales.q, descales.v.shape) == (None, (6, 2))


def test_without_queries_outputs_are_empty_and_gradients_zero():
    q, k, v = tensors()
    starts = torch.zeros(3, dtype=torch.int32)
    with no_gpu() as started:
        for empty, keys in ((q[:, :0], (k, v)), (q[:0], (k[:0], v[:0]))):
            leaf = empty.clone().requires_grad_()
            out, lse = api().flash_attn_func(leaf, *keys, return_attn_probs=True)
            assert (out.shape, lse.shape) == (empty.shape, (len(empty), 4, empty.shape[1]))
            assert torch.autograd.grad(out.sum(), leaf)[0].shape == empty.shape
        rows = (q.flatten(0, 1)[:0], k.flatten(0, 1), v.flatten(0, 1))
        out = api().flash_attn_varlen_func(*rows, starts, torch.tensor([0, 5, 32], dtype=torch.int32), 0, 27)
        assert out.shape == (0, 4, 64)
        nothing = torch.zeros(1, dtype=torch.int32)
        assert api().flash_attn_varlen_func(*(x[:0] for x in rows), nothing, nothing, 0, 0).shape == (0, 4, 64)
        assert api().flash_attn_func(*(x[:0] for x in tensors("float8_e4m3fn"))).dtype == torch.bfloat16
    assert not started


def test_a_forward_of_e4m3_takes_operands_that_require_a_gradient_and_a_backward_raises():
    q, k, v = (x.requires_grad_() for x in tensors("float8_e4m3fn"))
    with no_gpu() as started:
        out = api().flash_attn_func(q, k, v)
        assert [x.kernel for x in started] == ["forward_fp8"]
        with pytest.raises(ValueError, match="gradients are of float16 and bfloat16 operands"):
            out.sum().backward()


@pytest.mark.parametrize("window", [np.array([3, 0]), torch.tensor([3, 0]), (np.int64(3), torch.tensor(0)), [3, 0]])
def test_numbers_may_come_from_numpy_and_torch(window):
    q, k, v = tensors()
    with no_gpu() as started:
        api().flash_attn_func(q, k, v, window_size=(3, 0), num_splits=2, softcap=2.0, causal=True)
        api().flash_attn_func(
            q, k, v, window_size=window, num_splits=np.int32(2), softcap=np.float32(2), causal=np.bool_(True)
        )
    assert len(started) == 4
    assert [len(x.arguments) for x in started[:2]] == [len(x.arguments) for x in started[2:]]


def test_a_last_dimension_that_is_not_contiguous_is_copied_and_has_a_gradient():
    leaves = [x.transpose(1, 3).contiguous().requires_grad_() for x in tensors()]
    with no_gpu() as started:
        out = api().flash_attn_func(*(x.transpose(1, 3) for x in leaves))
        found = torch.autograd.grad(out.sum(), leaves)
    assert started[0].kernel == "forward_fp16"
    assert [x.shape for x in found] == [x.shape for x in leaves]


def test_multiprocessors_that_are_left_to_others_get_no_cta():
    q, k, v = tensors(batch=8, nheads=64, nheads_kv=64)
    with no_gpu() as started:
        for margin in (0, 32, 1000):
            leaf = q.clone().requires_grad_()
            api().flash_attn_func(leaf, k, v, sm_margin=margin).sum().backward()
    grids = [x.grid[0] for x in started if x.kernel in ("forward_fp16", "backward")]
    assert grids[::2] == [132, 100, 1]
    assert grids[1] == 132
    assert grids[3] <= 100
    assert grids[5] == 1


@pytest.mark.parametrize("splits", [1, 4])
def test_heads_of_groups_beyond_64_are_not_packed_and_the_launch_is_the_same(splits):
    q, k, v = tensors(nheads=130, nheads_kv=2)
    with no_gpu() as started:
        for pack in (False, True):
            api().flash_attn_func(q, k, v, pack_gqa=pack, num_splits=splits)
    half = len(started) // 2
    records = [[y for y in x.arguments if type(y).__name__ == "Variant"] for x in started]
    assert records[:half] == records[half:]
    assert [x.grid for x in started[:half]] == [x.grid for x in started[half:]]


def test_an_output_is_put_where_the_caller_wants_it_or_refused():
    q, k, v = tensors()
    memory = torch.full((2, 4, 8, 64), torch.nan).half().transpose(1, 2)
    with no_gpu():
        assert api().flash_attn_func(q, k, v, out=memory) is memory
        with pytest.raises(ValueError, match=r"out must be float16 \(2, 8, 4, 64\) on cpu, got torch.float32"):
            api().flash_attn_func(q, k, v, out=memory.float())
        with pytest.raises(ValueError, match="out for such as want no gradient"):
            api().flash_attn_func(q.requires_grad_(), k, v, out=memory)


@pytest.mark.parametrize("of", ["out", "lse"])
@pytest.mark.parametrize("wants", range(4))
def test_operands_of_attention_with_sinks_may_require_a_gradient_and_a_backward_raises(wants, of):
    operands = [*(x.flatten(0, 1) for x in tensors()), torch.zeros(4)]
    operands[wants].requires_grad_()
    *rows, sinks = operands
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    lengths = (starts, 2 * starts, 8, 16)
    with no_gpu() as started:
        out, lse = api().flash_attn_varlen_func(*rows, *lengths, sinks=sinks, return_attn_probs=True)
        assert started
        with pytest.raises(ValueError, match="with sinks, has no gradient: call it under"):
            (out if of == "out" else lse).sum().backward()
        with torch.no_grad():
            assert not api().flash_attn_varlen_func(*rows, *lengths, sinks=sinks).requires_grad
        with pytest.raises(ValueError, match="sinks and out are for calls that are not traced"):
            fake(lambda *given: api().flash_attn_varlen_func(*given[:3], *lengths, sinks=given[3]), *operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_are_merged_by_their_weights(dtype):
    """The law: attention over all keys is what merging attention over parts of them gives."""
    torch.manual_seed(0)
    scores, values = torch.randn(3, 5, 2, 4, 7, dtype=torch.float64), torch.randn(3, 5, 2, 7, 8, dtype=torch.float64)
    scores[1:, 0] = -torch.inf  # one part alone
    scores[:, 1] = -torch.inf  # no part has a key
    lse = scores.logsumexp(-1)
    out = torch.einsum("pbhqk,pbhkd->pbqhd", (scores - lse.where(lse.isfinite(), 0.0)[..., None]).exp(), values)
    out = out.float().masked_fill(lse.isneginf().transpose(-1, -2)[..., None], torch.nan)  # which must not be seen
    found, of_lse = api().flash_attn_combine(out, lse.float().transpose(-1, -2), out_dtype=dtype)
    flat, all_values = scores.movedim(0, -2).flatten(-2), values.movedim(0, -3).flatten(-3, -2)
    want = torch.einsum("bhqk,bhkd->bqhd", flat.softmax(-1).nan_to_num(), all_values)
    assert found.dtype == dtype
    assert torch.allclose(found.double(), want, atol=2e-3 if dtype == torch.float16 else 1e-6)
    assert torch.allclose(of_lse.double(), flat.logsumexp(-1).transpose(-1, -2), atol=1e-6)


def test_partial_results_that_do_not_fit_are_refused():
    out, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)
    for x, y in ((out, lse[:1]), (out.half(), lse), (out, lse.double())):
        with pytest.raises(ValueError, match="must be float32 of one shape but for head_dim, got"):
            api().flash_attn_combine(x, y)
    with pytest.raises(ValueError, match=r"out must be float16 \(3, 4, 8\)"):
        api().flash_attn_combine(out, lse, torch.zeros(3, 4, 8), torch.float16)


def test_all_heads_in_one_tensor_are_taken_apart(monkeypatch):
    seen = []
    monkeypatch.setattr(api(), "flash_attn_func", lambda *x, **options: seen.append((x, options)))
    packed, heads = torch.arange(2 * 5 * 3 * 2 * 8).view(2, 5, 3, 2, 8), torch.arange(2 * 5 * 8 * 8).view(2, 5, 8, 8)
    api().flash_attn_qkvpacked_func(packed, 0.5, True, softcap=2.0)
    api().flash_attn_qkvpacked_func(heads, num_heads_q=4)
    assert all(torch.equal(x, packed[:, :, i]) for i, x in enumerate(seen[0][0][:3]))
    assert seen[0][0][3:] == (0.5, True)
    assert seen[0][1]["softcap"] == 2.0
    wanted = (heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:])
    assert all(torch.equal(x, y) for x, y in zip(seen[1][0][:3], wanted, strict=True))
    for bad, options in ((heads, {}), (heads, {"num_heads_q": 5}), (heads, {"num_heads_q": 8}), (packed[:, :, :2], {})):
        with pytest.raises(ValueError, match="qkv must be"):
            api().flash_attn_qkvpacked_func(bad, **options)


UPSTREAM_OTHERS = {
    "flash_attn_qkvpacked_func": [
        *("qkv", "softmax_scale", "causal", "q_descale", "k_descale", "v_descale", "window_size", "attention_chunk"),
        *("softcap", "deterministic", "num_heads_q", "sm_margin", "return_attn_probs"),
    ],
    "flash_attn_combine": ["out_partial", "lse_partial", "out", "out_dtype"],
    "get_scheduler_metadata": [
        *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"),
        *("qkv_dtype", "headdim_v", "cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size"),
        *("max_seqlen_k_new", "causal", "window_size", "attention_chunk", "has_softcap", "num_splits", "pack_gqa"),
        "sm_margin",
    ],
}


@pytest.mark.parametrize("name", UPSTREAM_OTHERS)
def test_the_other_functions_have_upstreams_parameters(name):
    parameters = inspect.signature(getattr(api(), name)).parameters
    assert [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == UPSTREAM_OTHERS[name]
