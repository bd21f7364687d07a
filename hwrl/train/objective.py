"""The loss of a run: a policy loss of hwrl or of the user, and the terms around it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from hwrl.errors import DataError, in_one_line, lines_of
from hwrl.interfaces import LossInputs, TokenLoss
from hwrl.train.choices import KlEstimator, RejectionMode

_TAKEN = frozenset(
    [
        "loss",
        "entropy",
        "mismatch_kl",
        "kl",
        "reverse_kl",
        "rejected",
        "grad_norm",
        "learning_rate",
        "padding_share",
        "recompilations",
        "clipped",
        "is_weight",
    ]
)
"""Metrics of a step with these names are hwrl's own."""
_NAME = re.compile(r"\w[\w./@+-]{0,99}")

LossResult = tuple[torch.Tensor, dict[str, torch.Tensor]]


def kl_penalty(logprobs: torch.Tensor, reference: torch.Tensor, *, estimator: KlEstimator) -> torch.Tensor:
    """Return an estimate, token by token, of KL(policy ‖ reference), for tokens of the policy.

    Schulman's estimators (http://joschu.net/blog/kl-approx.html) with d = logprobs - reference: ``k1``: d; ``k2``:
    d² / 2; ``k3``: exp(-d) - 1 + d. ``k2`` has the gradient of the divergence; the gradient of ``k1`` is 0 on average.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return (-difference).exp() - 1 + difference


@dataclass(frozen=True)
class Rejection:
    """Takes tokens out of the policy loss if their ratio to the behaviour policy leaves ``lower`` … ``upper``.

    ``token_k1`` looks at each token's ratio, and rejects tokens. ``seq_sum_k1`` looks at the product of a row's ratios,
    ``seq_mean_k1`` at their geometric mean; both reject whole rows. The ratio is that of the proximal policy if the
    loss needs one, else of the current policy. Rejected tokens still count in the mean over tokens or rows.
    """

    mode: RejectionMode
    lower: float
    upper: float

    def keeps(self, inputs: LossInputs) -> torch.Tensor:
        """Return which tokens stay (tokens, bool)."""
        newer = inputs.logprobs.detach() if inputs.proximal is None else inputs.proximal
        ratio = newer - inputs.behaviour
        if self.mode != "token_k1":
            of_rows = inputs.row_sums if self.mode == "seq_sum_k1" else inputs.row_means
            ratio = of_rows(ratio)[inputs.rows]
        return (ratio >= math.log(self.lower)) & (ratio <= math.log(self.upper))


@dataclass(frozen=True)
class Objective:
    """A policy loss, without rejected tokens, plus ``kl_coeff`` × KL minus ``entropy_coeff`` × entropy, per token."""

    policy: TokenLoss
    rejection: Rejection | None = None
    kl_coeff: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coeff: float = 0.0

    @property
    def token_local(self) -> bool:
        """Whether a token's loss depends on this token alone."""
        return self.policy.token_local and (self.rejection is None or self.rejection.mode == "token_k1")

    @property
    def needs_proximal(self) -> bool:
        """Whether the policy loss needs the log-probabilities at the start of the step."""
        return self.policy.needs_proximal

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen policy's log-probabilities must be computed."""
        return self.policy.needs_reference or self.kl_coeff != 0

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient."""
        return self.policy.needs_entropy_gradient or self.entropy_coeff != 0

    def __call__(self, inputs: LossInputs, /) -> LossResult:
        """Return the loss and the metrics of each token; with the terms, ``kl`` and ``rejected`` among these."""
        per_token, metrics = self.policy(inputs)
        if self.rejection is not None:
            keeps = self.rejection.keeps(inputs)
            per_token = per_token.where(keeps, 0.0)
            metrics = {**metrics, "rejected": ~keeps}
        if self.kl_coeff:
            assert inputs.reference is not None, "a KL term needs the reference's log-probabilities"
            kl = kl_penalty(inputs.logprobs, inputs.reference, estimator=self.kl_estimator)
            per_token = per_token + self.kl_coeff * kl
            metrics = {**metrics, "kl": kl.detach()}
        if self.entropy_coeff:
            per_token = per_token - self.entropy_coeff * inputs.entropy
        return per_token, metrics


@dataclass(frozen=True)
class UserLoss:
    """A user's function as a loss. Attributes of the function set the fields of the same names."""

    function: Callable[[LossInputs], Any]
    token_local: bool = False
    needs_proximal: bool = False
    needs_reference: bool = False
    needs_entropy_gradient: bool = False
    _names: list[frozenset[Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, function: Callable[[LossInputs], Any]) -> UserLoss:
        """Return the loss that calls ``function``."""
        names = ("token_local", "needs_proximal", "needs_reference", "needs_entropy_gradient")
        return cls(function, **{name: bool(getattr(function, name, False)) for name in names})

    def __call__(self, inputs: LossInputs, /) -> LossResult:
        """Return the function's result. Raises DataError if it raises, or returns no loss and metrics of each token."""
        try:
            result = self.function(inputs)
        except Exception as exc:
            raise DataError(
                f"the loss {getattr(self.function, '__name__', self.function)!r} raised an error",
                why=f"with {len(inputs.logprobs)} tokens: {in_one_line(exc)}{lines_of(exc)}",
                fix="correct the function that algorithm.loss names",
            ) from exc
        match result:
            case (torch.Tensor() as per_token, dict() as metrics):
                tensors = [per_token, *metrics.values()]
                if all(isinstance(one, torch.Tensor) and one.shape == inputs.logprobs.shape for one in tensors):
                    self._check_names(metrics)
                    return per_token, {name: value.detach() for name, value in metrics.items()}
        raise DataError(
            f"the loss {getattr(self.function, '__name__', self.function)!r} returned no losses of tokens",
            why=f"with {len(inputs.logprobs)} tokens it returned {_described(result)}",
            fix="return (loss, metrics) from algorithm.loss: a tensor shaped like inputs.logprobs, and a dict of such "
            "tensors",
        )

    def _check_names(self, metrics: Iterable[Any]) -> None:
        """Raise DataError unless the names can be metrics, and are those of the first call: ranks add them up."""
        names = frozenset(metrics)
        if not self._names:
            self._names.append(names)
            if wrong := sorted(map(repr, (one for one in names if not _is_free(one)))):
                raise DataError(
                    f"the loss {getattr(self.function, '__name__', self.function)!r} cannot return these metrics",
                    why=f"{', '.join(wrong)}: a name has letters, digits and _ . / @ + -, and is none of hwrl's own",
                    fix=f"rename them; hwrl's own are {', '.join(sorted(_TAKEN))}",
                )
        elif names != self._names[0]:
            raise DataError(
                f"the loss {getattr(self.function, '__name__', self.function)!r} returned other metrics than before",
                why=f"only one of the calls returned {', '.join(sorted(map(repr, names ^ self._names[0])))}",
                fix="return the same metrics every time, with zeros where there is nothing to tell",
            )


def _is_free(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in _TAKEN


def _described(result: object) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of {tuple(result.shape)}"
    if isinstance(result, dict):
        return f"{{{', '.join(f'{name}: {_described(value)}' for name, value in result.items())}}}"
    if isinstance(result, tuple):
        return f"({', '.join(map(_described, result))})"
    return f"a {type(result).__name__}"
