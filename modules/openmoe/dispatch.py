"""Moving tokens to their experts and back: sort, gather, weighted sum. Nothing of size tokens x experts x capacity.

The three steps `plan`, `gather` and `combine` are apart so that something can stand between them and the experts, such
as the all-to-all of expert parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from modules.openmoe.router import Routing


@dataclass
class Plan:
    """Where every surviving (token, choice) pair goes. N pairs survive, of S tokens with k choices.

    Attributes:
        token: `[N]` int64, the token of each row, rows sorted by expert.
        pair: `[N]` int64, `token * k + choice` of each row.
        row: `[S, k]` int64, the row of each pair; `N` where the pair was dropped.
        counts: rows per expert, summing to N.
        dropped: whether any pair was.
    """

    token: Tensor
    pair: Tensor
    row: Tensor
    counts: list[int]
    dropped: bool


def plan(routing: Routing) -> Plan:
    """Sort the surviving pairs of `routing` by expert."""
    experts, k = routing.num_experts, routing.expert.shape[-1]
    target = torch.where(routing.kept, routing.expert, experts).reshape(-1)
    pair = target.sort(stable=True).indices
    counts = torch.bincount(target, minlength=experts + 1).tolist()  # one transfer: the host sizes the products
    kept = sum(counts[:experts])
    dropped = kept < target.numel()
    row = torch.full_like(target, kept)
    pair = pair[:kept]
    row[pair] = torch.arange(kept, device=target.device)
    return Plan(pair // k, pair, row.view(-1, k), counts[:experts], dropped)


def gather(x: Tensor, plan: Plan) -> Tensor:
    """Rows of `x` `[S, D]` in expert order: `[N, D]`."""
    gathered: Tensor = _Gather.apply(x, plan)
    return gathered


def combine(y: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """Weighted sum of each token's surviving expert outputs: `y` `[N, D]`, `weight` `[S, k]` -> `[S, D]`."""
    combined: Tensor = _Combine.apply(y, weight.to(y.dtype), plan)
    return combined


def _sum_rows(rows: Tensor, plan: Plan, weight: Tensor | None = None) -> Tensor:
    """Per token, the (weighted) sum of its rows; dropped pairs add nothing.

    `embedding_bag` does it in one pass, where `index_add` scatters row by row and gather-then-sum writes k copies.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(plan.row.shape[0], rows.shape[1])
    if not plan.dropped:
        return F.embedding_bag(plan.row, rows, mode="sum", per_sample_weights=weight)
    # The last row stands for "dropped" and is left out of every sum.
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return F.embedding_bag(plan.row, padded, mode="sum", per_sample_weights=weight, padding_idx=padded.shape[0] - 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x.index_select(0, plan.token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_rows(grad, ctx.plan), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, plan: Plan) -> Tensor:
        ctx.save_for_backward(y, weight)
        ctx.plan = plan
        return _sum_rows(y, plan, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weight = ctx.saved_tensors
        plan = ctx.plan
        rows = grad.index_select(0, plan.token)
        grad_weight = weight.new_zeros(weight.numel())
        grad_weight[plan.pair] = torch.linalg.vecdot(rows, y)
        rows.mul_(weight.reshape(-1)[plan.pair].unsqueeze(-1))
        return rows, grad_weight.view_as(weight), None
