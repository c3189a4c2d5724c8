"""How a backward kernel of 16 bits is laid out on an SM: tile, rings, which product is transposed, the
way of dQ.

One CTA owns a key tile and visits the row blocks that see it. Of each it computes S = Q K^T, dP = dO V^T, dV += P^T dO,
dQ = dS K and dK += dS^T Q, each as it stands or transposed. Of S and dP a warpgroup has its share of the keys; of the
others a share of the rows, of which wgmma takes 64, where there are enough of them, otherwise of the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fa3_kernels.plan.barriers import WARPGROUP_THREADS
from fa3_kernels.plan.config import WARPGROUP_ROWS, require
from fa3_kernels.plan.families import OURS, Traits, traits_of

WGMMA_K = 16  # of 16-bit operands
HEAD_DIMS = (64, 96, 128, 192, 256)
OTHER_REGISTERS = 24  # of a consumer thread: addresses, statistics, loop state
Turns = Literal["free", "ascending", "descending", "shift"]
DqPath = Literal["tma warp", "registers"]


class Product(NamedTuple):
    """Holds what one warpgroup computes of a matrix product: ``instructions`` wgmma of 64 x ``columns`` x 16."""

    instructions: int
    columns: int


@dataclass(frozen=True, slots=True)
class BackwardSchedule:
    """One backward kernel.

    Parameters
    ----------
    head_dim : int
        Compiled size: 64, 96, 128, 192 or 256.
    tile_m, tile_n : int
        Query rows of a block and keys of a tile, multiples of 16.
    family : str
        A key of :data:`fa3_kernels.plan.families.FAMILIES`: how its rings are handed back, whether its CTAs stay.
    consumers : {2, 3}
        Warpgroups that compute.
    num_stages, dout_stages, ds_stages : int
        Slots of Q, of dO, and of dS (and of P where it goes through shared memory).
    scores_transposed : bool
        Whether S and dP are computed with the keys as rows, so that P and dS are operands of dV and dK in registers.
        Otherwise dV and dK are computed with the channels as rows, from P and dS in shared memory.
    dq_transposed : bool
        Whether dQ is computed with the channels as rows.
    v_in_registers : bool
        Whether V is the operand of dP in registers, read once a tile.
    dq : {"tma warp", "registers"}
        How dQ is added to fp32 in global memory: consumers stage it in shared memory and a warp of its own starts
        reductions of TMA; or by vector reductions from registers, which our kernel does not know.
    splits_roles : bool
        Whether one consumer forms S and keeps dV, the other dP and dK, each of all keys, and S goes from one to the
        other in fp32. Our kernel at head_dim 192 and 256.
    turns : {"free", "ascending", "descending", "shift"}
        In which order the key tiles add to a row block, see :mod:`fa3_simulator.turns`.

    Raises
    ------
    ValueError
        When a field breaks its rule, or a product is not one that wgmma computes.
    """

    head_dim: int = 128
    tile_m: int = 64
    tile_n: int = 128
    family: str = OURS
    consumers: int = 2
    num_stages: int = 2
    dout_stages: int = 2
    ds_stages: int = 2
    scores_transposed: bool = True
    dq_transposed: bool = False
    v_in_registers: bool = False
    dq: DqPath = "tma warp"
    splits_roles: bool = False
    turns: Turns = "free"

    def __post_init__(self) -> None:
        sizes = ", ".join(map(str, HEAD_DIMS))
        rules = [
            (self.head_dim in HEAD_DIMS, f"head_dim must be one of {sizes}, got {self.head_dim}"),
            (self.consumers in (2, 3), f"consumers must be 2 or 3, got {self.consumers}"),
            (self.scores_transposed or not self.v_in_registers, "V in registers needs transposed scores"),
            (
                not self.splits_roles or (self.is_ours and self.tile_m == 64 == self.tile_n),
                "roles are split by ours alone",
            ),
            (self.dq == "tma warp" or not self.is_ours, "a warp of its own adds dQ of our kernel"),
        ]
        for name in ("tile_m", "tile_n"):
            size = getattr(self, name)
            rules.append((size % 16 == 0 and 16 <= size <= 256, f"{name} must be a multiple of 16 to 256, got {size}"))
        for name in ("num_stages", "dout_stages", "ds_stages"):
            rules.append((1 <= getattr(self, name) <= 4, f"{name} must lie in [1, 4], got {getattr(self, name)}"))
        for ok, rule in rules:
            require(ok, rule)
        for name in ("scores", "gradients"):
            getattr(self, name)  # refuses what wgmma does not compute
        self.queries(0)

    @property
    def traits(self) -> Traits:
        """Return what tells the kernel's family from the others."""
        return traits_of(self.family)

    @property
    def is_ours(self) -> bool:
        """Tell whether it is our kernel, whose CTAs work through many key tiles; upstream's have one each."""
        return self.traits.is_built_here

    @property
    def signals_early(self) -> bool:
        """Tell whether a turn is passed on when shared memory has been read, as upstream's is; not when the sum is
        there.

        A bulk wait with ``.read`` says no more: FlashAttention issue 2244.
        """
        return not self.is_ours

    @property
    def scores(self) -> Product:
        """Product of one warpgroup for S, and for dP."""
        keys = self.tile_n if self.splits_roles else self.tile_n // self.consumers
        shape = (keys, self.tile_m) if self.scores_transposed else (self.tile_m, keys)
        return self._checked("S", *shape, self.head_dim)

    @property
    def gradients(self) -> Product:
        """Product of one warpgroup for dV, and for dK."""
        if self.splits_roles:
            return self._checked("dV", self.tile_n, self.head_dim, self.tile_m)
        return self._shared("dV", (self.tile_n, self.head_dim), self.tile_m, not self.scores_transposed)

    def queries(self, consumer: int) -> Product:
        """Return a warpgroup's product for dQ, or for one of the parts in which it is handed on.

        Parameters
        ----------
        consumer : int
            Which warpgroup.

        Returns
        -------
        Product
            Of whole instructions.
        """
        if self.splits_roles or self.is_in_boxes:
            return self._checked("dQ", self.tile_m, self.staged(consumer) // self.tile_m, self.tile_n)
        return self._shared("dQ", (self.tile_m, self.head_dim), self.tile_n, self.dq_transposed)

    @property
    def is_in_boxes(self) -> bool:
        """Tell whether channels are three boxes, as at head_dim 96 and 192 of our kernel: two of dQ and one."""
        return self.is_ours and self.head_dim % 96 == 0

    def staged(self, consumer: int) -> int:
        """Return how many elements of dQ a consumer hands on at a time.

        Parameters
        ----------
        consumer : int
            Which warpgroup.

        Returns
        -------
        int
            Of three boxes of channels the first one has two.
        """
        whole = self.tile_m * self.head_dim
        return whole * (2 - consumer) // 3 if self.is_in_boxes else whole // (self.consumers * self.dq_parts)

    @property
    def dq_slices(self) -> int:
        """Parts of dV, dK and dQ that are computed apart, as registers are short."""
        return 2 if self.head_dim == 256 and not self.scores_transposed and self.dq == "registers" else 1

    @property
    def dq_parts(self) -> int:
        """Parts in which a consumer stages its share of dQ in shared memory."""
        return 2 if self.splits_roles and not self.is_in_boxes else 1

    @property
    def layout(self) -> str:
        """Return which products are transposed, what is held in registers, and the way of dQ, in words."""
        transposed = ("S" if self.scores_transposed else "dV dK") + " dQ" * self.dq_transposed
        held = ", V in registers" * self.v_in_registers + ", roles split" * self.splits_roles
        return f"{transposed} transposed{held}, dQ by {self.dq}"

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread, of the warps that copy and of a consumer: all that an SM has."""
        return (24, 240) if self.consumers == 2 else (32, 160)

    @property
    def registers_needed(self) -> int:
        """Return the registers of a consumer thread: for dK and dV, then S and dP or dS and dQ, V where it is held, and
        the rest.
        """
        threads = 128 * self.consumers
        sums = 2 * self.tile_n * self.head_dim // threads
        scores = self.tile_m * self.tile_n // (WARPGROUP_THREADS if self.splits_roles else threads)
        queries = self.tile_m * self.head_dim // threads // self.dq_slices
        held = scores // 2 if self.scores_transposed else 0  # dS in 16 bits
        v = self.tile_n * self.head_dim // threads // 2 if self.v_in_registers else 0
        return sums + max(2 * scores, held + queries) + v + OTHER_REGISTERS

    @property
    def smem_bytes(self) -> int:
        """Shared memory of all buffers; mbarriers aside."""
        rows = 2 * self.tile_m * self.head_dim
        keys = 2 * self.tile_n * self.head_dim
        score = 2 * self.tile_m * self.tile_n
        statistics = 8 * self.num_stages if self.is_ours else 4 * (self.num_stages + self.dout_stages)
        rings = rows * (self.num_stages + self.dout_stages) + statistics * self.tile_m
        shared = score * self.ds_stages * (1 if self.scores_transposed else 2)
        staged = 0 if self.dq == "registers" else 2 * rows // self.dq_parts
        return rings + 2 * keys + shared + staged + (2 * score if self.splits_roles else 0)

    def adds_gradients(self, group: int) -> bool:
        """Tell whether dK and dV are added in fp32, as heads share keys.

        Parameters
        ----------
        group : int
            Query heads that share one head of K and V.

        Returns
        -------
        bool
            False for our kernel, which works through all heads of a group instead.
        """
        return group > 1 and not self.is_ours

    def fits(self, smem_bytes: float) -> bool:
        """Tell whether registers suffice, and shared memory.

        Parameters
        ----------
        smem_bytes : float
            Shared memory of a CTA.

        Returns
        -------
        bool
            Whether both suffice.
        """
        return self.registers_needed <= self.registers[1] and self.smem_bytes <= smem_bytes

    def masks(self, blocks: int, hidden: int) -> int:
        """Return how many of a tile's row blocks run the code for masks.

        FlashAttention-3 compiles blocks without a mask apart at head_dim 64 alone.

        Parameters
        ----------
        blocks : int
            Row blocks of the tile.
        hidden : int
            Those among them that hide keys.

        Returns
        -------
        int
            Between ``hidden`` and ``blocks``.
        """
        always = self.family.startswith("flash3") and self.head_dim > 64
        return blocks if always and hidden else hidden

    def _shared(self, name: str, shape: tuple[int, int], depth: int, transposed: bool) -> Product:
        rows, columns = shape[::-1] if transposed else shape
        if rows % (WARPGROUP_ROWS * self.consumers) == 0:
            return self._checked(name, rows // self.consumers, columns, depth)
        return self._checked(name, rows, columns // self.consumers, depth)

    def _checked(self, name: str, rows: int, columns: int, depth: int) -> Product:
        if rows % WARPGROUP_ROWS or columns % 8 or not 8 <= columns <= 256:
            text = f"{rows} x {columns} for each of {self.consumers} warpgroups"
            raise ValueError(f"{name} of a tile of {self.tile_m} x {self.tile_n} is no product of wgmma: {text}")
        return Product(rows // WARPGROUP_ROWS * (depth // WGMMA_K), columns)
