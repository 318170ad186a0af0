"""What must hold for any weights and inputs: invariances, limits, generation, counting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modules.openmoe.config import ModelConfig
from modules.openmoe.counting import count_on_meta, count_parameters, model_card
from modules.openmoe.generation import generate
from modules.openmoe.losses import cross_entropy_and_z, load_balance_loss, router_z_loss, totals
from modules.openmoe.moe import MoELayer
from modules.openmoe.transformer import Decoder

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 16,
    "d_ff": 24,
    "num_heads": 2,
    "num_experts": 4,
    "min_capacity": 1,
}
seeds = settings(max_examples=12, deadline=None)


def moe(seed: int = 0, **changes: Any) -> MoELayer:
    torch.manual_seed(seed)
    layer = MoELayer(ModelConfig(**(SMALL | changes))).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(ModelConfig(**(SMALL | changes))).double()


@seeds
@given(st.integers(0, 10**6))
def test_equal_experts_with_weights_that_sum_to_one_are_one_feed_forward(seed: int) -> None:
    layer = moe(seed, capacity_factor=None, renormalize=True)
    with torch.no_grad():
        layer.experts.w_in.copy_(layer.experts.w_in[:1].expand_as(layer.experts.w_in))
        layer.experts.w_out.copy_(layer.experts.w_out[:1].expand_as(layer.experts.w_out))
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    gate, up = (x @ layer.experts.w_in[0].t()).chunk(2, -1)
    torch.testing.assert_close(layer(x)[0], (F.silu(gate) * up) @ layer.experts.w_out[0])


@seeds
@given(st.integers(0, 10**6), st.sampled_from([None, 0.5, 1.25]))
def test_renaming_experts_changes_nothing(seed: int, factor: float | None) -> None:
    layer, renamed = moe(seed, capacity_factor=factor), moe(seed, capacity_factor=factor)
    order = torch.randperm(4)
    with torch.no_grad():
        renamed.router.weight.copy_(layer.router.weight[order])
        renamed.experts.w_in.copy_(layer.experts.w_in[order])
        renamed.experts.w_out.copy_(layer.experts.w_out[order])
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], renamed(x)[0])


@seeds
@given(st.integers(0, 10**6))
def test_a_sequence_gives_the_same_alone_and_in_a_batch(seed: int) -> None:
    model = decoder(seed, capacity_factor=0.75)
    ids = torch.randint(0, 50, (3, 11))
    together = model(ids).logits
    for row in range(3):
        torch.testing.assert_close(model(ids[row : row + 1]).logits[0], together[row])


@seeds
@given(st.integers(0, 10**6), st.sampled_from(["sequence", "batch"]))
def test_padding_changes_nothing_that_is_real(seed: int, group: str) -> None:
    model = decoder(seed, capacity_factor=0.75, group=group)
    ids = torch.randint(0, 50, (2, 8))
    padded = F.pad(ids, (0, 5))
    mask = F.pad(torch.ones_like(ids, dtype=torch.bool), (0, 5))
    plain, out = model(ids), model(padded, mask=mask)
    torch.testing.assert_close(out.logits[:, :8], plain.logits)
    for ours, theirs in zip(out.routings, plain.routings, strict=True):
        torch.testing.assert_close(load_balance_loss(ours), load_balance_loss(theirs))
        torch.testing.assert_close(router_z_loss(ours), router_z_loss(theirs))
    ours = totals(out.logits, padded, mask, out.routings)
    theirs = totals(plain.logits, ids, torch.ones_like(ids, dtype=torch.bool), plain.routings)
    assert ours.drop_rate == theirs.drop_rate and torch.equal(ours.chosen, theirs.chosen)


def test_features_that_are_zero_are_not_padding() -> None:
    layer = moe(capacity_factor=None)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    x[..., 0] = 0.0
    assert layer(x)[1].kept.all() and (layer(x)[0].abs().sum(-1) > 0).all()


def test_one_token_one_full_expert_and_empty_experts() -> None:
    layer = moe(capacity_factor=1.0, min_capacity=1, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 5.0
    x = torch.rand(1, 8, 16, dtype=torch.float64, requires_grad=True)
    y, routing = layer(x)
    assert (routing.expert == 2).all() and routing.kept.sum() == 2  # floor(1 * 1.0 * 8 / 4)
    assert (y[0, 2:] == 0).all() and (y[0, :2] != 0).any()
    y.sum().backward()
    assert layer.experts.w_in.grad is not None and (layer.experts.w_in.grad[0] == 0).all()
    torch.testing.assert_close(load_balance_loss(routing), 4 * routing.probabilities[..., 2].mean())
    assert layer(x[:, :1])[0].shape == (1, 1, 16)


def test_collapse_and_balance_have_their_known_losses() -> None:
    layer = moe(capacity_factor=None)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:2] = 100.0
    balance = load_balance_loss(layer(torch.rand(1, 6, 16, dtype=torch.float64))[1])
    assert balance.item() == pytest.approx(4.0)


def test_groups_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="group=5 does not divide the 14 tokens"):
        moe(group=5)(torch.randn(2, 7, 16, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_model_is_uniform_and_overfits_one_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**{**SMALL, "vocab_size": 200, "d_model": 32, "capacity_factor": None})).to(dtype)
    ids = torch.randint(0, 200, (2, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        return cross_entropy_and_z(model(ids[:, :-1]).logits, ids[:, 1:])[0]

    assert float(loss()) == pytest.approx(math.log(200), abs=0.5)
    for _ in range(80):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    assert float(loss()) < 0.3


def test_router_logits_stay_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**SMALL))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randint(0, 50, (2, 9)))
    assert out.routings[0].logits.dtype == out.logits.dtype == torch.float32


def test_every_expert_is_drawn_on_its_own() -> None:
    experts = Decoder(ModelConfig(**SMALL)).blocks[1].moe.experts
    for weight in (experts.w_in, experts.w_out):
        assert len({round(float(w.sum()), 6) for w in weight}) == 4


@pytest.mark.parametrize("changes", [{}, {"residual": "sequential", "ffn": "released"}, {"parallel_block": True}])
def test_cached_generation_equals_the_whole_forward_pass(changes: dict[str, Any]) -> None:
    model = decoder(**changes).eval()
    prompts = [[3, 7, 9, 11], [5], [8, 2, 4]]
    generated = generate(model, prompts, 6, temperature=0.0)
    for prompt, new in zip(prompts, generated, strict=True):
        ids = list(prompt)
        for token in new:
            logits = model(torch.tensor([ids]), dropless=True).logits[0, -1]
            assert int(logits.argmax()) == token
            ids.append(token)


def test_generation_stops_at_the_end_token_and_draws_within_top_k() -> None:
    model = decoder()
    (whole,) = generate(model, [[3, 4]], 8, temperature=0.0)
    (stopped,) = generate(model, [[3, 4]], 8, temperature=0.0, eos_id=whole[2])
    assert stopped == whole[: whole.index(whole[2]) + 1]
    (first,) = generate(model, [[3, 4]], 8, top_k=1)
    assert first == whole
    assert generate(model, [[3, 4]], 8, top_p=1e-9) == [whole]
    draws = [generate(model, [[3]], 5, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert draws[0] == draws[1]
    with pytest.raises(ValueError, match="none may be empty"):
        generate(model, [[]], 3)


@pytest.mark.parametrize("size", ["base", "8b", "34b"])
def test_parameter_counts_of_the_paper(oracle: Any, size: str) -> None:
    data = oracle("parameter_counts.json")
    c = data[size]["config"]
    config = ModelConfig(
        vocab_size=c["V"],
        d_model=c["d"],
        d_ff=c["ff"],
        num_heads=c["heads"],
        head_dim=c["hd"],
        num_layers=c["L"],
        moe_every=c["every"],
        num_experts=c["E"],
        top_k=c["k"],
    )
    count = count_parameters(config)
    for ours, name in (("attention", "attention"), ("ffn", "ffn_dense_and_residual"), ("experts", "experts")):
        assert getattr(count, ours) == data[size][name]
    assert (count.embedding, count.router) == (data[size]["embedding"], data[size]["router"])
    assert (count.total, count.active) == (data[size]["total"], data[size]["active"])
    assert count_on_meta(config) == count.everything
    assert data["paper"][size]["total"] in model_card(config)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "dense"},
        {"layout": "dense_matched"},
        {"residual": "none"},
        {"residual": "sequential"},
        {"ffn": "released", "tie_embeddings": False},
    ],
)
def test_counts_are_those_of_the_real_module(changes: dict[str, Any]) -> None:
    config = ModelConfig(**(SMALL | changes))
    assert count_on_meta(config) == count_parameters(config).everything


def test_dense_matched_has_the_active_parameters_of_the_experts() -> None:
    experts, dense = count_parameters(ModelConfig()), count_parameters(ModelConfig(layout="dense_matched"))
    assert dense.active == experts.active
