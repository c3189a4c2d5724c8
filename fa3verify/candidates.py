"""What is judged: kernels behind one calling convention.

Built in are the CPU twins. Others come from ``module:function``, ``file.py:function`` or the entry-point group
``fa3verify.kernels``; all name a function without arguments that returns a :class:`Candidate`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from fa3_kernels.plan.config import Config, Setting
from fa3_kernels.plan.traits import FAMILIES, OURS, traits_of
from fa3_reference.problem import DTYPES, AttentionProblem, Dtype, Operands
from fa3verify import __version__, operations
from fa3verify.operations import FEATURES as FEATURES
from fa3verify.operations import AnyConfig
from fa3verify.operations.backward import model_of
from fa3verify.operations.forward import Result as Result
from fa3verify.operations.forward import changeable
from fa3verify.operations.forward import order_of_family as order_of_family
from fa3verify.policy import DEFAULT, Policy
from fa3verify.text import MOST_BYTES, of_error, of_traceback, one_line

if TYPE_CHECKING:
    from fa3_reference.bounds import BackwardModel, KernelModel
    from fa3verify.cases import Case

ENTRY_POINTS = "fa3verify.kernels"
Accumulator = Literal["fp32", "wgmma", "either"]
MADE = "__fa3verify_candidates__"  # of a function that was declared to be a kernel: its candidates


@dataclass(frozen=True, slots=True)
class Identity:
    """What exactly was judged; None is what a kernel does not say. Every text is one line of at most 4 KiB.

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A kernel under judgement.

    Parameters
    ----------
    name : str
        Unique, such as ``twin.fp16``.
    dtype : {"fp16", "bf16", "e4m3"}
        Format of its operands, of a quantiser that of its codes.
    run : callable
        ``run(problem, operands, config)``: the operation's outputs, as a mapping by name or as attributes (for a
        forward :class:`Result`).
    configure : callable
        ``configure(problem)``: the operation's configuration (for a forward ``Config``). ValueError if unsupported.
    features : frozenset of str
        Subset of :data:`FEATURES`, and of a backward :data:`fa3verify.operations.LSE_GRADIENT`; problems that need
        others are never sent.
    description : str
        One line for lists of kernels.
    unavailable : str, optional
        Why it cannot run here.
    fault : StrEnum, optional
        The planted mistake of a faulty twin.
    twin : str, optional
        Name of the twin whose bits it must equal (the verdict's part "bits").
    operation : str
        What it computes: a name in :data:`fa3verify.operations.OPERATIONS`.
    order : callable, optional
        ``order(config)``: the :class:`fa3_reference.bounds.KernelModel` of a forward, or the
        :class:`fa3_reference.bounds.model.BackwardModel` of a backward, which states its order of operations and is
        what the error bound assumes; :func:`fa3verify.operations.forward.order_of_family` for a family that is known.
        Without it the bound is the wider one of any order (:mod:`fa3verify.hypotheses`).
    accumulator : {"fp32", "wgmma", "either"}, optional
        Of a kernel without ``order``, how it adds products: in binary32, in Hopper's tensor core, or either. By default
        its device decides.
    device : str
        Where its arrays live, as torch names it: "cpu", "cuda" or "cuda:1".
    changeable : frozenset of str
        Fields of its configuration that a campaign's cases may change, because ``run`` does as they say.
    policy : Policy
        What it does by design where no arithmetic says what is right.
    bitwise : frozenset of str, optional
        Names of the properties it claims among those that demand equal bits of calls that differ; all by default. Of
        the others those of kind "agreement" hold within the bounds; the rest are reported as not claimed.
    head_dims : tuple of int, optional
        The only ones it takes; without it, those that ``configure`` does not refuse.
    seqlen_multiple, min_seqlen : int
        Every length of queries and keys is a multiple of the one and at least the other; problems are adapted to that
        (:func:`fa3verify.coverage.adapted`). With ``min_seqlen`` 0 it takes sequences without keys as well.
    fixes_config : bool
        Its configuration follows from the problem, but for what is ``changeable``: a property that keeps the
        configuration of another problem is not tried on it.
    launchable : callable, optional
        ``launchable(problem, config)`` raises ValueError where no launch of a problem has a configuration. Without it
        every configuration that ``changeable`` leads to can be run.
    identity : callable, optional
        ``identity()``: fields of :class:`Identity` by name, for stored judgements. Asked once in a campaign, where the
        kernel runs.

    Raises
    ------
    ValueError
        For an unknown accumulator, or one beside an order or of a quantiser.
    """

    name: str
    dtype: Dtype
    run: Callable[..., object]
    configure: Callable[[AttentionProblem], AnyConfig]
    features: frozenset[str]
    description: str = ""
    unavailable: str | None = None
    fault: StrEnum | None = None
    twin: str | None = None
    operation: str = operations.FORWARD
    order: Callable[[Any], KernelModel | BackwardModel] | None = None
    accumulator: Accumulator | None = None
    device: str = "cpu"
    changeable: frozenset[str] = frozenset()
    policy: Policy = DEFAULT
    bitwise: frozenset[str] | None = None
    head_dims: tuple[int, ...] | None = None
    seqlen_multiple: int = 1
    min_seqlen: int = 0
    fixes_config: bool = False
    launchable: Callable[..., object] | None = None
    identity: Callable[[], Mapping[str, str | None]] | None = None

    def __post_init__(self) -> None:
        if self.accumulator is None:
            return
        if self.accumulator not in (known := get_args(Accumulator)):
            raise ValueError(f"accumulator must be among {', '.join(known)}, got {self.accumulator!r}")
        if self.order is not None or self.operation == "quantize":
            why = "its order says how it adds" if self.order is not None else "its bound assumes none"
            raise ValueError(f"{self.name} takes no accumulator, got {self.accumulator!r}: {why}")

    @property
    def declared(self) -> tuple[str, ...]:
        """What it declares other than the default, in words: its policy, and the sizes that it does not take."""
        sizes = {"min_seqlen": self.min_seqlen > 0, "seqlen_multiple": self.seqlen_multiple > 1}
        words = [f"{name} {getattr(self, name)}" for name, is_said in sizes.items() if is_said]
        if self.head_dims is not None:
            words.append(f"head_dims {', '.join(map(str, self.head_dims))}")
        return (*self.policy.exceptions, *words)

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
        Config, BackwardConfig, GradientConfig or QuantizeConfig
            Of the kernel's operation.

        Raises
        ------
        ValueError
            If the problem or the changes are unsupported.
        """
        config = replace(self.configure(copy(problem)), **dict(changes))
        if self.launchable is not None:
            self.launchable(problem, config)
        return config

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
        """Return the declared size that a problem does not have; nothing is asked of the kernel.

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
        if self.seqlen_multiple > 1 or self.min_seqlen > 0:
            for n in (n for seq in problem.sequences() for n in (seq.seqlen_q, seq.seqlen_k)):
                if n % self.seqlen_multiple:
                    return f"lengths must be multiples of {self.seqlen_multiple}, got {n}"
                if n < self.min_seqlen:
                    return f"lengths must be at least {self.min_seqlen}, got {n}"
        return self.policy.misfit(problem)

    def unreachable(self, problem: AttentionProblem, config: AnyConfig) -> str | None:
        """Return why no caller can have a problem run in a configuration.

        Parameters
        ----------
        problem : AttentionProblem
            What would be computed.
        config : Config, BackwardConfig, GradientConfig or QuantizeConfig
            Of the kernel's operation.

        Returns
        -------
        str or None
            The reason in words; None if a caller can.
        """
        if not self.fixes_config:
            return None
        try:
            own = self.configure(copy(problem))
        except ValueError:  # as the run will say
            return None
        if chosen(own, config, self.changeable) is not None:
            return None
        return f"a caller chooses {' and '.join(sorted(self.changeable)) or 'nothing'} of a configuration"

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
            self.configure(copy(problem))
        except ValueError as error:
            return one_line(error)
        return None

    def check_descales(self, case: Case) -> None:
        """Check that the kernel claims to take the descales of a case, for it must not be judged by others.

        Parameters
        ----------
        case : Case
            What would be judged.

        Raises
        ------
        ValueError
            If the kernel does not claim them.
        """
        if missing := needed_descales(case) - self.features:
            raise ValueError(f"{self.name} does not claim {', '.join(sorted(missing))}: {case.describe()}")

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


def needed_features(problem: AttentionProblem) -> frozenset[str]:
    """Features of :data:`FEATURES` a problem needs from a kernel."""
    needs = {
        "causal": problem.causal,
        "window": problem.window != (-1, -1),
        "softcap": problem.softcap > 0,
        "varlen": problem.is_varlen,
        "gqa": problem.group > 1,
        "head_dim_v": problem.head_dim_v != problem.head_dim,
    }
    return frozenset(name for name, needed in needs.items() if needed)


def needed_descales(case: Case) -> frozenset[str]:
    """Features of :data:`fa3verify.operations.DESCALES` that a case needs from a kernel."""
    operation = operations.find(case.operation)
    return operation.descales_of(case.problem, case.scheme, dict(case.changes))


def chosen(own: Any, config: Any, names: Iterable[str]) -> dict[str, Any] | None:
    """Return the fields of these names by which one configuration becomes another, None if they do not."""
    found = {name: getattr(config, name) for name in names}
    return found if replace(own, **found) == config else None


@dataclass(frozen=True, slots=True)
class _Twin:
    """Callable side of a twin candidate; a record so that it can travel to worker processes."""

    operation: str
    changes: tuple[tuple[str, Any], ...] = ()
    fault: StrEnum | None = None

    def configure(self, problem: AttentionProblem) -> Any:
        return operations.find(self.operation).configure(problem, **dict(self.changes))

    def run(self, problem: AttentionProblem, operands: Operands, config: Any) -> Any:
        return operations.find(self.operation).twin(problem, operands, config, self.fault)

    def unrounded(self, problem: AttentionProblem, operands: Operands, config: Any) -> Result:
        """Run a twin of a forward up to its last rounding: out is float32."""
        from fa3_kernels.twin.forward import forward

        return Result(*forward(problem, operands, config, ideal=frozenset({"output"}), fault=self.fault))  # type: ignore[arg-type]

    def identity(self) -> dict[str, str | None]:
        """The twin's own sources, and the version of the kernels whose bits it has."""
        from fa3_kernels.twin.compiled import source_hash

        traits = traits_of(str(dict(self.changes).get("family", OURS)))
        version = f"twin of {traits.title} ({traits.version}), fa3verify {__version__}"
        return {"version": version, "sha256": source_hash(), "device": "CPU"}


def twin(
    dtype: Dtype,
    *,
    name: str | None = None,
    fault: StrEnum | None = None,
    description: str = "",
    operation: str = operations.FORWARD,
    **changes: object,
) -> Candidate:
    """Build a twin candidate, optionally with configuration changes or a planted fault."""
    side = _Twin(operation, tuple(sorted(changes.items())), fault)
    name = name or f"twin.{dtype}" + (f"+{fault}" if fault else "")
    features, free = operations.find(operation).features_of(changes), frozenset[str]()
    if operation == operations.FORWARD:
        free = changeable(dtype, changes, str(changes.get("family", OURS)))
    order = model_of if operation == "backward" else order_of_family
    return Candidate(
        name, dtype, side.run, side.configure, features, description, fault=fault, operation=operation,
        order=order, changeable=free, identity=side.identity,
    )  # fmt: skip


# Verified by default.
BUILT_IN: tuple[Candidate, ...] = (
    twin("fp16", description="bit-exact CPU twin of the FP16 forward kernel"),
    twin("bf16", description="bit-exact CPU twin of the BF16 forward kernel"),
    twin("e4m3", description="bit-exact CPU twin of the FP8 forward kernel, P V promoted every 128 keys"),
    twin(
        "e4m3",
        name="twin.quantize",
        operation="quantize",
        description="bit-exact CPU twin of the quantiser to e4m3",
    ),
)
# How FlashAttention-2 splits the keys follows from how many tiles a call has, so that bits of one sequence and head
# depend on the others, on packing and on the mask.
_WHATEVER_THE_SPLITS = frozenset(
    {
        "order_of_sequences_and_heads",
        "repeated_run_is_identical",
        "schedule_switches_change_no_bit",
        "score_scaling_by_powers_of_two",
        "sign_symmetry",
        "value_channels_are_independent",
        "value_scaling_by_powers_of_two",
    }
)
# What kernels of other families declare, the twin as the library and from here alone, so that one verdict can be held
# against the other: cuDNN runs another kernel for one query, the tutorial masks no tail, and FlashAttention-2 takes a
# part of the keys whose row sum is NaN for an empty one, so that lse is finite where out is NaN.
DECLARED: dict[str, dict[str, Any]] = {
    "cudnn": {"min_seqlen": 2, "policy": Policy(causal="top_left")},
    "flash2": {"policy": Policy(empty_lse="+inf", special_values="out"), "bitwise": _WHATEVER_THE_SPLITS},
    "triton_tutorial": {"head_dims": (64,), "seqlen_multiple": 64, "policy": Policy(special_values="undefined")},
}
# Built in, but verified only when named.
ON_REQUEST: tuple[Candidate, ...] = (
    twin(
        "e4m3",
        name="twin.e4m3_chained",
        promotion_interval=0,
        description="FP8 twin without promotion, as official FlashAttention-3: loses long-context output",
    ),
    *(
        replace(
            twin(
                dtype,
                name=f"twin.{family}.{dtype}",
                family=family,
                description=f"bit-exact CPU twin of {traits.title} ({traits.version})",
            ),
            **DECLARED.get(family, {}),
        )
        for family, traits in FAMILIES.items()
        if traits.is_reproduced and family != OURS
        for dtype in traits.dtypes
    ),
    *(
        replace(
            twin(
                dtype,
                name=f"twin.backward.{dtype}" if family == OURS else f"twin.{family}.backward.{dtype}",
                family=family,
                operation="backward",
                description=f"bit-exact CPU twin of the backward of {traits.title} ({traits.version})",
            ),
            min_seqlen=1,
        )
        for family, traits in FAMILIES.items()
        if traits.backward is not None
        for dtype in traits.dtypes
        if dtype != "e4m3"
    ),
)


class Unloadable(ValueError):
    """A kernel's own code failed while it was loaded."""


def load(reference: str) -> Candidate:
    """Import ``module:function`` or ``file.py:function``, and name the candidate by its reference so that anyone can
    find it again.

    The function returns a candidate or several, or was made some by :func:`fa3verify.kernel`; of several, the
    reference names one by its dtype: ``module:function.bf16``.

    Raises
    ------
    ValueError
        If the reference is malformed, names nothing, several or a function that takes arguments and is not declared to
        be a kernel, does not give a Candidate of known operation, dtype and features, or if its module cannot be
        imported; the message then has the last frame.
    Unloadable
        If the function raises, or the module ends the process by SystemExit.
    """
    module, _, function = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a kernel beside the user, as python -m would find it
    if not module or not function or ":" in function:
        raise ValueError(f"a kernel reference is module:function, got {reference!r}")
    name, _, dtype = function.partition(".")
    named = _named(reference, module, name)
    try:
        made = getattr(named, MADE, None) or named()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a third party's function may raise anything
        raise Unloadable(f"kernel {reference!r} could not be loaded: {of_error(error)}") from error
    candidate = _one_of(reference, made if isinstance(made, tuple) else (made,), dtype)
    _check(reference, candidate)
    return replace(candidate, name=reference)


def _named(reference: str, module: str, name: str) -> Any:
    """Return what a reference names, a kernel or a function without arguments; ValueError as :func:`load` says."""
    failed = f"kernel {reference!r} could not be loaded"
    try:
        imported = _imported(module)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        raised = of_traceback(error)
        where = f" ({raised['frame']})" if raised and not isinstance(error, SyntaxError) else ""
        raise ValueError(f"{failed}: {of_error(error)}{where}") from error
    except BaseException as error:  # a third party's module may raise anything
        raise Unloadable(f"{failed}: {of_error(error)}") from error
    named = getattr(imported, name, None)
    if named is None:
        functions = [key for key, value in vars(imported).items() if callable(value)]
        raise ValueError(f"{failed}: {module} has no function {name}{_meant(name, functions)}")
    if not hasattr(named, MADE) and (arguments := _required(named)):
        rule = f"{name} takes {', '.join(arguments)}; write @fa3verify.kernel(...) above it to declare it a kernel"
        raise ValueError(f"{failed}: {rule}, or name a function without arguments that returns a Candidate")
    return named


def _required(function: Any) -> list[str]:
    """Names of the arguments that a function cannot be called without; none where Python does not know."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _meant(name: str, known: Iterable[str]) -> str:
    """A question for the name that was meant; empty where none is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _imported(module: str) -> ModuleType:
    """Import a module by its name, or a file by its path, whose folder its own imports are then found in."""
    if not module.endswith(".py"):
        return importlib.import_module(module)
    file = os.path.realpath(module)
    folder, name = os.path.split(file.removesuffix(".py"))
    if not os.path.isfile(file):
        raise ModuleNotFoundError(f"there is no file {module} in {os.getcwd()}", name=module)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    found = importlib.import_module(name)
    if (other := os.path.realpath(str(found.__file__))) != file:
        raise ImportError(f"the module {name} is {other}: rename {module}")
    return found


def _one_of(reference: str, made: tuple[Any, ...], dtype: str) -> Candidate:
    """Return the only one, or the one of a dtype."""
    for candidate in made:
        if not isinstance(candidate, Candidate):
            rule = "must be declared by @fa3verify.kernel(...), or return a fa3verify Candidate"
            raise ValueError(f"kernel {reference!r} {rule}, got {type(candidate).__name__}")
    chosen = [candidate for candidate in made if candidate.dtype == dtype] if dtype else made
    if len(chosen) == 1:
        return chosen[0]
    base = reference.removesuffix(f".{dtype}")
    names = ", ".join(f"{base}.{candidate.dtype}" for candidate in made)
    raise ValueError(f"kernel {reference!r} must name one of {names}")


def _check(reference: str, candidate: Candidate) -> None:
    """Raise ValueError, with the list, for an operation, a dtype or a feature that is misspelt."""
    known = {"operation": operations.OPERATIONS, "dtype": DTYPES}
    for name, choices in known.items():
        if (value := getattr(candidate, name)) not in choices:
            raise ValueError(f"kernel {reference!r}: {name} must be one of {', '.join(choices)}, got {value!r}")
    known_features = FEATURES | {operations.LSE_GRADIENT}
    if unknown := set(candidate.features) - known_features:
        names = f"{', '.join(sorted(known_features))}, got {', '.join(map(repr, unknown))}"
        raise ValueError(f"kernel {reference!r}: features must be among {names}")


def discover() -> dict[str, Candidate]:
    """Return every known candidate by name, installed entry points included; broken ones are marked unavailable."""
    from fa3verify.adapters import peers
    from fa3verify.adapters.cpu_candidates import cpu
    from fa3verify.gpu.candidates import gpu

    found = {c.name: c for c in (*BUILT_IN, *ON_REQUEST, *gpu(), *peers.candidates(), *cpu())}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            candidate = load(entry.value)
        except ValueError as error:
            candidate = replace(ON_REQUEST[0], description="", unavailable=str(error))
        found[entry.name] = replace(candidate, name=entry.name)
    return found


def _of_head_dims(candidate: Candidate, dims: str) -> Candidate:
    """The kernel with these head dims alone, given as text; ValueError for one that it does not take."""
    if not all(d.isdecimal() for d in dims.split(",")):
        raise ValueError(f"head dims behind @ are numbers such as 64,128, got {dims!r}")
    asked, known = tuple(map(int, dims.split(","))), candidate.head_dims
    if known is not None and (others := set(asked) - set(known)):
        raise ValueError(f"{candidate.name} takes head_dim {', '.join(map(str, known))}, not {min(others)}")
    if candidate.unavailable is None:
        for head_dim in asked:
            _check_head_dim(candidate, head_dim)
    return replace(candidate, name=f"{candidate.name}@{dims}", head_dims=asked)


def _check_head_dim(candidate: Candidate, head_dim: int) -> None:
    """Raise ValueError, with the rule, for a head_dim that a kernel refuses, or of which a twin has no kernel."""
    from fa3verify import space

    try:
        rule = space.head_dim_refusal(candidate, head_dim)
        if isinstance(getattr(candidate.run, "__self__", None), _Twin):  # which computes sizes that no launch has
            Config(candidate.dtype, head_dim)
    except ValueError as error:
        rule = str(error)
    if rule:
        raise ValueError(f"{candidate.name} does not take head_dim {head_dim}: {rule}")


def find(name: str) -> Candidate:
    """Return the kernel of a name.

    Parameters
    ----------
    name : str
        A name that ``fa3verify kernels`` lists, ``NAME+fault`` for a twin with a planted mistake, ``module:function``
        or ``file.py:function``, of several dtypes ``module:function.bf16``. ``@64,128`` behind any of them leaves it
        these head dims alone.

    Returns
    -------
    Candidate
        The kernel, also where it cannot run here: then ``unavailable`` says why.

    Raises
    ------
    ValueError
        If there is no such kernel, with the name that may have been meant, or if its own code cannot be loaded.

    Examples
    --------
    >>> find("twin.fp16").dtype
    'fp16'
    >>> find("twin.e4m3+stale_v").fault
    <Fault.STALE_V: 'stale_v'>
    """
    base, at, dims = name.rpartition("@")
    if at and base.rpartition("@")[2].replace(",", "").isdecimal():
        raise ValueError(f"head dims stand once behind a kernel's name, as in NAME@64,128, got {name!r}")
    if at:
        return _of_head_dims(find(base), dims)
    if ":" in name:
        return load(name)
    known = {c.name: c for c in (*BUILT_IN, *ON_REQUEST)}  # without looking for a GPU
    if name not in known and (installed := importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)):
        return replace(load(next(iter(installed)).value), name=name)
    if name not in known and "+" not in name:
        known = discover()
    if name in known:
        return known[name]
    base, _, fault = name.partition("+")
    if fault and base in known and base.startswith("twin."):
        operation = known[base].operation
        faults = operations.find(operation).faults
        try:
            planted = faults(fault)
        except ValueError:
            raise ValueError(f"unknown fault {fault!r} of {operation}; known are {', '.join(faults)}") from None
        side = known[base].run.__self__  # type: ignore[attr-defined]
        return twin(known[base].dtype, name=name, fault=planted, operation=operation, **dict(side.changes))
    rest = "'fa3verify kernels' lists them all; one of your own is MODULE:FUNCTION or FILE.py:FUNCTION"
    raise ValueError(f"unknown kernel {name!r}{_meant(base, known) or ';'} {rest}")
