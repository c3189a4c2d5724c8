"""The kernels behind Transformers' models on a GPU: packed sequences and positions along several axes, with gradients.

Outputs and gradients are those of each sequence alone in plain float32. What the kernels round to float16 is a few
thousandths here; a sequence that sees another, or starts beyond the rows, differ by tenths and more.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.kernels.plain_attention import POSITIONS, QWEN2_VL, attention

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
DEVICE = "cuda"
CLOSE = 2.0**-5  # of values of magnitude 1, or of the largest one
LONG = 67  # times as many tokens; no multiple of a tile


def heads(rows, *, head_dim=64, dtype=torch.float16):
    """Query, key and value of a batch of one as Transformers hands them over, and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(1, rows, n, head_dim) for n in (4, 2, 2, 4)]
    *qkv, dout = (torch.randn(x, generator=generator).to(DEVICE, dtype) for x in shapes)
    return [x.transpose(1, 2).requires_grad_() for x in qkv], dout


def assert_close(found, wanted, name=""):
    wanted = wanted.to(found.device).float()
    error = (found.float() - wanted).abs().max()
    assert torch.isfinite(found).all(), name
    assert error <= CLOSE * max(1.0, float(wanted.abs().max())), (name, float(error))


def of_each_alone(qkv, dout, starts, **options):
    """Output and gradients in float32."""
    leaves = [x.detach().float().requires_grad_() for x in qkv]
    parts = [
        attention(*(x[:, :, a:b].transpose(1, 2) for x in leaves), **options)[0].float() for a, b in pairwise(starts)
    ]
    out = torch.cat(parts, 1)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.float())


def attend(qkv, dout, **more):
    """What a layer of a model runs."""
    from fa3_kernels.frameworks import _attention_of_model

    out, _ = _attention_of_model(torch.nn.Module(), *qkv, None, **more)
    return out.detach(), *torch.autograd.grad(out, qkv, dout)


def longer(positions, starts):
    """Each token :data:`LONG` times, whose positions go on along all axes; returns where sequences start, too."""
    if positions.ndim == 1:
        positions = positions[None]
    steps = torch.arange(LONG).repeat(positions.shape[-1])
    begun = [a for a, b in pairwise(starts) for _ in range(a, b)]
    at_start = positions[..., begun]
    long = at_start.repeat_interleave(LONG, -1) + (positions - at_start).repeat_interleave(LONG, -1) * LONG + steps
    return long, [LONG * n for n in starts]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "none"])
def test_output_and_gradients_of_packed_sequences_are_those_of_each_alone(name, is_long, is_causal):
    given, starts = POSITIONS[name]
    positions = torch.tensor(given)
    starts = starts or [0, positions.shape[-1]]
    if is_long:
        if name == "all zero":
            pytest.skip("a token that is repeated is no sequence of its own")
        positions, starts = longer(positions, starts)
    qkv, dout = heads(positions.shape[-1])
    found = attend(qkv, dout, position_ids=positions.to(DEVICE), is_causal=is_causal)
    wanted = of_each_alone(qkv, dout, starts, causal=is_causal)
    for x, want, of in zip(found, wanted, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(x, want, of)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 40}, {"softcap": 5.0}], ids=["causal", "window", "softcap"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("is_number", [False, True])
def test_starts_and_longest_lengths_are_taken_as_transformers_hands_them_over(dtype, is_number, options):
    starts = [0, 130, 131, 331]
    qkv, dout = heads(331)
    told = torch.tensor(starts, dtype=dtype, device=DEVICE)
    longest = 200 if is_number else told.diff().max()
    names = {"cu_seq_lens_q": told, "cu_seq_lens_k": told, "max_length_q": longest, "max_length_k": longest}
    found = attend(qkv, dout, is_causal=True, **names, **options)
    plain = {"window_size": (39, 0)} if "sliding_window" in options else dict(options)
    for x, want in zip(found, of_each_alone(qkv, dout, starts, causal=True, **plain), strict=True):
        assert_close(x, want)


@pytest.mark.parametrize("is_own_interface", [True, False])
def test_transformers_own_path_and_its_starts_give_the_same_bits(is_own_interface):
    """Its flash_attention_3 hands our functions what it reads out of position_ids, the longest length as a tensor."""
    theirs = pytest.importorskip("transformers.modeling_flash_attention_utils", reason="needs transformers")
    if not hasattr(theirs, "prepare_fa_kwargs_from_position_ids"):
        pytest.skip("needs a Transformers that has prepare_fa_kwargs_from_position_ids")
    from fa3_kernels.frameworks import flash_attn_varlen_func

    positions = torch.cat([torch.arange(n) for n in (130, 1, 200)])[None].to(DEVICE)
    qkv, dout = heads(331)
    (starts, _), (longest, _) = theirs.prepare_fa_kwargs_from_position_ids(positions)
    longest = longest if is_own_interface else int(longest)
    out, *_ = attend(qkv, dout, position_ids=positions, is_causal=True)
    rows = [x.transpose(1, 2).flatten(0, 1) for x in qkv]
    want = flash_attn_varlen_func(*rows, starts, starts, longest, longest, causal=True)
    assert torch.equal(out[0], want)


MODELS = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 40}),
}


def text_model(name, implementation, dtype):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from fa3_kernels.frameworks import register_with_transformers

    register_with_transformers()
    kind, facts = MODELS[name]
    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
    config = getattr(transformers, kind)(
        **sizes, num_hidden_layers=2, pad_token_id=0, attn_implementation=implementation, **facts
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(DEVICE, dtype).eval()


def loss_and_gradients(of, **given):
    """Sum of squares of the logits over their number, and gradients of all weights."""
    logits = of(**given, use_cache=False).logits.float()
    loss = logits.square().mean()
    return loss.detach(), torch.autograd.grad(loss, [x for x in of.parameters() if x.requires_grad], allow_unused=True)


def assert_weights_agree(found, wanted):
    """In the 2-norm over a weight: bfloat16 rounds every layer's activations, in the reference as well."""
    assert abs(float(found[0] - wanted[0])) <= 0.02 * float(wanted[0])
    for x, want in zip(found[1], wanted[1], strict=True):
        if want is None or not float(want.float().norm()):
            continue
        assert float((x.float() - want.float()).norm()) <= 0.06 * float(want.float().norm())


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_a_packed_model_have_the_gradients_of_eager_attention_in_float32(name):
    lengths = (130, 1, 69)
    ids = torch.randint(1, 64, (1, 200), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    found = loss_and_gradients(text_model(name, "fa3verify", torch.bfloat16), input_ids=ids, position_ids=positions)
    eager = text_model(name, "eager", torch.float32)
    parts = [loss_and_gradients(eager, input_ids=part) for part in ids.split(lengths, 1)]
    shares = [n / 200 for n in lengths]
    loss = sum(share * part[0] for share, part in zip(shares, parts, strict=True))
    gradients = [
        sum(share * x for share, x in zip(shares, of_weight, strict=True))
        for of_weight in zip(*(part[1] for part in parts), strict=True)
    ]
    assert_weights_agree(found, (loss, gradients))


@pytest.mark.parametrize("count", [1, 2])
def test_weights_of_a_model_with_images_have_the_gradients_of_eager_attention_in_float32(count):
    """Qwen2-VL: an image and text, alone and twice in one row, by planes of text, time, height and width."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if not hasattr(transformers, "Qwen2VLConfig"):
        pytest.skip("needs Qwen2-VL")
    from fa3_kernels.frameworks import register_with_transformers

    register_with_transformers()
    ids = torch.tensor([[5, 33, *(35,) * 16, 34, 6, 7, 8]], device=DEVICE)
    grid = torch.tensor([[1, 8, 8]], device=DEVICE)
    image = torch.randn(64, 24, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    axes = torch.tensor(
        [
            [0, 1, *(2,) * 16, 6, 7, 8, 9],
            [0, 1, *(2 + i // 4 for i in range(16)), 6, 7, 8, 9],
            [0, 1, *(2 + i % 4 for i in range(16)), 6, 7, 8, 9],
        ]
    )
    planes = torch.cat([torch.arange(22)[None], axes])[:, None].to(DEVICE)
    found = {}
    for kind, dtype in (("fa3verify", torch.bfloat16), ("eager", torch.float32)):
        config = transformers.Qwen2VLConfig(**QWEN2_VL)
        config._attn_implementation = kind
        torch.manual_seed(0)
        of = transformers.Qwen2VLForConditionalGeneration(config).to(DEVICE, dtype).eval()
        given = {"input_ids": ids.repeat(1, count), "position_ids": planes.repeat(1, 1, count)}
        given |= {"pixel_values": image.to(dtype).repeat(count, 1), "image_grid_thw": grid.repeat(count, 1)}
        found[kind] = loss_and_gradients(of, **given)
    assert_weights_agree(found["fa3verify"], found["eager"])
