"""What ptxas made of the shipped kernels has the instructions that the algorithm asks for; needs no compiler.

The figures are the accepted ones of ``audit.json``; that the kernels in this tree compile to them is tested beside
(:mod:`test_audit_of_shipped`). Counts are derived by hand: of a 64 x n tile per warpgroup a thread holds n / 2 elements
in 2 rows.
"""

from __future__ import annotations

import pytest

from fa3_kernels.plan.config import WARPGROUP_ROWS, Config
from fa3_kernels.plan.variant import Variant
from fa3_reports.audit import figures as audit, golden as accepted
from fa3_reports.audit.calls import ShippedLaunch, plan_for
from fa3_reports.audit.launches import launches as shipped

FIGURES = {name: row for name, row in accepted.read_rows().items() if accepted.is_compiled(row)}
ROWS = 2  # rows per thread
LAUNCHES = {x.name: x for x in shipped() if x.function == "forward" and "warp_specialize" not in x.choices}
# Kinds without other features.
PLAIN = (
    "dense",
    "causal",
    "dense_chained",
    "causal_chained",
    "causal_long",
    "dense_128_rows",
    "dense_chained_128_rows",
)
SIXTEEN_BIT = [n for n, x in LAUNCHES.items() if x.problem.dtype != "e4m3" and n.split("_", 2)[2] in PLAIN]
E4M3 = [n for n, x in LAUNCHES.items() if x.problem.dtype == "e4m3" and n.split("_", 2)[2] in PLAIN]

# Backward kernels whose consumer warpgroups have 64 keys each.
PAIRED = [x.name for x in shipped() if x.function == "backward" and x.problem.head_dim <= 128]
WIDE = [x.name for x in shipped() if x.function == "backward" and x.problem.head_dim in (160, 192)]
SPILLING = (
    "backward_d64_in_turn",
    "backward_d64_varlen_in_turn",
    "backward_d128_bf16_window_softcap",
)  # see ALLOWED_SPILL_BYTES


def figures_of(name: str) -> audit.Figures:
    kernel = "forward_fp8" if LAUNCHES[name].problem.dtype == "e4m3" else "forward_fp16"
    return FIGURES[f"{name}/{kernel}"]


def variant(launch: ShippedLaunch) -> tuple[Config, Variant]:
    plan = plan_for(launch)
    return plan.config, plan.variant


def test_the_accepted_figures_break_no_rule() -> None:
    assert audit.broken_rules(FIGURES) == []


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_warpgroup_has_its_registers_and_stores_its_part_of_o(name: str) -> None:
    found, (config, v) = figures_of(name), variant(LAUNCHES[name])
    assert found["registers"]["entry"] == v.entry_regs
    consumer_regs = 256 if v.consumers == 1 else v.consumer_regs  # one has all that the producer leaves
    assert {consumer_regs, v.producer_regs} <= set(found["registers"]["setmaxnreg"])
    parts = 2 if config.dtype == "e4m3" and config.head_dim_v == 256 else v.v_boxes
    stores = 0 if v.is_split or v.stored_channels else v.consumers * parts
    assert found["tma"]["UTMASTG"] == stores
    assert found["barriers"]["USETMAXREG"] > 0
    assert found["memory"]["smem_bytes"] <= 227 * 1024


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_16_bit_steps_have_their_products_and_no_contracted_arithmetic(name: str) -> None:
    found, (config, v) = figures_of(name), variant(LAUNCHES[name])
    steps = 2 if v.is_right_limited else 1  # copies of the step in one consumer: with and without a mask
    # k steps of 16 per product; head_dim 256 starts its first S itself instead of with the last P V of the tile before
    s_wgmmas, o_wgmmas = config.head_dim // 16, config.tile_n // 16
    first = 1 + (not v.out_in_query_slot)
    o_wgmmas *= 2 if v.v_boxes > 1 else 1  # O in two parts
    assert found["tensor"]["HGMMA"] == v.consumers * ((steps + first) * s_wgmmas + (steps + 1) * o_wgmmas)
    p, o = config.tile_n // 2, config.head_dim_v // 2  # elements per thread
    fused = p + ROWS + ROWS  # ex2's argument, the scaled maximum, the thread sum
    assert found["fp32"]["FFMA"] == v.consumers * (steps + 1) * fused, "a multiply and an add were contracted"
    rescaled = (steps + v.scales_late) * o  # O multiplied late is multiplied in front of the last P V too
    assert found["fp32"]["FMUL"] == v.consumers * (rescaled + o + ROWS)  # and O * inverse and lse * ln 2
    assert found["moves"]["PRMT"] == 0, "P is taken apart and put together again"


@pytest.mark.parametrize("name", E4M3)
def test_e4m3_steps_have_their_products_and_promotion_costs_no_instruction(name: str) -> None:
    found, (config, v) = figures_of(name), variant(LAUNCHES[name])
    # k32 steps of Q K^T; 128 / 32 of each slice of P V, of which several boxes of channels make two or three
    slices = 2 if v.v_boxes > 1 and v.slices == 1 else v.slices
    scores, output = config.head_dim // 32, config.tile_n // 32 * slices
    of_a_step = scores * (2 if config.adds_in_place else 1)  # in two pieces of the keys
    of_tiles = scores * (1 + (v.query_slots > 1))
    assert found["tensor"]["QGMMA"] == v.consumers * (of_a_step + 2 * output + of_tiles)
    assert found["tensor"]["HGMMA"] == 0
    p, o = config.tile_n // 2, config.head_dim_v // 2
    softmax = 2 * (p + ROWS + ROWS)  # first block and step
    promoted = 2 * o if config.promotion_interval else 0  # step and last block
    assert found["fp32"]["FFMA"] == v.consumers * (softmax + promoted)
    rescaled = 0 if config.promotion_interval else o
    at_least = v.consumers * (rescaled + o)  # O * rescale; O * inverse; the rest are factors of rows
    assert at_least <= found["fp32"]["FMUL"] <= at_least + v.consumers * 20


@pytest.mark.parametrize("kind", ["dense", "causal", "dense_blocks", "window"])
@pytest.mark.parametrize(("head_dim", "products"), [(160, 22), (192, 24), (256, 32)])
def test_registers_that_go_round_are_loaded_from_memory_in_no_step(kind: str, head_dim: int, products: int) -> None:
    """Two accumulators of 32 fit beside O only as long as the compilers add a part before they start the next."""
    loops = figures_of(f"e4m3_d{head_dim}_{kind}")["loops"]
    steps = [loop for loop in loops if f"QGMMA {products}" in loop and "FMUL 1" not in loop]
    assert len(steps) == 2, "one per consumer"
    assert not any("LDL" in loop or "STL" in loop for loop in steps)


@pytest.mark.parametrize("name", E4M3)
def test_v_is_transposed_by_matrix_moves_and_p_is_packed_without_byte_moves(name: str) -> None:
    found, (config, v) = figures_of(name), variant(LAUNCHES[name])
    copies = 2 + (v.query_slots == 1)  # in the loop and behind it; with one Q slot also before a tile
    size = copies * (config.head_dim_v + v.v_spare) * config.tile_n
    queries = v.holds_queries * v.consumers * WARPGROUP_ROWS * config.head_dim
    assert found["moves"]["STSM"] == size // (128 * 16)  # 16 bytes per thread and instruction
    assert found["moves"]["LDSM"] == (size + queries) // (128 * 16)
    assert found["moves"]["PRMT"] == size // (128 * 4)  # one per word of V


def test_row_maxima_of_integers_stand_beside_those_of_floats() -> None:
    """Both branches are compiled: of floats 64 of a thread's scores and 4 of the quad, of integers half in threes."""
    loops = {name: figures_of(name)["loops"][0] for name in ("fp16_d128_dense", "fp16_d64_dense")}
    assert all("FMNMX 68" in loop for loop in loops.values())
    assert not variant(LAUNCHES["fp16_d128_dense"])[1].integer_max
    assert variant(LAUNCHES["fp16_d64_dense"])[1].integer_max
    assert figures_of("fp16_d64_dense")["moves"]["SHFL"] > figures_of("fp16_d128_dense")["moves"]["SHFL"]


@pytest.mark.parametrize("name", [n for n in FIGURES if n.endswith("/combine")])
def test_the_combine_has_its_multiply_adds_and_no_others(name: str) -> None:
    found = FIGURES[name]["contraction"]
    assert not found["fmad"]
    assert found["ptx_fma"] > 0
    assert found["sass_ffma"] % found["ptx_fma"] == 0  # the loop over splits is unrolled
    assert FIGURES[name]["memory"]["spill_bytes"] == 0


def backward_steps(name: str) -> list[dict[str, int]]:
    """Instructions of a row block in the loops of both consumer warpgroups; the loop over tiles comes last."""
    texts = FIGURES[f"{name}/backward"]["loops"][:2]
    return [{x: int(n) for x, n in zip(*[iter(text.split())] * 2, strict=True)} for text in texts]


@pytest.mark.parametrize("name", [*PAIRED, *WIDE])
def test_a_step_of_the_backward_keeps_no_descriptor_of_k_in_registers(name: str) -> None:
    """The 16 words of K's descriptors would each be moved to a uniform register (R2UR): 8 to 36 in a step.

    With one buffer of dO the compiler moves six others at head_dim 192, and is the faster for it.
    """
    most = 2 if name in PAIRED else 6
    assert [step.get("R2UR", 0) <= most for step in backward_steps(name)] == [True, True]


@pytest.mark.parametrize("name", PAIRED)
def test_a_step_of_the_backward_has_no_barrier_around_the_exchange_of_ds(name: str) -> None:
    """Two slots are released and dQ is taken over and handed on, each at a named barrier; one exchanges dS."""
    assert [step["BAR"] for step in backward_steps(name)] == [5, 5]


@pytest.mark.parametrize("name", [name for name in (*PAIRED, *WIDE) if name not in SPILLING])
def test_a_step_of_the_backward_takes_no_register_to_memory(name: str) -> None:
    assert not any({"LDL", "STL"} & step.keys() for step in backward_steps(name))
