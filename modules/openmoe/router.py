"""Which experts a token goes to, and who is turned away when an expert is full (Xue et al., section 2.2).

Shapes: G groups of T tokens that compete for the same capacity, E experts, k choices a token, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modules.openmoe.config import ModelConfig


@dataclass
class Routing:
    """What the router decided for `[G, T]` tokens.

    Attributes:
        logits: `[G, T, E]`, float32 or wider.
        probabilities: `[G, T, E]`, softmax of the logits.
        expert: `[G, T, k]` int64, chosen experts by falling probability; `E` where the token is padding.
        weight: `[G, T, k]`, combine weights (0 for padding); differentiable.
        position: `[G, T, k]` int64, arrival number at the expert. Counting goes on past the capacity.
        kept: `[G, T, k]` bool, False where the expert was full or the token is padding.
        mask: `[G, T]` bool, True for real tokens; None when all are.
    """

    logits: Tensor
    probabilities: Tensor
    expert: Tensor
    weight: Tensor
    position: Tensor
    kept: Tensor
    mask: Tensor | None

    @property
    def num_experts(self) -> int:
        return self.logits.shape[-1]

    def by_sequence(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """`expert` and `kept` as `[batch, length, k]`, whatever the groups were."""
        k = self.expert.shape[-1]
        return self.expert.reshape(batch, length, k), self.kept.reshape(batch, length, k)


def expert_capacity(
    tokens: int, num_experts: int, top_k: int, factor: float, *, rule: str = "per_choice", min_capacity: int = 4
) -> int:
    """Tokens that one expert takes from a group of `tokens`.

    Rules: `per_choice` floor(k·cf·T/E); `per_token` (the JAX training code) cf·T/E rounded half to even, with no factor
    k; `port` (the released PyTorch code) `per_choice` made even by rounding up. Never under `min_capacity`.
    """
    if rule == "per_token":
        return max(min_capacity, round(factor * tokens / num_experts))
    capacity = max(min_capacity, math.floor(top_k * factor * tokens / num_experts))
    return capacity + capacity % 2 if rule == "port" else capacity


def choose(
    logits: Tensor, top_k: int, *, mask: Tensor | None = None, renormalize: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities `[..., E]`, weights `[..., k]` and experts `[..., k]` of each token's `top_k` choices.

    Equal probabilities go to the lower expert index. Padding (mask False) gets expert `E` and weight 0.
    """
    probabilities = logits.softmax(-1)
    expert = _largest(probabilities.detach(), top_k)
    weight = probabilities.gather(-1, expert)
    if renormalize:
        weight = weight / weight.sum(-1, keepdim=True)
    if mask is not None:
        expert = expert.masked_fill(~mask.unsqueeze(-1), logits.shape[-1])
        weight = weight.masked_fill(~mask.unsqueeze(-1), 0.0)
    return probabilities, weight, expert


def _largest(values: Tensor, number: int) -> Tensor:
    """Indices of the largest non-negative `values` `[..., E]`, falling, ties to the lower index (which `topk` leaves
    open)."""
    if values.dtype != torch.float32:
        return values.sort(dim=-1, descending=True, stable=True).indices[..., :number]
    # Bits of non-negative floats are ordered like the floats; the index behind them settles ties. Several times faster
    # than a stable sort.
    width = values.shape[-1]
    rank = torch.arange(width - 1, -1, -1, device=values.device)
    keys = values.view(torch.int32).to(torch.int64) * width + rank
    return width - 1 - keys.topk(number, dim=-1).values % width


def arrival_numbers(expert: Tensor, num_experts: int, priority: Tensor | None = None) -> Tensor:
    """How many (token, choice) pairs of the group reached the same expert before: `[G, T, k]` int64.

    All first choices come in position order, then all second choices, and so on. With `priority` `[G, T]` the tokens
    are taken by falling priority instead of by position. Padding carries the expert number `num_experts`.
    """
    groups, tokens, k = expert.shape
    if priority is not None:
        order = priority.sort(dim=-1, descending=True, stable=True).indices.unsqueeze(-1).expand_as(expert)
        sorted_arrivals = arrival_numbers(expert.gather(1, order), num_experts)
        return torch.empty_like(sorted_arrivals).scatter_(1, order, sorted_arrivals)
    group = torch.arange(groups, device=expert.device).view(-1, 1, 1)
    key = (group * (num_experts + 1) + expert).transpose(1, 2).reshape(-1)  # choice-major within each group
    ordered, slot = key.sort(stable=True)
    place = torch.arange(key.numel(), device=key.device)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    first = torch.where(begins, place, 0).cummax(0).values
    arrivals = torch.empty_like(place)
    arrivals[slot] = place - first
    return arrivals.view(groups, k, tokens).transpose(1, 2)


class Router(nn.Module):
    """Linear router with top-k choice and capacity (equations 1 to 3 of the paper).

    Logits are computed in float32 at least, also under autocast: near-ties flip in bfloat16.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.d_model))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, dropless: bool = False, generator: torch.Generator | None = None
    ) -> Routing:
        """Route `x` `[G, T, D]`; `mask` `[G, T]` is True for real tokens. `dropless` lifts every capacity."""
        config = self.config
        logits = self._logits(x)
        probabilities, weight, expert = choose(logits, config.top_k, mask=mask, renormalize=config.renormalize)
        priority = weight[..., 0].detach() if config.batch_priority else None
        position = arrival_numbers(expert, config.num_experts, priority)
        kept = expert < config.num_experts
        factor = config.capacity_factor if self.training else config.eval_capacity_factor
        if factor is not None and not dropless:
            kept = kept & (position < self._capacity(x.shape[1], mask, factor, x.device))
        return Routing(logits, probabilities, expert, weight, position, kept, mask)

    def _logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(wide)
            if self.training and self.config.router_jitter:
                low, high = 1 - self.config.router_jitter, 1 + self.config.router_jitter
                x = x * torch.empty_like(x).uniform_(low, high)
            return x @ self.weight.to(wide).t()

    def _capacity(self, tokens: int, mask: Tensor | None, factor: float, device: torch.device) -> Tensor | int:
        """The group's capacity; `[G, 1, 1]` when padding makes it differ: only real tokens count."""
        config = self.config

        def rule(count: int) -> int:
            return expert_capacity(
                count,
                config.num_experts,
                config.top_k,
                factor,
                rule=config.capacity_rule,
                min_capacity=config.min_capacity,
            )

        if mask is None:
            return rule(tokens)
        table = torch.tensor([rule(count) for count in range(tokens + 1)], device=device)
        return table[mask.sum(-1)].view(-1, 1, 1)
