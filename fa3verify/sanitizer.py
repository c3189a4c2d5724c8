"""The one way to ``fa3verify.models``, an extra that needs torch and that nothing else imports."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa3verify.models.watch import Watch


def watch(
    *,
    one_in: float = 100,
    budget: float = 0.02,
    rows: int = 32,
    seed: int = 0,
    memory_bytes: int = 1 << 26,
    folder: str | Path = "fa3verify-watch",
    raises: bool = False,
) -> Watch:
    """Watch attention in a program that runs: check some rows of some calls, and their gradients; needs torch.

    ``with fa3verify.watch() as found: train()`` sees torch's ``scaled_dot_product_attention`` and ``varlen_attn``,
    FlashAttention-2's, -3's and our functions, and functions of Transformers' AttentionInterface. The page at the end
    says what it saw, what not, and what it cost.

    Parameters
    ----------
    one_in : float
        Each call is drawn with probability 1 / one_in; >= 1.
    budget : float
        Share of the time that checks may take, > 0; infinite for no limit. Drawn calls beyond it are counted.
    rows : int
        Rows (one query, one head) that are checked of one head of a drawn call, from 1 to 32.
    seed : int
        Of all draws; ranks draw differently.
    memory_bytes : int
        Bytes of copies on the host: of one head while it is checked, and of what waits for its gradients.
    folder : str or Path
        Where wrong calls and the shapes of drawn calls are written.
    raises : bool
        Whether a wrong call (AssertionError) or an error of the watch itself raises in the program; nothing does by
        default.

    Returns
    -------
    Watch
        A context manager. Its truth value is "nothing wrong was found", its text the page. Values whose operands hold
        NaN or infinities are not judged; the first of them is told with its place.

    Raises
    ------
    ValueError
        For a parameter out of its range; on entry if another watch is running.
    ModuleNotFoundError
        Without torch.

    Examples
    --------
    >>> with watch(one_in=20) as found:  # doctest: +SKIP
    ...     train()
    >>> assert found, found  # doctest: +SKIP
    """
    from fa3verify.models.watch import Watch

    return Watch(
        one_in=one_in,
        budget=budget,
        rows=rows,
        seed=seed,
        memory_bytes=memory_bytes,
        folder=folder,
        raises=raises,
    )
