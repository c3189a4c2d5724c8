"""The tolerance of a test: how far right outputs of a call may be from exact ones, and what a wider one lets pass.

Users call it as ``fa3verify.tolerance``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fa3_kernels.faults.table import Fault
from fa3_reference.attention import attention
from fa3_reference.bounds.forward import forward_bound
from fa3_reference.bounds.model import KernelModel
from fa3_reference.formats import BY_DTYPE, FORMATS
from fa3verify.checking.call import AttentionCall, on_host
from fa3verify.checking.check import Place, rows_of, sampled, truth_of
from fa3verify.checking.checked import CheckedRows
from fa3verify.judging.metrics import other_bits
from fa3verify.kernels.calls import run
from fa3verify.kernels.twins import twin
from fa3verify.operations.operation import Accumulator, error_over_bound

_MOST_QUERIES = 256  # of a call on which faults are planted: the last ones
_MOST_KEYS = 1000  # the first ones; no multiple of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a right output of a call may be from the exact one.

    Parameters
    ----------
    atol, rtol : float
        A pair for ``torch.testing.assert_close`` that no right kernel leaves in these rows, where the reference is
        float64 or float32: ``rtol`` is the unit roundoff of the output's format, ``atol`` what the bound is above it.
    rows : tuple of CheckedRows
        The rows of out of which the pair is, with the exact output, its bound by element, and in ``got`` what an ideal
        kernel returns.
    planted : dict of str to CheckedRows
        What kernels with a planted fault return for a part of the call, by the fault; of those that change it.
    assumed : str
        Of what values and order of operations this is.
    """

    atol: float
    rtol: float
    rows: tuple[CheckedRows, ...]
    planted: dict[str, CheckedRows]
    assumed: str

    def passed_by(self, atol: float, rtol: float) -> tuple[str, ...]:
        """Return the planted faults that a pair lets pass.

        Parameters
        ----------
        atol, rtol : float
            An output is passed if each element is within ``atol + rtol * abs(exact)``.

        Returns
        -------
        tuple of str
            Names of faults, as ``fa3verify kernels`` lists them.
        """
        return tuple(name for name, x in self.planted.items() if _is_within(x, atol, rtol))

    @property
    def passed_by_bound(self) -> tuple[str, ...]:
        """The planted faults that the bound by element lets pass."""
        return tuple(name for name, x in self.planted.items() if x.largest <= 1)

    def __str__(self) -> str:
        bounds = np.concatenate([x.bound[np.isfinite(x.bound)] for x in self.rows])
        least, median, most = np.quantile(bounds, [0, 0.5, 1])
        lines = [
            f"atol={self.atol:.2g}, rtol={self.rtol:.2g}: no right output of these {bounds.size:,} elements is beyond",
            f"the bound by element is {least:.2g} to {most:.2g}, and in the middle {median:.2g}",
            f"of {len(self.planted)} planted faults that change this call, this pair lets "
            f"{len(self.passed_by(self.atol, self.rtol))} pass, and the bound {len(self.passed_by_bound)}",
            f"assumed: {self.assumed}",
        ]
        return "\n".join(lines)


def tolerance(
    q: object,
    k: object,
    v: object,
    *,
    values: Literal["", "normal"] = "",
    dtype: Literal["fp16", "bf16", "e4m3", "fp32"] = "bf16",
    rows: int = 128,
    seed: int = 0,
    accumulator: Accumulator = "either",
    **call: object,
) -> Tolerance:
    """Say how far right outputs of a call may be from exact ones, as a bound by element and as one atol and rtol.

    Parameters
    ----------
    q, k, v : arrays, or shapes
        As :func:`fa3verify.check` takes them. Shapes alone have no tolerance, as errors grow with the values.
    values : {"normal"}
        What shapes are filled with: independent standard normal numbers.
    dtype : {"fp16", "bf16", "e4m3", "fp32"}
        Format of shapes.
    rows, seed, accumulator : as of :func:`fa3verify.check`
        Which rows are looked at, and what adds the products.
    **call : fields of AttentionCall
        ``layout``, masks, scales, packed sequences and caches.

    Returns
    -------
    Tolerance
        Printed, it says what it assumes. Elements of which nothing is promised, beside NaN or Inf, do not count.

    Raises
    ------
    ValueError
        For shapes without ``values``, and as :func:`fa3verify.check` does.

    Examples
    --------
    >>> shape = (1, 4, 128, 64)
    >>> found = tolerance(shape, shape, shape, values="normal", layout="bhsd", causal=True)
    >>> found.rtol, 0 < found.atol < 1e-2, set(found.passed_by_bound) <= set(found.passed_by(1e-2, 1e-2))
    (0.00390625, True, True)
    """
    operands: list[Any] = [q, k, v]
    if isinstance(q, tuple):
        if values != "normal":
            raise ValueError("a shape has no tolerance, as errors grow with values: give arrays, or values='normal'")
        rng = np.random.default_rng(seed)
        operands = [rng.normal(size=shape).astype(FORMATS[dtype].dtype) for shape in operands]
    of_q: Any = BY_DTYPE[on_host(operands[0][:0]).dtype].name
    fmt = FORMATS["bf16" if of_q == "e4m3" else of_q]
    out = np.zeros((*operands[0].shape[:-1], operands[2].shape[-1]), fmt.dtype)
    made = AttentionCall(out=out, q=operands[0], k=operands[1], v=operands[2], **call)  # type: ignore[arg-type]
    sums = "fp32" if of_q == "fp32" and accumulator == "either" else accumulator
    name, model = next(iter(KernelModel.hypotheses(of_q, fmt.name, sums).items()))
    looked = tuple(_ideal(made, place, model) for place in sampled(made, rows, seed))
    rtol = fmt.unit_roundoff
    missing = [(x.bound - rtol * np.abs(x.truth))[np.isfinite(x.bound)] for x in looked]
    return Tolerance(
        atol=float(np.max(np.concatenate(missing), initial=0.0)),
        rtol=rtol,
        rows=looked,
        planted=dict(_planted(made, model)),
        assumed=f"{values or 'these'} values, any order, {name}, sums in {sums}",
    )


def _ideal(call: AttentionCall, place: Place, model: KernelModel) -> CheckedRows:
    """Return rows of out of an ideal kernel."""
    part = call.part(*place)
    out, *_ = rows_of(place, part, truth_of(part), model)
    return replace(out, got=out.truth.astype(part.out.dtype))


def _planted(call: AttentionCall, model: KernelModel) -> Iterator[tuple[str, CheckedRows]]:
    """Yield what twins with a planted fault return for a part of the call, if it differs from what a sound one does."""
    longest = int(np.argmax(call.lengths_q))
    queries = np.arange(max(0, call.lengths_q[longest] - _MOST_QUERIES), call.lengths_q[longest])
    whole, given, *_ = call.part(longest, call.heads_of(0), queries)
    problem = replace(whole, seqlen_q=len(queries), seqlen_k=min(whole.seqlen_k, _MOST_KEYS))
    keys = slice(problem.seqlen_k)
    operands = replace(given, q=given.q[:, queries], k=given.k[:, keys], v=given.v[:, keys])
    if problem.dtype == "fp32" or not (sound := twin(problem.dtype)).supports(problem):
        return
    config = sound.config_for(problem)
    due = run(sound, problem, operands, config)["out"]
    ideal = CheckedRows(
        name="out",
        sequence=longest,
        head=0,
        rows=queries,
        got=due[0],
        truth=attention(problem, *operands.dequantized(problem)).out[0],
        bound=forward_bound(problem, operands, model).out[0],
    )
    for fault in Fault:
        got = run(twin(problem.dtype, fault=fault), problem, operands, config)["out"]
        if other_bits(got, due, equal_nans=False).any():
            yield fault.value, replace(ideal, got=got[0])


def _is_within(rows: CheckedRows, atol: float, rtol: float) -> bool:
    allowed = np.where(np.isfinite(rows.bound), atol + rtol * np.abs(rows.truth), np.inf)
    return bool(np.all(error_over_bound(rows.got, rows.truth, allowed) <= 1))
