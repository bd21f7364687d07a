"""Losses and their terms against the papers' formulas, written in float64 with NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.errors import DataError
from hwrl.interfaces import LossInputs
from hwrl.train import KlEstimator, LossName, Objective, PolicyLoss, Rejection, RejectionMode, UserLoss
from tests.support.loss_inputs import Doubles, Rows, loss_and_gradient, random_rows

LOW, HIGH, LIMIT = 0.2, 0.28, 1.5
Formula = Callable[[Rows, Doubles, Doubles], Doubles]
"""The loss of each token by the log-probabilities; a second copy of these is constant."""


def clipped(ratio: Doubles, advantages: Doubles) -> Doubles:
    return -np.minimum(ratio * advantages, ratio.clip(1 - LOW, 1 + HIGH) * advantages)


def ppo_clip(rows: Rows, logprobs: Doubles, _: Doubles) -> Doubles:
    return clipped(np.exp(logprobs - rows.columns["behaviour"]), rows.columns["advantages"])


def tis(rows: Rows, logprobs: Doubles, fixed: Doubles) -> Doubles:
    weight = np.minimum(np.exp(fixed - rows.columns["behaviour"]), LIMIT)
    return -weight * rows.columns["advantages"] * logprobs


def of_sequence(rows: Rows, ratios: Doubles) -> Doubles:
    return np.concatenate([np.full(len(row), row.prod()) for row in rows.of_rows(ratios)])


def sequence_tis(rows: Rows, logprobs: Doubles, fixed: Doubles) -> Doubles:
    weight = np.minimum(of_sequence(rows, np.exp(fixed - rows.columns["behaviour"])), LIMIT)
    return -weight * rows.columns["advantages"] * logprobs


def decoupled(rows: Rows, logprobs: Doubles, _: Doubles) -> Doubles:
    proximal = rows.columns["proximal"]
    weight = np.minimum(np.exp(proximal - rows.columns["behaviour"]), LIMIT)
    return weight * clipped(np.exp(logprobs - proximal), rows.columns["advantages"])


def sequence_decoupled(rows: Rows, logprobs: Doubles, _: Doubles) -> Doubles:
    proximal = rows.columns["proximal"]
    weight = np.minimum(of_sequence(rows, np.exp(proximal - rows.columns["behaviour"])), LIMIT)
    return weight * clipped(np.exp(logprobs - proximal), rows.columns["advantages"])


def cispo(rows: Rows, logprobs: Doubles, fixed: Doubles) -> Doubles:
    weight = np.exp(fixed - rows.columns["behaviour"]).clip(1 - LOW, 1 + HIGH)
    return -weight * rows.columns["advantages"] * logprobs


def distill(rows: Rows, logprobs: Doubles, fixed: Doubles) -> Doubles:
    weight = np.minimum(np.exp(fixed - rows.columns["behaviour"]), LIMIT)
    return -weight * (rows.columns["reference"] - fixed) * logprobs


def gspo(rows: Rows, logprobs: Doubles, _: Doubles) -> Doubles:
    """GSPO eq. 5 and 7: each token has its sequence's loss; the gradient of their sum is |y| times the sequence's."""
    logs = rows.of_rows(logprobs - rows.columns["behaviour"])
    ratio = np.concatenate([np.full(len(row), np.exp(row.mean())) for row in logs])
    return clipped(ratio, rows.columns["advantages"])


def difference_quotients(formula: Formula, rows: Rows) -> Doubles:
    """Return the gradient of the formula's sum, numerically."""
    at, gradient = rows.columns["logprobs"], np.zeros_like(rows.columns["logprobs"])
    for index in range(len(at)):
        step = np.zeros_like(at)
        step[index] = 1e-6
        gradient[index] = (formula(rows, at + step, at).sum() - formula(rows, at - step, at).sum()) / 2e-6
    return gradient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (PolicyLoss("ppo_clip"), ppo_clip),
        (PolicyLoss("tis", is_threshold=LIMIT), tis),
        (PolicyLoss("tis", is_threshold=LIMIT, is_level="sequence"), sequence_tis),
        (PolicyLoss("decoupled", is_threshold=LIMIT), decoupled),
        (PolicyLoss("decoupled", is_threshold=LIMIT, is_level="sequence"), sequence_decoupled),
        (PolicyLoss("cispo"), cispo),
        (PolicyLoss("gspo"), gspo),
        (PolicyLoss("distill", is_threshold=LIMIT), distill),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_the_formula(loss: PolicyLoss, formula: Formula, seed: int) -> None:
    rows = random_rows(seed=seed)
    per_token, gradient, metrics = loss_and_gradient(loss, rows)
    at = rows.columns["logprobs"]
    np.testing.assert_allclose(per_token, formula(rows, at, at), rtol=1e-9)
    np.testing.assert_allclose(gradient, difference_quotients(formula, rows), rtol=1e-5, atol=1e-8)
    assert {"is_weight", "clipped"} == set(metrics) - {"reverse_kl"}
    assert not any(metric.requires_grad for metric in metrics.values())


def test_gspo_by_hand() -> None:
    """Two tokens with ratios 1.5 and 0.9: the sequence's ratio is the root of 1.35, inside of the band."""
    rows = random_rows(seed=0, lengths=[2])
    rows.columns |= {"behaviour": np.zeros(2), "logprobs": np.log([1.5, 0.9]), "advantages": np.ones(2)}
    per_token, gradient, _ = loss_and_gradient(PolicyLoss("gspo"), rows)
    assert per_token == pytest.approx([-1.161895, -1.161895], abs=1e-6)
    assert gradient == pytest.approx([-1.161895, -1.161895], abs=1e-6), "also for the token whose own ratio is above it"


def test_a_row_of_extreme_ratios_stays_finite() -> None:
    rows = random_rows(seed=0, lengths=[4])
    rows.columns["behaviour"] = rows.columns["logprobs"] - 300.0
    names: list[LossName] = ["tis", "decoupled"]
    for name in names:
        per_token, gradient, _ = loss_and_gradient(PolicyLoss(name, is_level="sequence"), rows)
        assert np.isfinite(per_token).all() and np.isfinite(gradient).all()


class Nothing(PolicyLoss):
    """A loss of 0, with a gradient of 0."""

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return inputs.logprobs * 0, {}


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", lambda d: d, lambda d: np.ones_like(d)),
        ("k2", lambda d: d**2 / 2, lambda d: d),
        ("k3", lambda d: np.exp(-d) - 1 + d, lambda d: 1 - np.exp(-d)),
    ],
)
def test_the_divergence_has_schulmans_estimators(
    estimator: KlEstimator, value: Callable[[Doubles], Doubles], gradient: Callable[[Doubles], Doubles]
) -> None:
    rows = random_rows(seed=1)
    difference = rows.columns["logprobs"] - rows.columns["reference"]
    loss = Objective(Nothing(), kl_coeff=0.1, kl_estimator=estimator)
    per_token, found, metrics = loss_and_gradient(loss, rows)
    assert loss.needs_reference and loss.token_local
    np.testing.assert_allclose(per_token, 0.1 * value(difference))
    np.testing.assert_allclose(found, 0.1 * gradient(difference))
    np.testing.assert_allclose(metrics["kl"], value(difference))


def test_every_estimator_of_the_divergence_has_its_mean_or_its_gradient() -> None:
    """k1 and k3 are the divergence on average; the gradient of k2 is its gradient on average, that of k1 is 0."""
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(0)).double()
    policy, reference = logits[0].requires_grad_(), logits[1]
    chances, other = policy.log_softmax(-1), reference.log_softmax(-1)
    divergence = (chances.exp() * (chances - other)).sum()
    (wanted,) = torch.autograd.grad(divergence, policy, retain_graph=True)
    estimators: list[KlEstimator] = ["k1", "k2", "k3"]
    terms = [Objective(Nothing(), kl_coeff=1.0, kl_estimator=one) for one in estimators]
    rows = random_rows(seed=0, lengths=[30])
    rows.columns["reference"] = other.numpy()
    values = [term(rows.inputs(chances))[0] for term in terms]
    means = [(chances.exp() * value).sum().item() for value in values]
    assert means[0] == pytest.approx(divergence.item()) == means[2] != means[1]
    weights = chances.exp().detach()  # samples of the policy; their number has no gradient
    gradients = [torch.autograd.grad((weights * one).sum(), policy, retain_graph=True)[0] for one in values]
    assert gradients[0].abs().max() < 1e-12
    torch.testing.assert_close(gradients[1], wanted)


def test_the_entropy_is_rewarded_and_needs_its_gradient_only_then() -> None:
    rows = random_rows(seed=2)
    loss = Objective(PolicyLoss(), entropy_coeff=0.01)
    assert loss.needs_entropy_gradient and not Objective(PolicyLoss()).needs_entropy_gradient
    plain, rewarded = PolicyLoss()(rows.inputs())[0], loss(rows.inputs())[0]
    np.testing.assert_allclose(plain - rewarded, 0.01 * rows.columns["entropy"])


@pytest.mark.parametrize("mode", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
@pytest.mark.parametrize("name", ["tis", "decoupled"])
def test_tokens_and_rows_out_of_the_band_are_rejected(mode: RejectionMode, name: LossName) -> None:
    rows = random_rows(seed=3, spread=0.8)
    newer = rows.columns["proximal"]
    ratios = np.exp(newer - rows.columns["behaviour"])
    of_rows: dict[str, Callable[[Doubles], float]] = {
        "seq_sum_k1": lambda row: float(row.prod()),
        "seq_mean_k1": lambda row: float(row.prod() ** (1 / len(row))),
    }
    if mode != "token_k1":
        ratios = np.concatenate([np.full(len(row), of_rows[mode](row)) for row in rows.of_rows(ratios)])
    kept = (ratios >= 0.7) & (ratios <= 1.4)
    assert 0 < kept.sum() < len(kept)
    plain = PolicyLoss(name)
    loss = Objective(plain, Rejection(mode, 0.7, 1.4))
    assert loss.token_local == (mode == "token_k1")
    per_token, gradient, metrics = loss_and_gradient(loss, rows)
    wanted, wanted_gradient, _ = loss_and_gradient(plain, rows)
    np.testing.assert_allclose(per_token, wanted * kept)
    np.testing.assert_allclose(gradient, wanted_gradient * kept)
    assert metrics["rejected"].tolist() == (~kept).tolist()


def test_without_proximal_log_probabilities_the_present_policy_is_compared() -> None:
    rows = random_rows(seed=3)
    inputs = rows.inputs()
    present = LossInputs(**{**vars(inputs), "proximal": None})
    kept = Rejection("token_k1", 0.7, 1.4).keeps(present)
    ratios = np.exp(rows.columns["logprobs"] - rows.columns["behaviour"])
    assert kept.tolist() == ((ratios >= 0.7) & (ratios <= 1.4)).tolist()


def test_a_users_function_says_what_it_needs_and_is_checked() -> None:
    def good(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -inputs.advantages * inputs.logprobs, {"ratio": inputs.logprobs.exp()}

    rows = random_rows(seed=0)
    loss = UserLoss.of(good)
    assert not (loss.token_local or loss.needs_proximal or loss.needs_reference or loss.needs_entropy_gradient)
    _, gradient, metrics = loss_and_gradient(loss, rows)
    np.testing.assert_allclose(gradient, -rows.columns["advantages"])
    assert not metrics["ratio"].requires_grad
    good.needs_proximal = good.token_local = True  # type: ignore[attr-defined] # as docs/algorithms.md shows
    assert UserLoss.of(good).needs_proximal and UserLoss.of(good).token_local


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda inputs: inputs.logprobs, r"returned a tensor of \(11,\)\n  fix: return \(loss, metrics\)"),
        (lambda inputs: (inputs.logprobs.mean(), {}), r"returned \(a tensor of \(\), \{\}\)"),
        (lambda inputs: (inputs.logprobs, {"x": 1.0}), r"\{x: a float\}"),
        (lambda inputs: None, "returned a NoneType"),
    ],
)
def test_a_users_loss_that_is_none_is_refused(result: Callable[[LossInputs], object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        UserLoss.of(result)(random_rows(seed=0).inputs())


@pytest.mark.parametrize("name", ["loss", "mismatch_kl", "two words", 3])
def test_a_metric_of_a_users_loss_has_a_name_of_its_own(name: Any) -> None:
    with pytest.raises(DataError, match=re.escape(repr(name))):
        UserLoss.of(lambda inputs: (inputs.logprobs, {name: inputs.logprobs}))(random_rows(seed=0).inputs())


def test_a_users_loss_returns_the_same_metrics_every_time() -> None:
    calls: list[str] = []

    def fickle(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        calls.append(f"call{len(calls)}")
        return inputs.logprobs, {calls[-1]: inputs.logprobs}

    loss, inputs = UserLoss.of(fickle), random_rows(seed=0).inputs()
    loss(inputs)
    with pytest.raises(DataError, match="only one of the calls returned 'call0', 'call1'"):
        loss(inputs)
