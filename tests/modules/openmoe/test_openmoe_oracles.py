"""The heart of OpenMoE against reference numbers (see oracles/README.md), gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modules.openmoe.attention import rotate
from modules.openmoe.config import ModelConfig
from modules.openmoe.losses import (
    cross_entropy_and_z,
    expert_counts,
    load_balance_loss,
    mean_over_layers,
    router_z_loss,
    totals,
)
from modules.openmoe.moe import MoELayer
from modules.openmoe.router import Router, arrival_numbers, choose, expert_capacity
from modules.openmoe.transformer import Decoder, FeedForward


def assert_near(ours: Tensor, theirs: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, torch.as_tensor(theirs, dtype=ours.dtype), rtol=tolerance, atol=tolerance)


def layer(data: dict[str, Any], **changes: Any) -> MoELayer:
    experts, width, hidden = data["w_gate"].shape
    settings = {
        "d_model": width,
        "head_dim": 2,
        "d_ff": hidden,
        "num_experts": experts,
        "top_k": data.get("top_k", 2),
        "capacity_factor": data.get("capacity_factor", 1.25),
        "min_capacity": data.get("min_capacity", 4),
    }
    moe = MoELayer(ModelConfig(**(settings | changes))).to(data["x"].dtype)
    inputs = ("w_value", "w_gate", "w_linear") if "w_value" in data else ("w_gate", "w_up")
    with torch.no_grad():
        moe.router.weight.copy_(data["router"].t())
        moe.experts.w_in.copy_(torch.cat([data[name] for name in inputs], -1).mT)
        moe.experts.w_out.copy_(data["w_down"])
    return moe


@pytest.mark.parametrize("name", ["moe_no_drop", "moe_drop", "moe_top1"])
def test_layer_losses_and_gradients(oracle: Any, name: str) -> None:
    data = oracle(name)
    moe = layer(data)
    x = data["x"].clone().requires_grad_()
    y, routing = moe(x)
    balance, router_z = load_balance_loss(routing), router_z_loss(routing)
    loss = (y - data["target"]).square().mean() + 0.01 * balance + 1e-4 * router_z
    loss.backward()
    assert torch.equal(routing.expert, data["expert"])
    assert torch.equal(routing.position, data["position"])
    assert torch.equal(routing.kept, data["kept"])
    assert_near(routing.logits, data["logits"])
    assert_near(routing.weight, data["weight"])
    assert_near(y, data["y"])
    assert_near(balance, data["load_balance"])
    assert_near(router_z, data["router_z"])
    assert_near(loss, data["loss"])
    assert_near(expert_counts(routing) / (routing.expert.shape[0] * routing.expert.shape[1]), data["fraction"])
    hidden = data["w_gate"].shape[-1]
    assert x.grad is not None and moe.experts.w_in.grad is not None
    assert_near(x.grad, data["d_x"])
    assert_near(moe.router.weight.grad.t(), data["d_router"])
    assert_near(moe.experts.w_in.grad[:, :hidden].mT, data["d_w_gate"])
    assert_near(moe.experts.w_in.grad[:, hidden:].mT, data["d_w_up"])
    assert_near(moe.experts.w_out.grad, data["d_w_down"])


@pytest.mark.parametrize("name", ["official_router", "official_router_batch_priority"])
def test_router_of_the_jax_training_code(oracle: Any, name: str) -> None:
    data = oracle(name)
    experts = data["logits"].shape[-1]
    config = ModelConfig(
        num_experts=experts, d_model=experts, head_dim=2, top_k=2, batch_priority=data["batch_priority"]
    )
    router = Router(config).double().eval()
    with torch.no_grad():
        router.weight.copy_(torch.eye(experts))
    router._capacity = lambda *_: data["capacity"]  # type: ignore[method-assign]
    routing = router(data["logits"])
    assert torch.equal(routing.expert, data["expert"])
    assert torch.equal(routing.kept, data["kept"])
    slot = torch.where(routing.kept, routing.position, -1)
    assert torch.equal(slot, data["slot"])
    assert_near(torch.where(routing.kept, routing.weight, 0.0), data["weight"], 1e-6)
    assert_near(load_balance_loss(routing, "group"), data["load_balance_per_group"], 1e-5)
    assert_near(load_balance_loss(routing, "global"), data["load_balance_global"], 1e-5)
    assert_near(router_z_loss(routing), data["router_z"], 1e-5)


@pytest.mark.parametrize("name", ["released_moe_train", "released_moe_eval"])
def test_layer_of_the_released_checkpoints(oracle: Any, name: str) -> None:
    data = oracle(name)
    moe = layer(data, ffn="released", capacity_rule="port", group="batch").train(data["training"])
    y, routing = moe(data["x"])
    assert torch.equal(routing.expert[0], data["expert"])
    assert torch.equal(routing.kept[0], data["kept"])
    assert_near(torch.where(routing.kept, routing.weight, 0.0)[0], data["weight"], 1e-5)
    assert_near(y, data["y"], 1e-5)
    used = torch.bincount(routing.expert[routing.kept], minlength=6)
    assert torch.equal(used, data["used"])


def test_capacities(oracle: Any) -> None:
    for case in oracle("capacity.json"):
        for rule in ("per_choice", "per_token", "port"):
            ours = expert_capacity(
                case["tokens"],
                case["experts"],
                case["top_k"],
                case["capacity_factor"],
                rule=rule,
                min_capacity=case["min_capacity"],
            )
            assert ours == case[rule], (case, rule)


def load_decoder(data: dict[str, Any], residual: str) -> Decoder:
    config = ModelConfig(
        vocab_size=data["cfg_vocab"],
        d_model=data["cfg_d_model"],
        d_ff=data["cfg_d_ff"],
        num_heads=data["cfg_heads"],
        head_dim=data["cfg_head_dim"],
        num_layers=data["cfg_layers"],
        moe_every=data["cfg_every"],
        num_experts=data["cfg_experts"],
        top_k=data["cfg_top_k"],
        capacity_factor=data["cfg_capacity_factor"],
        min_capacity=data["cfg_min_capacity"],
        residual=residual,
    )
    decoder = Decoder(config).double()
    state = {"embedding.weight": data["w:embed"], "norm.weight": data["w:norm_final"]}
    for i in range(config.num_layers):
        theirs, ours = f"w:layers.{i}", f"blocks.{i}"
        for a, b in {"wq": "q", "wk": "k", "wv": "v", "wo": "out"}.items():
            state[f"{ours}.attention.{b}.weight"] = data[f"{theirs}.{a}"].t()
        state[f"{ours}.norm_attention.weight"] = data[f"{theirs}.norm_att"]
        state[f"{ours}.norm_ffn.weight"] = data[f"{theirs}.norm_ffn"]
        state[f"{ours}.ffn.w_in.weight"] = torch.cat([data[f"{theirs}.ffn.w_gate"], data[f"{theirs}.ffn.w_up"]], 1).t()
        state[f"{ours}.ffn.w_out.weight"] = data[f"{theirs}.ffn.w_down"].t()
        if config.is_moe_layer(i):
            experts = [data[f"{theirs}.experts.{name}"] for name in ("w_gate", "w_up", "w_down")]
            state[f"{ours}.moe.experts.w_in"] = torch.cat(experts[:2], -1).mT
            state[f"{ours}.moe.experts.w_out"] = experts[2]
            state[f"{ours}.moe.router.weight"] = data[f"{theirs}.router"].t()
            if residual == "sequential":
                state[f"{ours}.norm_residual.weight"] = data[f"{theirs}.norm_residual"]
    decoder.load_state_dict(state)
    return decoder


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("residual", ["parallel", "sequential"])
def test_whole_model(oracle: Any, residual: str, checkpointing: bool) -> None:
    data = oracle("decoder")
    decoder = load_decoder(data, residual)
    decoder.activation_checkpointing = checkpointing
    out = decoder(data["input_ids"])
    ce, z = cross_entropy_and_z(out.logits, data["labels"])
    balance = mean_over_layers([load_balance_loss(r) for r in out.routings], ce)
    router_z = mean_over_layers([router_z_loss(r) for r in out.routings], ce)
    loss = ce + 0.01 * balance + 1e-4 * router_z + 1e-3 * z
    loss.backward()
    assert_near(out.logits, data[f"{residual}_logits"])
    for ours, name in ((ce, "ce"), (z, "z"), (balance, "load_balance"), (router_z, "router_z"), (loss, "loss")):
        assert_near(ours, data[f"{residual}_{name}"])
    everything = torch.ones_like(data["input_ids"], dtype=torch.bool)
    counted = totals(out.logits, data["labels"], everything, out.routings)
    assert_near(counted.drop_rate, data[f"{residual}_drop"], 1e-6)
    assert_near(decoder.embedding.weight.grad, data[f"{residual}_d_embed"])
    assert_near(decoder.blocks[1].moe.router.weight.grad.t(), data[f"{residual}_d_router_first"])


def test_doubly_gated_feed_forward(oracle: Any) -> None:
    data = oracle("ffn_released")
    ffn = FeedForward(6, 7, "released").double()
    with torch.no_grad():
        ffn.w_in.weight.copy_(torch.cat([data["w_value"], data["w_gate"], data["w_linear"]], 1).t())
        ffn.w_out.weight.copy_(data["w_down"].t())
    x = data["x"].clone().requires_grad_()
    y = ffn(x)
    loss = (y - data["target"]).square().mean()
    loss.backward()
    assert_near(y, data["y"])
    assert_near(loss, data["loss"])
    assert_near(x.grad, data["d_x"])
    assert_near(ffn.w_in.weight.grad.t(), torch.cat([data["d_w_value"], data["d_w_gate"], data["d_w_linear"]], 1))
    assert_near(ffn.w_out.weight.grad.t(), data["d_w_down"])


def test_rotary_positions(oracle: Any) -> None:
    data = oracle("rope")
    positions = torch.arange(data["q"].shape[1])
    assert_near(rotate(data["q"], positions), data["out0"])
    assert_near(rotate(data["q"], positions + 3), data["out3"])


def test_cross_entropy_and_z(oracle: Any) -> None:
    data = oracle("ce_zloss")
    logits = data["logits"].clone().requires_grad_()
    ce, z = cross_entropy_and_z(logits, data["labels"])
    loss = ce + data["z_weight"] * z
    loss.backward()
    assert_near(ce, data["ce"])
    assert_near(z, data["z"])
    assert_near(loss, data["loss"])
    assert_near(logits.grad, data["d_logits"])


def test_ties_go_to_the_lower_expert_and_arrivals_count_on() -> None:
    logits = torch.zeros(1, 5, 4)
    _, weight, expert = choose(logits, 2)
    assert expert.tolist() == [[[0, 1]] * 5]
    assert torch.equal(weight, torch.full((1, 5, 2), 0.25))
    assert arrival_numbers(expert, 4)[0, :, 0].tolist() == [0, 1, 2, 3, 4]
