"""Losses of OpenMoE (section 2.2 and table 12): cross-entropy, z-loss, load balance, router z-loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.openmoe.router import Routing


def load_balance_loss(routing: Routing, scope: Literal["global", "group"] = "global") -> Tensor:
    """E · Σ_i m_i P_i: m_i the share of tokens with expert i among their k choices, P_i the mean probability of i.

    m is counted before dropping and carries no gradient, and sums to k: perfect balance gives k, collapse on k experts
    gives E. (Libraries that count first choices only, or divide by k, give other numbers.) Padding is left out.
    `global` takes m and P over the whole batch of all processes; `group` averages the loss over groups, as the JAX
    training code does.
    """
    experts = routing.num_experts
    real = _real(routing)
    chosen = torch.zeros_like(routing.logits).scatter_add_(
        -1,
        routing.expert.clamp(max=experts - 1),
        real.unsqueeze(-1).to(routing.logits.dtype).expand(routing.expert.shape),
    )
    probability = routing.probabilities * real.unsqueeze(-1)
    if scope == "group":
        tokens = real.sum(1).clamp(min=1).unsqueeze(-1)
        per_group = experts * ((chosen.sum(1) / tokens) * (probability.sum(1) / tokens)).sum(-1)
        return per_group[real.any(1)].mean() if real.any() else per_group.sum()
    counts, mass, tokens = chosen.sum((0, 1)), probability.sum((0, 1)), real.sum().to(probability.dtype)
    if _distributed():
        from torch.distributed.nn.functional import all_reduce

        shared = torch.cat([counts, tokens.view(1)])
        dist.all_reduce(shared)
        counts, tokens = shared[:-1], shared[-1]
        mass = all_reduce(mass)
    tokens = tokens.clamp(min=1)
    return experts * ((counts / tokens) * (mass / tokens)).sum()


def router_z_loss(routing: Routing, tokens: Tensor | None = None) -> Tensor:
    """Mean over real tokens of logsumexp(router logits)²; `tokens` is the divisor instead of their number here."""
    real = _real(routing)
    squares = torch.where(real, routing.logits.logsumexp(-1).square(), 0.0)
    return squares.sum() / (real.sum() if tokens is None else tokens).clamp(min=1)


def cross_entropy_and_z(logits: Tensor, labels: Tensor, number: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy (nats) and mean logsumexp² over predicted tokens.

    Both share one pass over the logits and one buffer of their size for the gradient: at these widths the logits are
    the largest thing in a training step.

    Args:
        logits: `[..., V]`.
        labels: `[...]` int64; -100 is not predicted.
        number: divisor of both sums; None is the number of predicted tokens here.
    """
    if number is None:
        number = (labels != -100).sum()
    losses: tuple[Tensor, Tensor] = _CrossEntropyAndZ.apply(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), number.clamp(min=1)
    )
    return losses


class _CrossEntropyAndZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        log_z = logits.logsumexp(-1)
        predicted = labels != -100
        target = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, log_z, labels, predicted, number)
        ce = torch.where(predicted, log_z - target, 0.0).sum() / number
        z = torch.where(predicted, log_z.square(), 0.0).sum() / number
        return ce, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ce: Tensor, grad_z: Tensor) -> tuple[Tensor, None, None]:
        logits, log_z, labels, predicted, number = ctx.saved_tensors
        row = torch.where(predicted, (grad_ce + 2 * log_z * grad_z) / number, 0.0)
        grad = (logits - log_z.unsqueeze(-1)).exp_().mul_(row.unsqueeze(-1))
        own = torch.where(predicted, -grad_ce / number, 0.0).unsqueeze(-1).to(grad.dtype)
        grad.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), own)
        return grad, None, None


def token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each label, 0 where the label is -100; the shape of `labels`."""
    nll = logits.logsumexp(-1) - logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return nll.masked_fill(labels == -100, 0.0)


def mean_over_layers(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """Mean of per-layer losses; zero for a model without MoE layers."""
    return torch.stack(list(values)).mean() if values else like.new_zeros(())


@dataclass
class Totals:
    """Sums over the batches of all processes, float64.

    A process that divides its own sum by `per_process(total)` has a loss whose mean over processes, which is what
    data-parallel training takes, is the mean over all tokens, however they are spread.

    Attributes:
        predicted: tokens with a label.
        right: those predicted rightly.
        tokens: real tokens.
        chosen: `[E]` real (token, choice) pairs of each expert before dropping, over all layers.
        kept: pairs that were not dropped, over all experts and layers.
    """

    predicted: Tensor
    right: Tensor
    tokens: Tensor
    chosen: Tensor
    kept: Tensor

    @property
    def drop_rate(self) -> Tensor:
        """Share of real (token, choice) pairs that their expert turned away."""
        return 1.0 - self.kept / self.chosen.sum().clamp(min=1)

    def per_process(self, total: Tensor) -> Tensor:
        return total / (dist.get_world_size() if _distributed() else 1)


@torch.no_grad()
def totals(logits: Tensor, labels: Tensor, mask: Tensor, routings: Sequence[Routing]) -> Totals:
    """Count over all processes, in one exchange. `logits` `[..., V]`, `labels` and `mask` `[...]`."""
    predicted = labels != -100
    right = (logits.argmax(-1) == labels) & predicted
    chosen = [expert_counts(routing) for routing in routings] or [labels.new_zeros(0)]
    kept = sum((routing.kept.sum() for routing in routings), labels.new_zeros(()))
    counts = torch.cat([torch.stack([predicted.sum(), right.sum(), mask.sum(), kept]), torch.stack(chosen).sum(0)])
    counts = counts.double()
    if _distributed():
        dist.all_reduce(counts)
    return Totals(counts[0], counts[1], counts[2], counts[4:], counts[3])


def expert_counts(routing: Routing) -> Tensor:
    """How many real (token, choice) pairs chose each expert, before dropping: `[E]` int64."""
    return torch.bincount(routing.expert.reshape(-1), minlength=routing.num_experts + 1)[: routing.num_experts]


def _real(routing: Routing) -> Tensor:
    if routing.mask is not None:
        return routing.mask
    return torch.ones(routing.logits.shape[:-1], dtype=torch.bool, device=routing.logits.device)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
