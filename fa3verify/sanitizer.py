"""The one way to ``fa3verify.models``, an extra that needs torch and that nothing else imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

    from fa3_reference.quantize import QuantScheme
    from fa3verify.models.logprobs import LogprobsRun, PreTrainedModel, Tokens
    from fa3verify.models.measured import Explained
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


def logprobs(
    model: PreTrainedModel,
    texts: Sequence[Tokens],
    kernels: Sequence[str],
    rest: Literal["fp32", "bf16", "fp16"] = "fp32",
    *,
    scheme: QuantScheme | None = None,
    seed: int = 0,
) -> LogprobsRun:
    """Measure what kernels do to the log-probabilities of a language model, beside what rounding is predicted to do.

    Compared is the same model in binary32 with exact attention. Every call of a kernel is judged; the model is copied
    and stays as it is. It needs torch and transformers.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of Transformers, whose attention has no mask but a causal one and windows.
    texts : sequence of int64 tensors (tokens,)
        Token ids, at least two of each text.
    kernels : sequence of str
        Names, as ``fa3verify kernels`` lists them, or "eager" and "sdpa", which Transformers has itself. Heads that a
        kernel does not take are padded with zeros.
    rest : {"fp32", "bf16", "fp16"}
        Format of weights and of everything but attention.
    scheme : QuantScheme, optional
        How operands of e4m3 are scaled: by kv head without one.
    seed : int
        Of the signs of the prediction.

    Returns
    -------
    LogprobsRun
        Its truth value is "no call is beyond the bound of its rounding errors", its text the page. Differences are in
        nats. NaN in log-probabilities stays NaN.

    Raises
    ------
    ValueError
        For an unknown kernel, one that refuses the model's attention, and a model that hands attention a mask.
    ModuleNotFoundError
        Without torch or transformers.

    Examples
    --------
    >>> found = logprobs(model, [tokens], ["twin.flash3.bf16", "twin.flash3.e4m3"])  # doctest: +SKIP
    >>> found.kernels[1].found.rms, found.kernels[1].predicted  # doctest: +SKIP
    (0.1882, 0.2036)
    """
    from fa3verify.models.logprobs import logprobs as measured

    return measured(model, texts, kernels, rest, scheme=scheme, seed=seed)


def explain(
    model: PreTrainedModel,
    tokens: Sequence[Tokens],
    first: Sequence[np.typing.NDArray[np.float32 | np.float64]],
    second: Sequence[np.typing.NDArray[np.float32 | np.float64]],
    rest: Literal["bf16", "fp16"] = "bf16",
    *,
    seed: int = 0,
) -> Explained:
    """Explain whether log-probabilities of two programs differ by rounding, as a known mistake makes, or neither.

    The programs do not run here. It needs torch and transformers; the model is copied and stays as it is.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of Transformers with the weights that both programs had.
    tokens : sequence of int64 arrays (tokens,)
        Token ids of each text.
    first, second : sequence of float32 or float64 arrays
        Natural logarithms of the probability of each token given those before it, of the last tokens of each text: of
        all but the first, of all, in which case the first is left out, or of a response.
    rest : {"bf16", "fp16"}
        Format in which both programs compute.
    seed : int
        Of the noise and the signs.

    Returns
    -------
    Explained
        Its truth value is "within rounding", its text one sentence. Differences are in nats.

    Raises
    ------
    ValueError
        For other shapes, a log-probability that is NaN, infinite or above 0, and a model that hands attention a mask.
    ModuleNotFoundError
        Without torch or transformers.

    Examples
    --------
    >>> print(explain(model, [tokens], [of_trainer], [of_engine]))  # doctest: +SKIP
    within rounding of bf16; 0.0738 nats RMS predicted, 0.0712 seen on 511 tokens
    """
    from fa3verify.models import measured

    return measured.explain(
        measured.LanguageModel(model, rest),
        *([measured.dumped(*each) for each in zip(tokens, own, strict=True)] for own in (first, second)),
        seed=seed,
    )
