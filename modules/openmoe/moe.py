"""The Mixture-of-Experts layer: route, gather, compute, combine (Xue et al., section 2.1, equations 1 to 3)."""

from __future__ import annotations

from torch import Tensor, nn

from modules.openmoe import dispatch
from modules.openmoe.config import ModelConfig
from modules.openmoe.experts import Experts
from modules.openmoe.router import Router, Routing


class MoELayer(nn.Module):
    """Experts behind a router, without the residual feed-forward (the block adds that)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.d_model, config.d_ff, config.ffn)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, dropless: bool = False) -> tuple[Tensor, Routing]:
        """`x` `[B, S, D]` and `mask` `[B, S]` (True for real tokens) -> output `[B, S, D]` and the routing.

        Raises:
            ValueError: `group` is a number of tokens that does not divide B·S.
        """
        grouped, grouped_mask = self._groups(x), None if mask is None else self._groups(mask)
        routing = self.router(grouped, grouped_mask, dropless=dropless)
        plan = dispatch.plan(routing)
        tokens = x.reshape(-1, x.shape[-1])
        rows = self.experts(dispatch.gather(tokens, plan), plan.counts)
        weight = routing.weight.reshape(-1, routing.weight.shape[-1])
        return dispatch.combine(rows, weight, plan).view_as(x), routing

    def _groups(self, x: Tensor) -> Tensor:
        """`[B, S, ...]` -> `[G, T, ...]`: the tokens that compete for the same capacity."""
        group = self.config.group
        if group == "sequence":
            return x
        tokens = x.shape[0] * x.shape[1]
        size = tokens if group == "batch" else int(group)
        if tokens % size:
            raise ValueError(
                f"group={size} does not divide the {tokens} tokens of a batch of shape {tuple(x.shape[:2])}"
            )
        return x.reshape(tokens // size, size, *x.shape[2:])
