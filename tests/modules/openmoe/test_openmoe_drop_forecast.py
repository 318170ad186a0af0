"""The forecast against really dispatching with each capacity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.openmoe.config import ModelConfig
from modules.openmoe.drop_forecast import capacity_needed, drop_rate_at, factor_needed, forecast
from modules.openmoe.moe import MoELayer
from modules.openmoe.router import arrival_numbers


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.05, 0.2]))
def test_the_needed_factor_is_the_smallest_that_works(seed: int, target: float) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3, 24, 8)

    def routed(factor: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        config = ModelConfig(d_model=8, head_dim=2, d_ff=4, num_experts=4, eval_capacity_factor=factor, min_capacity=1)
        layer = MoELayer(config).eval()
        torch.manual_seed(1)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        routing = layer(x)[1]
        return routing.expert, routing.kept

    expert, _ = routed(None)
    position = arrival_numbers(expert, 4)
    needed = capacity_needed(position, target)

    def late_drops(capacity: int) -> float:
        kept = routed(capacity * 4 / (2 * 24))[1]
        assert torch.allclose(drop_rate_at(position, capacity), (~kept).double().mean((0, 2)))
        return float((~kept[:, -8:]).double().mean())

    assert late_drops(needed) <= target
    assert needed == 1 or late_drops(needed - 1) > target
    assert factor_needed(position, 4, target) == pytest.approx(needed * 4 / (2 * 24))
    config = ModelConfig(d_model=8, head_dim=2, d_ff=4, num_experts=4)
    assert forecast(MoELayer(config)(x, dropless=True)[1], 0.5) > 0


def test_bad_requests_are_told() -> None:
    with pytest.raises(ValueError, match="no last third"):
        capacity_needed(torch.zeros(1, 2, 1), 0.1)
    with pytest.raises(ValueError, match="target=1"):
        capacity_needed(torch.zeros(1, 3, 1), 1)
