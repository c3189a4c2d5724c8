"""What a kernel is to the harness: how it is called, what it takes, and what it declares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Protocol, get_args

from fa3_kernels.plan.config import Setting
from fa3_reference.bounds import BackwardModel, KernelModel, Quantises
from fa3_reference.bounds.device import check_products
from fa3_reference.formats import FORMATS
from fa3_reference.problem import AttentionProblem, Dtype, Operands
from fa3_reference.score_term import ScoreTerm
from fa3verify import operations
from fa3verify.files import Json
from fa3verify.kernels.policy import DEFAULT, Policy
from fa3verify.kernels.sizes import Sizes, written
from fa3verify.operations import AnyConfig
from fa3verify.operations.operation import Accumulator, ForwardOf, needed_features
from fa3verify.text import MOST_BYTES, one_line

# By name of a kernel without ``head_dims``: head dims that it refused when it was introduced in this process.
REFUSED: dict[str, frozenset[int]] = {}
REFUSALS = (ValueError, NotImplementedError, AssertionError)  # what kernels raise of calls that they do not support
NAMES_OF_REFUSALS = frozenset(raised.__name__ for raised in REFUSALS)


class Unfilled(ValueError):
    """Raised of a call whose output another program has not written yet: it says nothing about the kernel."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Says which build of a kernel was judged; None where the kernel does not say. Texts are one line of 4 KiB at most.

    Parameters
    ----------
    version : str, optional
        Of the library.
    file, sha256 : str, optional
        Name and hash of its binary, or of the sources that stand for one.
    device : str, optional
        GPU, or what else it ran on.
    """

    version: str | None = None
    file: str | None = None
    sha256: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (text := getattr(self, field.name)) is not None:
                object.__setattr__(self, field.name, one_line(text, MOST_BYTES))


class Code(Protocol):
    """The four functions of a kernel that are called. A class that inherits them need not write the last two."""

    def configure(self, problem: AttentionProblem, /) -> AnyConfig:
        """Return the operation's configuration, for a forward a ``Config``.

        A problem that it refuses by one of :data:`REFUSALS` is never run, in no case and no property.
        """
        ...

    def run(self, problem: AttentionProblem, operands: Operands, config: Any, /) -> object:
        """Return the operation's outputs, as a mapping by name or as attributes, for a forward :class:`Result`."""

    def launchable(self, problem: AttentionProblem, config: Any, /) -> object:
        """Raise ValueError if no caller can have the problem run in the configuration.

        By default it refuses nothing: every configuration that ``changeable`` leads to can be run. Properties that run
        a problem in the configuration of another one leave out those that are refused here.
        """

    def identity(self) -> Mapping[str, str | None]:
        """Return fields of :class:`Identity` by name, for stored judgements.

        It is called once in a campaign, in a process that runs the kernel.
        """
        return {}


def always_launchable(problem: AttentionProblem, config: Any) -> None:
    """Accept every configuration, as the code of a kernel that declares nothing else does."""


@dataclass(frozen=True, slots=True)
class Functions:
    """The code of a kernel as four functions of a caller's choice; :class:`Code` says what each of them does."""

    run: Callable[..., object]
    configure: Callable[[AttentionProblem], AnyConfig]
    launchable: Callable[..., object] = always_launchable
    identity: Callable[[], Mapping[str, str | None]] = dict
    is_handed: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel under judgement.

    Parameters
    ----------
    name : str
        Unique, such as ``twin.fp16``.
    dtype : {"fp16", "bf16", "e4m3", "fp32"}
        Format of its operands, of a quantiser that of its codes.
    code : Code
        Its functions, which configure, run and identify it. :class:`Functions` makes one of single functions.
    features : frozenset of str
        Subset of its operation's, such as :data:`fa3verify.operations.FEATURES` of a forward; it never gets a problem
        that needs others.
    description : str
        One line for lists of kernels.
    unavailable : str, optional
        Why it cannot run here.
    fault : StrEnum, optional
        The planted mistake of a faulty twin.
    twin : Kernel, optional
        The twin whose bits it must equal (the verdict's part "bits").
    operation : str
        What it computes: a name in :data:`fa3verify.operations.OPERATIONS`.
    order : callable, optional
        ``order(config)``: the :class:`fa3_reference.bounds.KernelModel` of a forward, or the
        :class:`fa3_reference.bounds.model.BackwardModel` of a backward, which states its order of operations and is
        what the error bound assumes; :func:`fa3verify.operations.forward.order_of_family` for a family that is known.
        Without it the bound is the wider one of any order (:mod:`fa3verify.judging.hypotheses`).
    accumulator : {"fp32", "wgmma", "either", "tf32"}, optional
        How a kernel without ``order`` adds products: in binary32, in Hopper's tensor core, or in either. By default
        its device decides. One of binary32 operands multiplies them in "fp32", by default, or in "tf32".
    device : str
        Where its arrays live, as torch names it: "cpu", "cuda" or "cuda:1".
    changeable : frozenset of str
        Fields of its configuration that a campaign's cases may change, because its code does as they say.
    policy : Policy
        What it does by design where no arithmetic says what is right.
    bitwise : frozenset of str, optional
        Names of the properties it claims among those that demand equal bits; all by default. Of those that it does not
        claim, the kind "agreement" must hold within the bounds; the rest are reported as not claimed.
    head_dims : tuple of int, optional
        The only head dims it takes; None where ``configure`` decides.
    sizes : Sizes
        Which other sizes of calls it takes.
    page_sizes : tuple of int, optional
        The only numbers of keys of a page it takes; None for any, if it claims ``paged``.
    forward : {"given", "own"}
        Of a backward, whether its gradients are of the out and lse that it is given, or of a forward of its own.
    mods : ScoreTerm, optional
        The functions that it has built in (:mod:`fa3verify.kernels.loading`).
    quantises : Quantises
        Of a forward, which operands it quantises itself. Its bound has the errors of that, with ``order`` or without.
    unasked : frozenset of str
        Names of properties that cannot be asked of it.
    lacking : str
        Why nothing passes it yet; empty if nothing is missing.

    Raises
    ------
    ValueError
        For an unknown accumulator, one that its operands do not have, or one beside an order or of a quantiser; for an
        order that is no function, and a twin that is no kernel.
    """

    name: str
    dtype: Dtype
    code: Code
    features: frozenset[str]
    description: str = ""
    unavailable: str | None = None
    fault: StrEnum | None = None
    twin: Kernel | None = None
    operation: str = operations.FORWARD
    order: Callable[[Any], KernelModel | BackwardModel] | None = None
    accumulator: Accumulator | None = None
    device: str = "cpu"
    changeable: frozenset[str] = frozenset()
    policy: Policy = DEFAULT
    bitwise: frozenset[str] | None = None
    head_dims: tuple[int, ...] | None = None
    sizes: Sizes = Sizes()  # noqa: RUF009 (immutable)
    page_sizes: tuple[int, ...] | None = None
    forward: ForwardOf = "given"
    mods: ScoreTerm | None = None
    quantises: Quantises = Quantises()  # noqa: RUF009 (immutable)
    unasked: frozenset[str] = frozenset()
    lacking: str = ""

    def __post_init__(self) -> None:
        if self.order is not None and not callable(self.order):
            raise ValueError(
                f"{self.name}: order must be a function of a configuration, such as lambda config: "
                f"{type(self.order).__name__}(...), got one {type(self.order).__name__}"
            )
        if self.twin is not None and not isinstance(self.twin, Kernel):
            raise ValueError(f"{self.name}: twin must be a kernel, as find_kernel returns it, got {self.twin!r}")
        if self.operation == "backward" and self.policy.empty_out in ("mean", "undefined"):
            # Gradients are judged by rows without a key that give none; a row that averages V gives some to all keys.
            object.__setattr__(self, "sizes", replace(self.sizes, queries_within_keys=True))
        if self.accumulator is None:
            return
        if self.accumulator not in (known := get_args(Accumulator)):
            raise ValueError(f"accumulator must be among {', '.join(known)}, got {self.accumulator!r}")
        check_products(self.dtype, self.accumulator)
        if self.order is not None or self.operation == "quantize":
            raise ValueError(
                f"{self.name} takes no accumulator, got {self.accumulator!r}: "
                + ("its bound assumes none" if self.order is None else "its order says how it adds")
            )

    @property
    def declared(self) -> tuple[str, ...]:
        """Return in words what it declares other than the default: its policy, and the sizes that it does not take."""
        words = (f"head_dims {', '.join(map(str, self.head_dims))}",) if self.head_dims is not None else ()
        sizes = (f"{name} {written(value)}" for name, value in self.sizes.said.items())
        codes = (repr(self.quantises),) if self.quantises.said else ()
        return (*self.policy.exceptions, *sizes, *words, *codes, *([self.mods.describe()] if self.mods else ()))

    def fitted(self, problem: AttentionProblem) -> AttentionProblem:
        """Return the problem nearest to one that has the declared sizes, its causal mask aligned as the kernel's.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.

        Returns
        -------
        AttentionProblem
            The problem itself where it has all of them; features that the kernel does not claim stay.

        Raises
        ------
        ValueError
            If there is no such problem.
        """
        fitted = self.policy.aligned(self.sizes.fitted(problem))
        return replace(fitted, term=self.mods) if self.mods and not (fitted.is_varlen or fitted.cache) else fitted

    def altered(self, **functions: Callable[..., Any]) -> Kernel:
        """Return a kernel that declares the same, with other functions in its code.

        Parameters
        ----------
        **functions : callable
            Fields of :class:`Functions` to replace.

        Returns
        -------
        Kernel
            The new kernel; this one stays as it is.
        """
        known: Json = {f.name: getattr(self.code, f.name) for f in fields(Functions) if hasattr(self.code, f.name)}
        known |= functions
        return replace(self, code=Functions(**known))

    def config_for(self, problem: AttentionProblem, changes: Iterable[tuple[str, Setting]] = ()) -> AnyConfig:
        """Return the configuration for a problem with some fields changed.

        Parameters
        ----------
        problem : AttentionProblem
            What is computed.
        changes : iterable of (str, value)
            Fields of the configuration that differ from what the kernel chooses.

        Returns
        -------
        Config, ForwardConfig, BackwardConfig, GradientConfig or QuantizeConfig
            Of the kernel's operation.

        Raises
        ------
        ValueError
            If the problem or the changes are unsupported.
        """
        config = replace(self.configured(problem), **dict(changes))
        self.code.launchable(problem, config)
        return config

    def configured(self, problem: AttentionProblem) -> AnyConfig:
        """Return the configuration that the kernel itself chooses for a problem.

        Parameters
        ----------
        problem : AttentionProblem
            What is computed; the kernel sees a copy.

        Returns
        -------
        Config, ForwardConfig, BackwardConfig, GradientConfig or QuantizeConfig
            Of the kernel's operation.

        Raises
        ------
        ValueError
            If it refuses the problem by one of :data:`REFUSALS`.
        """
        try:
            return self.code.configure(copy(problem))
        except (NotImplementedError, AssertionError) as error:
            raise ValueError(one_line(error)) from error

    def given(self, operands: Operands) -> Operands:
        """Return what it is given of the operands of a case, by which it is judged as well.

        Parameters
        ----------
        operands : Operands
            Of the case, whose sinks are binary32 numbers.

        Returns
        -------
        Operands
            The same, but with sinks that the operands' format holds if it claims ``narrow_sinks``.
        """
        if operands.sinks is None or "narrow_sinks" not in self.features:
            return operands
        return replace(operands, sinks=operands.sinks.astype(FORMATS[self.dtype].dtype).astype(operands.sinks.dtype))

    @property
    def is_handed(self) -> bool:
        """Tell whether its arguments are arranged by :mod:`fa3verify.kernels.handed`: those of a twin are not."""
        return getattr(self.code, "is_handed", False)

    def claims(self, law: str) -> bool:
        """Tell whether it claims the bits of a property that not every kernel has.

        Parameters
        ----------
        law : str
            Name of the property.

        Returns
        -------
        bool
            True of all properties where :attr:`bitwise` is None.
        """
        return self.bitwise is None or law in self.bitwise

    def misfit(self, problem: AttentionProblem) -> str | None:
        """Return the declared rule that a problem breaks; the kernel's code is not called.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.

        Returns
        -------
        str or None
            The rule in words; None if the problem has all declared sizes.
        """
        if self.head_dims is not None and problem.head_dim not in self.head_dims:
            return f"head_dim must be one of {', '.join(map(str, self.head_dims))}, got {problem.head_dim}"
        pages = problem.cache.page_size if problem.cache else 0
        if pages and self.page_sizes is not None and pages not in self.page_sizes:
            return f"page_size must be one of {', '.join(map(str, self.page_sizes))}, got {pages}"
        if self.mods is not None and problem.term != self.mods:
            return f"every call must have {self.mods.describe()}"
        if problem.head_dim in REFUSED.get(self.name, ()):
            return f"it refuses head_dim {problem.head_dim}"
        return self.sizes.misfit(problem) or self.policy.misfit(problem)

    def unreachable(self, problem: AttentionProblem, config: AnyConfig) -> str | None:
        """Return why no caller can have a problem run in a configuration.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.
        config : Config, ForwardConfig, BackwardConfig, GradientConfig or QuantizeConfig
            Of the kernel's operation.

        Returns
        -------
        str or None
            The reason in words; None if a caller can.
        """
        try:
            self.code.launchable(problem, config)
        except ValueError as error:
            return one_line(error)
        return None

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Return why the kernel does not take a problem.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.

        Returns
        -------
        str or None
            The rule in words; None if the kernel takes the problem.
        """
        if problem.dtype != self.dtype:
            return f"dtype must be {self.dtype}, got {problem.dtype}"
        if missing := needed_features(problem) - self.features:
            return f"it does not claim {', '.join(sorted(missing))}"
        if words := self.misfit(problem):
            return words
        try:
            self.configured(problem)
        except ValueError as error:
            return one_line(error)
        return None

    def supports(self, problem: AttentionProblem) -> bool:
        """Tell whether the kernel takes this problem.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.

        Returns
        -------
        bool
            Whether :meth:`refusal` has no reason.
        """
        return self.refusal(problem) is None
