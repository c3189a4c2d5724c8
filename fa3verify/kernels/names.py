"""Names of kernels, read and written: where a kernel is found, a planted mistake, head dims, changes, a learned order.

:func:`fa3verify.known.registry.find` turns a name into the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fa3_kernels.plan.config import Setting
from fa3_reference.rules import require
from fa3verify.kernels.policy import VALUES
from fa3verify.kernels.record import Kernel
from fa3verify.kernels.sizes import SIZES, read, written

FEATURES = "features"  # what a name declares instead of the features of a kernel's code
# The last suffix of a name: @64,128 or [field=value,...], where a value may have brackets of its own.
_BEHIND = re.compile(r"(?P<base>.+?)(?:@(?P<dims>\d+(?:,\d+)*)|\[(?P<changes>(?:[^][]|\[[^][]*\])+)\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelName:
    """Holds the parts of a name: ``BASE+fault@64,128[tile_n=64]``, ``BASE[order=FILE]`` or ``BASE[causal=top_left]``.

    Parameters
    ----------
    base : str
        A name that ``fa3verify kernels`` lists, ``module:function`` or ``file.py:function``, of several dtypes
        ``module:function.bf16``.
    fault : str
        The planted mistake of a twin.
    head_dims : tuple of int
        The only head dims that it is to be judged at; empty for all that it takes.
    changes : mapping
        Fields of its configuration, with values other than those that the kernel chooses.
    order : str
        The file of a learned order, whose twin's bits it is held against.
    contract : mapping
        What is declared here and not by its code: fields of its :class:`fa3verify.kernels.policy.Policy` and of its
        :class:`fa3verify.kernels.sizes.Sizes`, and its features.
    """

    base: str
    fault: str = ""
    head_dims: tuple[int, ...] = ()
    changes: Mapping[str, Setting] = field(default_factory=dict)
    order: str = ""
    contract: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> KernelName:
        """Read a name; head dims and changes stand behind the base in any order.

        Raises
        ------
        ValueError
            For malformed head dims or changes, for changes beside an order, and for head dims or changes that stand
            twice.

        Examples
        --------
        >>> name = KernelName.parse("twin.fp16+stale_v@64,128[num_splits=2]")
        >>> name.base, name.fault, name.head_dims, name.changes
        ('twin.fp16', 'stale_v', (64, 128), {'num_splits': 2})
        """
        base = text
        suffixes: dict[str, str] = {}
        while match := _BEHIND.fullmatch(base):
            base = match["base"]
            if (kind := str(match.lastgroup)) in suffixes:
                raise ValueError(f"head dims stand once behind a kernel's name, and so do changes, got {text!r}")
            suffixes[kind] = match[kind]
        _, at, words = base.rpartition(":")[2].rpartition("@")
        require(not at, f"head dims behind @ are numbers such as 64,128, got {words!r}")
        changes = dict(_change(each, text) for each in suffixes["changes"].split(",")) if "changes" in suffixes else {}
        order = str(changes.pop("order", ""))
        contract = {name: written(changes.pop(name)) for name in (*VALUES, *SIZES, FEATURES) if name in changes}
        require(not (order and changes), f"an order stands alone behind a kernel's name, got {text!r}")
        dims = tuple(map(int, suffixes["dims"].split(","))) if "dims" in suffixes else ()
        # A + in a path, or at the end of a name, plants no fault.
        plain, _, fault = (base, "", "") if ":" in base or base.endswith("+") else base.partition("+")
        return cls(base=plain, fault=fault, head_dims=dims, changes=changes, order=order, contract=contract)

    def __str__(self) -> str:
        changes = {**self.changes, **self.contract} | ({"order": self.order} if self.order else {})
        words = ",".join(f"{key}={str(x).lower() if isinstance(x, bool) else x}" for key, x in changes.items())
        dims = ",".join(map(str, self.head_dims))
        return self.plain + (f"@{dims}" if dims else "") + (f"[{words}]" if words else "")

    @property
    def plain(self) -> str:
        """Return the name of the kernel itself, with all head dims and in its own configuration."""
        return f"{self.base}+{self.fault}" if self.fault else self.base

    @property
    def sound(self) -> KernelName:
        """Return the name of the twin in which a mistake was planted; its own where none was."""
        return replace(self, fault="")

    @property
    def is_reference(self) -> bool:
        """Tell whether it says where somebody's own kernel is found."""
        return ":" in self.base


def declaring(kernel: Kernel, said: Mapping[str, str]) -> Kernel:
    """Return a kernel that declares more than its code.

    Parameters
    ----------
    kernel : Kernel
        It stays as it is.
    said : mapping of str to str
        By name fields of its policy and of its sizes, and ``features``, as the kernel's name has them.

    Returns
    -------
    Kernel
        Of the same code.

    Raises
    ------
    ValueError
        For a value that a field cannot have.
    """
    sizes = {name: read(name, text) for name, text in said.items() if name in SIZES}
    named = said.get(FEATURES)
    return replace(
        kernel,
        policy=kernel.policy.declaring({name: text for name, text in said.items() if name in VALUES}),
        sizes=replace(kernel.sizes, **sizes),
        features=kernel.features if named is None else frozenset(named.split("+")) - {"none"},
    )


def declaration(kernel: Kernel, said: Mapping[str, str]) -> str:
    """Return what declares more of a kernel in Python, with all of its policy where that is declared.

    Parameters
    ----------
    kernel : Kernel
    said : mapping of str to str
        As :func:`declaring` takes them.

    Returns
    -------
    str
        Keywords of ``fa3verify.kernel``.
    """
    words = [_in_python(name, text) for name, text in said.items() if name not in VALUES]
    return ", ".join([*words, *([declaring(kernel, said).policy.declaration] if VALUES.keys() & said.keys() else [])])


def _in_python(name: str, text: str) -> str:
    """Return what declares a size or features, as a keyword of ``fa3verify.kernel``."""
    several = tuple(each for each in text.split("+") if each != "none")
    return f"{name}={several if name == FEATURES else read(name, text)!r}"


def _change(text: str, name: str) -> tuple[str, Setting]:
    """Return a field and its value: an integer, a switch or a word."""
    key, _, value = text.partition("=")
    require(key and value, f"a configuration is KERNEL[FIELD=VALUE,...], got {name!r}")
    switches = {"true": True, "false": False}
    return key, switches.get(value, int(value) if value.lstrip("-").isdigit() else value)
