"""Other people's GPU kernels as kernels under judgement: each row of :data:`fa3verify.known.peers.PEERS`.

Nothing of a library is imported before a kernel runs, torch included.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fa3_kernels.plan.backward import BackwardConfig, backward_config
from fa3_kernels.plan.config import Config
from fa3_kernels.twin.backward import Gradients
from fa3_reference.bounds.model import BackwardModel
from fa3_reference.problem import AttentionProblem, BackwardOperands, Operands
from fa3verify import operations
from fa3verify.kernels.record import Candidate, chosen
from fa3verify.kernels.twins import DECLARED
from fa3verify.known.cpu_candidates import CLAIMED
from fa3verify.known.peers import BACKWARDS, PEERS, Peer
from fa3verify.operations.backward import GradientConfig, model_of
from fa3verify.operations.forward import Result
from fa3verify.tensors import here

_KNOWN_BACKWARDS = ("flash3.dew",)


def options_of(name: str, problem: AttentionProblem, config: Config) -> dict[str, Any]:
    """Return what a caller chooses: all there is where a configuration is not the problem's own, else nothing.

    ValueError where that would not give this configuration.
    """
    own = PEERS[name].configure(problem)
    choices = PEERS[name].choices
    if config == own:
        return {}
    options = chosen(own, config, choices)
    if options is None:
        raise ValueError(f"a caller of {name} chooses {' and '.join(choices) or 'nothing'} of a configuration")
    return options


def _identity(name: str) -> dict[str, str | None]:
    """Return the library's version and binary, and the GPU it runs on."""
    from fa3verify.known import loaded

    return {**loaded.identity(name), "device": loaded.device_name()}


def _configure(name: str, problem: AttentionProblem) -> Config:
    return PEERS[name].configure(problem)


def _run(name: str, problem: AttentionProblem, operands: Operands, config: Config) -> Result:
    options = options_of(name, problem, config)
    from fa3verify.known import loaded

    return Result(*loaded.run(name, problem, operands, options))


def _candidates(name: str, peer: Peer, device: str | None) -> tuple[Candidate, ...]:
    facts = DECLARED.get(peer.family, {}) if peer.family else {"bitwise": CLAIMED, **dict(peer.facts)}
    return tuple(
        Candidate(
            f"{name}.{dtype}",
            dtype,
            partial(_run, name),
            partial(_configure, name),
            frozenset(peer.features),
            f"{peer.about} ({peer.version})" if peer.version else peer.about,
            peer.unjudged or peer.missing() or device,
            twin=f"twin.{peer.family}.{dtype}" if peer.family else None,
            order=peer.model,
            changeable=frozenset(peer.choices),
            fixes_config=True,
            identity=partial(_identity, name),
            **facts,
        )
        for dtype in peer.dtypes
    )


def _configure_backward(name: str, problem: AttentionProblem) -> BackwardConfig | GradientConfig:
    """Return what a library's family launches, where that is known."""
    if problem.head_dim % 8 or problem.head_dim_v != problem.head_dim:
        raise ValueError(f"head_dim must be a multiple of 8, got {problem.head_dim} and {problem.head_dim_v}")
    if rule := BACKWARDS[name].refuses(problem):
        raise ValueError(rule)
    if name in _KNOWN_BACKWARDS:
        return backward_config(problem, family=PEERS[name].family)
    return GradientConfig(problem.dtype)


def _run_backward(name: str, problem: AttentionProblem, operands: Operands, config: Any) -> Gradients:
    """Run a library's backward of the out and lse that it is given."""
    from fa3verify.known import backward_launches

    assert isinstance(operands, BackwardOperands)
    return Gradients(*backward_launches.run(name, problem, operands))


def _added_in_16_bits(config: GradientConfig) -> BackwardModel:
    """torch adds dK and dV of a group's heads in 16 bits, whoever computed them."""
    return replace(BackwardModel.any_order(config.dtype, accumulator="either"), parts=config.dtype)


def _gradients(name: str, peer: Peer, device: str | None) -> tuple[Candidate, ...]:
    """The backward of a peer; its parts of dQ are added in any order, so no twin has its bits."""
    order = model_of if name in _KNOWN_BACKWARDS else _added_in_16_bits
    facts = {"min_seqlen": 1, **DECLARED.get(peer.family, {}), "bitwise": frozenset()}
    features = frozenset(peer.features) & operations.find("backward").features - {"varlen", "head_dim_v"}
    return tuple(
        Candidate(
            f"{name}.backward.{dtype}",
            dtype,
            partial(_run_backward, name),
            partial(_configure_backward, name),
            features,
            f"backward of {peer.about}",
            peer.missing() or device,
            operation="backward",
            order=order,
            fixes_config=True,
            identity=partial(_identity, name),
            **facts,
        )
        for dtype in peer.dtypes
    )


def candidates() -> tuple[Candidate, ...]:
    """Return the peers as kernels that verify judges, with the reason where one cannot run here."""
    device = here.no_device()
    forwards = (made for name, peer in PEERS.items() for made in _candidates(name, peer, device))
    return (*forwards, *(made for name, peer in BACKWARDS.items() for made in _gradients(name, peer, device)))
