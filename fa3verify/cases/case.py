"""A case, :class:`Case`: one computation to judge, which is a kernel, a problem, and a recipe for its inputs.

Workers judge cases (:func:`fa3verify.judging.judgement.judge`), and replay files hold them as JSON. Which cases a
campaign has is decided in :mod:`fa3verify.campaign.profiles`, :mod:`fa3verify.campaign.cover` and
:mod:`fa3verify.cases.practice`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from fa3_kernels.plan.config import Setting
from fa3_reference.problem import AttentionProblem, Operands
from fa3_reference.quantize import Quantized, QuantScheme
from fa3verify import operations
from fa3verify.files import of_schema
from fa3verify.inputs.recipe import Recipe
from fa3verify.kernels.record import Kernel
from fa3verify.operations.operation import Arrays

SCHEMA = "fa3verify.case/1"
_NORMAL = Recipe("normal")


@dataclass(frozen=True, slots=True)
class Case:
    """A case is JSON: anyone can run it again with ``fa3verify replay``.

    Parameters
    ----------
    kernel : str
        Kernel name.
    problem : AttentionProblem
        What is computed.
    recipe : Recipe
        How q, k and v are drawn.
    scheme : QuantScheme, optional
        For e4m3 problems of the forward; None otherwise.
    changes : tuple of (str, value)
        Configuration fields that differ from the kernel's default for this problem. A case sorts them by name.
    operation : str
        What the kernel computes: a name in :data:`fa3verify.operations.OPERATIONS`.

    Raises
    ------
    ValueError
        For an unknown operation, a scheme that does not fit the problem, or changes that are no configuration fields.
    """

    kernel: str
    problem: AttentionProblem
    recipe: Recipe
    scheme: QuantScheme | None = None
    changes: tuple[tuple[str, Setting], ...] = ()
    operation: str = operations.FORWARD

    def __post_init__(self) -> None:
        operation = operations.find(self.operation)
        operation.check(self.problem, self.scheme)
        operation.check_changes(dict(self.changes))
        object.__setattr__(self, "changes", tuple(sorted(dict(self.changes).items())))

    @classmethod
    def plain(
        cls,
        kernel: Kernel,
        problem: AttentionProblem,
        recipe: Recipe = _NORMAL,
        changes: tuple[tuple[str, Setting], ...] = (),
    ) -> Case:
        """Return a case of a kernel whose e4m3 inputs have a descale for each head, as those of most callers.

        Parameters
        ----------
        kernel : Kernel
            What is called; its name and operation are the case's.
        problem : AttentionProblem
            What it is asked.
        recipe : Recipe
            Of the inputs; normal ones by default.
        changes : tuple of (str, setting)
            Fields of the kernel's configuration that are changed.
        """
        scheme = QuantScheme("head") if kernel.dtype == "e4m3" else None
        return cls(kernel.name, problem, recipe, scheme, changes, kernel.operation)

    def draw(self) -> tuple[Arrays, Quantized]:
        """Draw the inputs, and prepare what the kernel sees of them.

        Returns
        -------
        arrays : tuple of float64 arrays
            The unrounded inputs: q, k and v, and what else the operation takes.
        prepared : Quantized
            The operands in the kernel's format.
        """
        operation = operations.find(self.operation)
        arrays = operation.draw(self.problem, self.recipe)
        return arrays, operation.prepare(self.problem, arrays, self.scheme, dict(self.changes))

    def operands(self) -> Operands:
        """Return only what the kernel sees.

        Returns
        -------
        Operands
            In the kernel's format, with descales where it is e4m3.
        """
        return self.draw()[1].operands

    @property
    def needed_descales(self) -> frozenset[str]:
        """Return the features of :data:`fa3verify.operations.DESCALES` that a kernel must claim to take it."""
        return operations.find(self.operation).descales_of(self.problem, self.scheme, dict(self.changes))

    def check_descales(self, kernel: Kernel) -> None:
        """Check that a kernel claims to take the descales of this case, as it must not be judged by any others.

        Parameters
        ----------
        kernel : Kernel
            What would be judged.

        Raises
        ------
        ValueError
            If the kernel does not claim them.
        """
        if missing := self.needed_descales - kernel.features:
            raise ValueError(f"{kernel.name} does not claim {', '.join(sorted(missing))}: {self.describe()}")

    def describe(self) -> str:
        """Return one readable line.

        Returns
        -------
        str
            Kernel, shape, switches, lengths of packed sequences, a scale that is not the usual one, and recipe.
        """
        p = self.problem
        shape = f"b{p.batch} h{p.nheads}/{p.nheads_kv} {p.seqlen_q}x{p.seqlen_k} d{p.head_dim}"
        if p.head_dim_v != p.head_dim:
            shape += f"/{p.head_dim_v}"
        switches = [f"causal{' top-left' if p.top_left else ''}"] if p.causal else []
        if p.seqlens_q is not None and p.seqlens_k is not None:
            switches.append(f"varlen {','.join(map(str, p.seqlens_q))} x {','.join(map(str, p.seqlens_k))}")
        if not math.isclose(p.softmax_scale * math.sqrt(p.head_dim), 1.0):
            switches.append(f"scale={p.softmax_scale:.6g}")
        if p.window != (-1, -1):
            switches.append(f"window={p.window}")
        if p.softcap:
            switches.append(f"softcap={p.softcap:g}")
        switches += [word for word in ("sinks", "qv") if getattr(p, word)]
        if p.term is not None:
            switches.append(p.term.describe())
        if p.attention_chunk:
            switches.append(f"attention_chunk={p.attention_chunk}")
        if p.cache is not None:
            switches.append(p.cache.describe())
        switches += [f"{name}={value}" for name, value in self.changes]
        if self.scheme is not None:
            switches.append(f"{self.scheme.granularity} scales")
            words = {"hadamard": self.scheme.hadamard_seed is not None, "k_mean": self.scheme.k_mean}
            switches += [word for word, is_on in words.items() if is_on]
        return f"{self.kernel} {shape} {' '.join(switches)}".rstrip() + f" | {self.recipe.describe()}"

    def to_json(self) -> dict[str, object]:
        """Return the case as JSON values; :meth:`from_json` reads it back exactly.

        Returns
        -------
        dict of str to object
            With the key ``schema``, so that it can be told from other records.
        """
        return {
            "schema": SCHEMA,
            "kernel": self.kernel,
            "problem": self.problem.to_json(),
            "recipe": self.recipe.to_json(),
            "scheme": None if self.scheme is None else self.scheme.to_json(),
            "changes": {name: list(x) if isinstance(x, tuple) else x for name, x in self.changes},
            **({} if self.operation == operations.FORWARD else {"operation": self.operation}),
        }

    @classmethod
    def from_json(cls, values: object) -> Case:
        """Read what :meth:`to_json` wrote.

        Parameters
        ----------
        values : object
            Decoded JSON.

        Returns
        -------
        Case
            An equal case.

        Raises
        ------
        ValueError
            If it is damaged or foreign; the message names what is wrong.
        """
        values = of_schema(values, SCHEMA, "not a case")
        missing = [key for key in ("kernel", "problem", "recipe", "scheme", "changes") if key not in values]
        if missing:
            raise ValueError(f"case lacks {missing}")
        if not isinstance(values["kernel"], str) or not isinstance(values["changes"], dict):
            raise ValueError("case must name its kernel by a string and its changes by an object")
        changes = {name: tuple(x) if isinstance(x, list) else x for name, x in values["changes"].items()}
        return cls(
            values["kernel"],
            AttentionProblem.from_json(values["problem"]),
            Recipe.from_json(values["recipe"]),
            None if values["scheme"] is None else QuantScheme.from_json(values["scheme"]),
            tuple(changes.items()),
            values.get("operation", operations.FORWARD),
        )

    def key(self) -> str:
        """Return the identity of a case.

        Returns
        -------
        str
            Canonical JSON text: equal cases have equal ones.
        """
        return json.dumps(self.to_json(), sort_keys=True)
