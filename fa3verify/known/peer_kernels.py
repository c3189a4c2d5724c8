"""Other people's GPU kernels as kernels under judgement: one for each row of :data:`fa3verify.known.peers.PEERS`.

:func:`fa3verify.known.registry.find` takes them from here, and :mod:`fa3verify.known.launches` runs them. No library is
imported before a kernel runs, torch included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fa3_kernels.plan.config import Setting
from fa3_reference.problem import AttentionProblem, Operands
from fa3verify import operations
from fa3verify.kernels.functions import Facts
from fa3verify.kernels.record import Functions, Kernel
from fa3verify.kernels.sizes import gathered
from fa3verify.kernels.twins import TWINS, declared
from fa3verify.known.cpu_kernels import CLAIMED
from fa3verify.known.peers import BACKWARDS, PEERS
from fa3verify.operations import AnyConfig
from fa3verify.tensors import here


def _configure(name: str, operation: str, problem: AttentionProblem) -> AnyConfig:
    peer = PEERS[name]
    return peer.configure(problem) if operation == operations.FORWARD else peer.configure_backward(problem)


def _options(name: str, operation: str, problem: AttentionProblem, config: AnyConfig) -> dict[str, Setting]:
    """Return the options with which a call has a configuration: none if the library chooses it by itself.

    Otherwise these are all options of the library. ValueError if even they do not lead to the configuration.
    """
    own = _configure(name, operation, problem)
    if config == own:
        return {}
    choices = PEERS[name].choices if operation == operations.FORWARD else ()
    options = {choice: getattr(config, choice) for choice in choices}
    if replace(own, **options) != config:
        raise ValueError(f"a caller of {name} chooses {' and '.join(choices) or 'nothing'} of a configuration")
    return options


def _run(name: str, operation: str, problem: AttentionProblem, operands: Operands, config: Any) -> tuple[Any, ...]:
    """Run a library's forward in a configuration, or its backward on the out and lse in the operands."""
    options = _options(name, operation, problem, config)
    from fa3verify.known import launches

    return launches.run(name, problem, operands, options)


def _identity(name: str) -> dict[str, str | None]:
    """Return the library's version and binary, and the GPU it runs on."""
    from fa3verify.known import launches

    return {**launches.identity(name), "device": launches.device_name()}


def _code(name: str, operation: str) -> Functions:
    return Functions(
        run=partial(_run, name, operation),
        configure=partial(_configure, name, operation),
        launchable=partial(_options, name, operation),
        identity=partial(_identity, name),
        is_handed=True,
    )


def _forwards(name: str, device: str | None) -> Iterator[Kernel]:
    """Yield the forward kernels of a peer, one per dtype; ``device`` says why no GPU is there, None where one is."""
    peer = PEERS[name]
    for dtype in peer.dtypes:
        own: Facts = {"bitwise": CLAIMED, **peer.facts}
        facts = declared(peer.family, dtype) if peer.family else own
        kernel = Kernel(
            f"{name}.{dtype}",
            dtype,
            _code(name, operations.FORWARD),
            frozenset(peer.features),
            f"{peer.about} ({peer.version})" if peer.version else peer.about,
            peer.missing() or device,
            twin=TWINS[f"twin.{peer.family}.{dtype}"] if peer.family else None,
            order=peer.model,
            changeable=frozenset(peer.choices),
        )
        yield replace(kernel, **gathered(facts))


def _backwards(name: str, device: str | None) -> Iterator[Kernel]:
    """Yield the backward kernels of a peer, one per dtype.

    The parts of dQ are added in any order, so that no twin has their bits and no property of equal bits is claimed.
    """
    peer = PEERS[name]
    facts: Facts = {"min_seqlen": 1, **declared(peer.family, "fp16"), "bitwise": frozenset()}
    for dtype in peer.dtypes:
        kernel = Kernel(
            f"{name}.backward.{dtype}",
            dtype,
            _code(name, "backward"),
            frozenset(peer.features) & operations.find("backward").features - {"varlen", "head_dim_v"},
            f"backward of {peer.about}",
            peer.missing() or device,
            operation="backward",
            order=peer.gradients,
        )
        yield replace(kernel, **gathered(facts))


def kernels() -> tuple[Kernel, ...]:
    """Return all peers as kernels, with the reason where one cannot run here."""
    device = here.no_device()
    forwards = (kernel for name in PEERS for kernel in _forwards(name, device))
    return (*forwards, *(kernel for name in BACKWARDS for kernel in _backwards(name, device)))
