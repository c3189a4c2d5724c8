"""How a backward kernel of 16 bits is laid out on an SM: its tile, its rings, which products are transposed, and how
dQ reaches memory.

One CTA owns a key tile and visits the row blocks that see it. For each it computes S = Q K^T, dP = dO V^T, dV += P^T
dO, dQ = dS K and dK += dS^T Q, each as written here or transposed. Every warpgroup computes S and dP of its share of
the keys. The other products are shared out by rows where every warpgroup gets a multiple of 64, which wgmma needs, and
else by columns. :mod:`fa3_simulator.backward` writes the program of such a schedule;
:mod:`fa3_simulator.backward_choice` says which schedules there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from fa3_kernels.plan.call import boxes
from fa3_kernels.plan.config import WARPGROUP_ROWS, require
from fa3_kernels.plan.families import OURS, Traits, traits_of

WGMMA_K = 16  # of 16-bit operands
HEAD_DIMS = (64, 96, 128, 160, 192, 256)
Turns = Literal["free", "ascending", "descending", "shift"]
DqPath = Literal["tma warp", "registers"]


class Product(NamedTuple):
    """Holds one warpgroup's part of a matrix product: ``instructions`` wgmma of 64 x ``columns`` x 16."""

    instructions: int
    columns: int


@dataclass(frozen=True, slots=True)
class BackwardSchedule:
    """States how one backward kernel is laid out.

    Parameters
    ----------
    head_dim : int
        Compiled size: 64, 96, 128, 160, 192 or 256.
    tile_m, tile_n : int
        Query rows of a block and keys of a tile, multiples of 16.
    family : str
        A key of :data:`fa3_kernels.plan.families.FAMILIES`, which decides how rings are handed back and whether CTAs
        work through many tiles.
    consumers : {2, 3}
        Warpgroups that compute.
    num_stages, dout_stages, ds_stages : int
        Slots of Q, of dO, and of dS (and of P, if it goes through shared memory).
    scores_transposed : bool
        Whether S and dP are computed with the keys as rows, so that P and dS are operands of dV and dK in registers.
        Otherwise dV and dK are computed with the channels as rows, from P and dS in shared memory.
    dq_transposed : bool
        Whether dQ is computed with the channels as rows.
    v_in_registers : bool
        Whether dP takes V from registers, into which it is read once a tile.
    dq : {"tma warp", "registers"}
        How dQ is added to fp32 in global memory. "tma warp": consumers stage it in shared memory, and a warp of its own
        starts reductions by TMA. "registers": consumers use vector reductions, which our kernel does not have.
    splits_roles : bool
        Whether one consumer computes S and dV of all keys and the other dP and dK, and S goes from one to the other in
        fp32, as in our kernel from head_dim 160 on.
    turns : {"free", "ascending", "descending", "shift"}
        In which order the key tiles add to a row block, see :mod:`fa3_simulator.turns`; "free" is any order.

    Raises
    ------
    ValueError
        When a field breaks its rule, or wgmma cannot compute a product.
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
    bits: ClassVar[int] = 16  # of an operand's element

    def __post_init__(self) -> None:
        sizes = ", ".join(map(str, HEAD_DIMS))
        rules = (
            (self.head_dim in HEAD_DIMS, f"head_dim must be one of {sizes}, got {self.head_dim}"),
            (self.consumers in (2, 3), f"consumers must be 2 or 3, got {self.consumers}"),
            (self.scores_transposed or not self.v_in_registers, "V in registers needs transposed scores"),
            (
                not self.splits_roles or (self.is_ours and self.tile_m == 64 == self.tile_n),
                "roles are split by ours alone",
            ),
            (self.dq == "tma warp" or not self.is_ours, "a warp of its own adds dQ of our kernel"),
            *(
                (n % 16 == 0 and 16 <= n <= 256, f"{name} must be a multiple of 16 to 256, got {n}")
                for name, n in (("tile_m", self.tile_m), ("tile_n", self.tile_n))
            ),
            *(
                (1 <= getattr(self, name) <= 4, f"{name} must lie in [1, 4], got {getattr(self, name)}")
                for name in ("num_stages", "dout_stages", "ds_stages")
            ),
        )
        for ok, rule in rules:
            require(ok, rule)
        for name in ("scores", "gradients"):
            getattr(self, name)  # raises for a product that wgmma does not compute
        self.queries(0)

    @property
    def traits(self) -> Traits:
        """Return the table of the family's differences from other families."""
        return traits_of(self.family)

    @property
    def is_ours(self) -> bool:
        """Tell whether it is our kernel, whose CTAs work through many key tiles; upstream's have one each."""
        return self.traits.is_built_here

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
        """Return a warpgroup's product for dQ, or for one of the parts in which it hands dQ on.

        Parameters
        ----------
        consumer : int
            Which warpgroup.

        Returns
        -------
        Product
            Its instructions and their columns.
        """
        if self.splits_roles or self.is_in_boxes:
            return self._checked("dQ", self.tile_m, self.staged(consumer) // self.tile_m, self.tile_n)
        return self._shared("dQ", (self.tile_m, self.head_dim), self.tile_n, self.dq_transposed)

    @property
    def is_in_boxes(self) -> bool:
        """Tell whether the channels are several boxes, as in our kernel at head_dim 96, 160 and 192: consumer 0 hands
        on all boxes of dQ but the last, which consumer 1 does.
        """
        return self.is_ours and boxes(self.head_dim) > 1

    def staged(self, consumer: int) -> int:
        """Return how many elements of dQ a consumer hands on at a time.

        Parameters
        ----------
        consumer : int
            Which warpgroup.

        Returns
        -------
        int
            Elements of one part; where channels are several boxes, consumer 0 has all but those of the last one.
        """
        whole = self.tile_m * self.head_dim
        last = whole // boxes(self.head_dim)
        return (whole - last, last)[consumer] if self.is_in_boxes else whole // (self.consumers * self.dq_parts)

    @property
    def dq_slices(self) -> int:
        """How many parts of dV, dK and dQ are computed one after the other, as registers do not hold the whole."""
        return 2 if self.head_dim == 256 and not self.scores_transposed and self.dq == "registers" else 1

    @property
    def dq_parts(self) -> int:
        """Parts in which a consumer stages its share of dQ in shared memory."""
        return 2 if self.splits_roles and not self.is_in_boxes else 1

    @property
    def layout(self) -> str:
        """Return in words which products are transposed, whether V is in registers, and how dQ reaches memory."""
        transposed = ("S" if self.scores_transposed else "dV dK") + " dQ" * self.dq_transposed
        extras = ", V in registers" * self.v_in_registers + ", roles split" * self.splits_roles
        return f"{transposed} transposed{extras}, dQ by {self.dq}"

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the warps that copy, and of a consumer: together all that an SM has."""
        return (24, 240) if self.consumers == 2 else (32, 160)

    def adds_gradients(self, group: int) -> bool:
        """Tell whether dK and dV are added in global memory in fp32, as several query heads share keys.

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

    def masks(self, blocks: int, hidden: int) -> int:
        """Return how many of a tile's row blocks run the code for masks.

        FlashAttention-3 has separate code for blocks without a mask at head_dim 64 only: above that, all blocks of a
        tile with a masked block run the code for masks.

        Parameters
        ----------
        blocks : int
            Row blocks of the tile.
        hidden : int
            Row blocks among them that hide keys.

        Returns
        -------
        int
            Between ``hidden`` and ``blocks``.
        """
        return blocks if hidden and self.family.startswith("flash3") and self.head_dim > 64 else hidden

    def _shared(self, name: str, shape: tuple[int, int], depth: int, transposed: bool) -> Product:
        # one warpgroup's share of a product: of its rows if each gets a multiple of 64, else of its columns
        rows, columns = shape[::-1] if transposed else shape
        if rows % (WARPGROUP_ROWS * self.consumers) == 0:
            return self._checked(name, rows // self.consumers, columns, depth)
        return self._checked(name, rows, columns // self.consumers, depth)

    def _checked(self, name: str, rows: int, columns: int, depth: int) -> Product:
        if rows % WARPGROUP_ROWS or columns % 8 or not 8 <= columns <= 256:
            text = f"{rows} x {columns} for each of {self.consumers} warpgroups"
            raise ValueError(f"{name} of a tile of {self.tile_m} x {self.tile_n} is no product of wgmma: {text}")
        return Product(rows // WARPGROUP_ROWS * (depth // WGMMA_K), columns)
