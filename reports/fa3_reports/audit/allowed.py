"""What the audit lets pass by name, each after a look at it: spills, an arrive of ptxas, registers that nothing set."""

from __future__ import annotations

# Spilled bytes that were looked at and accepted, by launch/kernel; everything else spills none. They hold scalars of a
# tile, stored once per tile, and at head_dim 256 of the producer (24 registers): no loop over unmasked blocks loads
# them, a masked step at most one, but for e4m3_d64_dense_blocks, with four loads and two stores a step (the golden
# file's loops). Over pages the producer of e4m3 at head_dim 256 loads nine a block of keys, and none a page. The
# backward's are no such scalars alone: at head_dim 128 every masked step loads and stores some, and at 64 in a fixed
# order one step of two loads and stores one. In a fixed order the warp that adds dQ (24 registers) spills too.
ALLOWED_SPILL_BYTES: dict[str, int] = {
    "fp16_d160_causal/forward_fp16": 80,
    "fp16_d160_left/forward_fp16": 96,
    "fp16_d160_window/forward_fp16": 148,
    "fp16_d160_softcap/forward_fp16": 80,
    "bf16_d160_causal/forward_fp16": 80,
    "fp16_d160_pages16_causal/forward_fp16": 80,
    "fp16_d192_left/forward_fp16": 44,
    "fp16_d192_window/forward_fp16": 168,
    "fp16_d192_varlen_window_packed/forward_fp16": 156,
    "fp16_d192_v128_varlen_window_packed/forward_fp16": 72,
    "fp16_d256_window/forward_fp16": 120,
    "fp16_d256_packed/forward_fp16": 32,
    "fp16_d256_packed_splits/forward_fp16": 16,
    "fp16_d256_varlen_window_packed/forward_fp16": 72,
    "e4m3_d64_dense/forward_fp8": 100,
    "e4m3_d64_splits/forward_fp8": 60,
    "e4m3_d64_dense_blocks/forward_fp8": 240,
    "e4m3_d64_causal_long/forward_fp8": 120,
    "e4m3_d128_causal/forward_fp8": 32,
    "e4m3_d128_window/forward_fp8": 56,
    "e4m3_d128_softcap/forward_fp8": 32,
    "e4m3_d128_causal_chained/forward_fp8": 16,
    "e4m3_d128_causal_blocks/forward_fp8": 64,
    "e4m3_d192_dense/forward_fp8": 16,
    "e4m3_d192_causal/forward_fp8": 40,
    "e4m3_d192_window/forward_fp8": 72,
    "e4m3_d192_softcap/forward_fp8": 32,
    "e4m3_d192_dense_blocks/forward_fp8": 16,
    "e4m3_d192_dense_chained/forward_fp8": 8,
    "e4m3_d192_causal_blocks/forward_fp8": 32,
    "e4m3_d192_v128_causal/forward_fp8": 32,
    "e4m3_d192_v128_window/forward_fp8": 56,
    "e4m3_d192_v128_softcap/forward_fp8": 32,
    "e4m3_d192_v128_causal_chained/forward_fp8": 16,
    "e4m3_d192_v128_dense_blocks/forward_fp8": 56,
    "e4m3_d192_v128_causal_blocks/forward_fp8": 64,
    "e4m3_d256_dense/forward_fp8": 112,
    "e4m3_d256_causal/forward_fp8": 152,
    "e4m3_d256_window/forward_fp8": 200,
    "e4m3_d256_softcap/forward_fp8": 136,
    "e4m3_d256_splits/forward_fp8": 96,
    "e4m3_d256_dense_chained/forward_fp8": 112,
    "e4m3_d256_causal_chained/forward_fp8": 164,
    "e4m3_d256_dense_blocks/forward_fp8": 208,
    "e4m3_d256_causal_blocks/forward_fp8": 180,
    "e4m3_d64_pages256_sinks_splits/forward_fp8": 112,
    "e4m3_d256_pages16_causal/forward_fp8": 72,
    "e4m3_d256_pages64_step_splits/forward_fp8": 80,
    "e4m3_d128_pages16_causal/forward_fp8": 48,
    "e4m3_d192_v128_pages16_causal/forward_fp8": 60,
    "e4m3_d256_pages256_sinks_splits/forward_fp8": 104,
    # Producers that gather have 40 registers: counted, not looked at instruction by instruction.
    "fp16_d64_pages1_causal/forward_fp16": 48,
    "fp16_d192_pages1_causal/forward_fp16": 60,
    "fp16_d192_v128_pages1_causal/forward_fp16": 16,
    "e4m3_d128_pages1_causal/forward_fp8": 48,
    "e4m3_d192_pages16_causal/forward_fp8": 16,
    "e4m3_d192_pages1_causal/forward_fp8": 16,
    "e4m3_d256_pages1_causal/forward_fp8": 72,
    "e4m3_d192_v128_pages1_causal/forward_fp8": 60,
    "e4m3_d64_stamps/forward_fp8": 124,
    "e4m3_d256_stamps/forward_fp8": 224,
    "e4m3_d256_chained_stamps/forward_fp8": 252,
    "backward_d128_bf16_window_softcap/backward": 560,
    "backward_d128_causal_in_turn/backward": 116,
    "backward_d128_dense/backward": 16,
    "backward_d128_in_turn/backward": 40,
    "backward_d128_varlen_in_turn/backward": 60,
    "backward_d256_causal_in_turn/backward": 344,
    "backward_d256_dense/backward": 56,
    "backward_d256_in_turn/backward": 168,
    "backward_d256_varlen_in_turn/backward": 560,
    "backward_d64_causal_in_turn/backward": 16,
    "backward_d64_dense/backward": 16,
    "backward_d64_in_turn/backward": 64,
    "backward_d64_varlen_in_turn/backward": 104,
}

# Kernels into which ptxas puts a warpgroup.arrive of its own (its message C7519), which waits for nothing; its other
# messages of that kind say that a wgmma is waited for.
ALLOWED_ARRIVES = frozenset({"backward_d64_in_turn/backward"})

# Kernels that read registers which some path does not set, and were looked at. Instrumented e4m3 kernels stamp the last
# P V of a tile into the row of the step before it, which no step has set where a CTA begins with a tile of one key
# block: such a launch may store anywhere. Those of the recorded timelines have 64 blocks a tile.
ALLOWED_UNDEFINED = frozenset(
    f"e4m3_{kind}_stamps/forward_fp8" for kind in ("d64", "d64_chained", "d128", "d128_chained")
)
