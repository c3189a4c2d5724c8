"""Every law in the order in which they run: cheap and telling ones first."""

from __future__ import annotations

from collections.abc import Iterable

from fa3verify.properties.bounded import BIAS_LAWS, BOUNDED_LAWS
from fa3verify.properties.exact import EXACT_LAWS
from fa3verify.properties.gradients import GRADIENT_LAWS
from fa3verify.properties.handing import HANDING_LAWS
from fa3verify.properties.indices import INDEX_LAWS
from fa3verify.properties.law import Law
from fa3verify.properties.merging import MERGING_LAWS
from fa3verify.properties.policy import POLICY_LAWS
from fa3verify.properties.quantizing import QUANTIZE_LAWS
from fa3verify.properties.reuse import REUSE_LAWS
from fa3verify.properties.serving import SERVING_LAWS
from fa3verify.properties.structure import STRUCTURE_LAWS
from fa3verify.properties.terms import TERM_LAWS
from fa3verify.properties.truncation import TRUNCATION_LAWS
from fa3verify.properties.values import VALUE_LAWS

LAWS: tuple[Law, ...] = (
    *BOUNDED_LAWS,
    *VALUE_LAWS,
    *MERGING_LAWS,
    *TRUNCATION_LAWS,
    *STRUCTURE_LAWS,
    *EXACT_LAWS,
    *POLICY_LAWS,
    *INDEX_LAWS,
    *HANDING_LAWS,
    *SERVING_LAWS,
    *TERM_LAWS,
    *REUSE_LAWS,
    *BIAS_LAWS,
    *QUANTIZE_LAWS,
    *GRADIENT_LAWS,
)


def check_claims(names: Iterable[str]) -> None:
    """Raise ValueError, with the list, for a name of no property whose bits a kernel may claim."""
    known = [law.name for law in LAWS if law.kind in ("invariant", "agreement")]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"bitwise must be among {', '.join(known)}, got {unknown[0]!r}")
