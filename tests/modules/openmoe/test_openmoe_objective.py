"""UL2's denoisers, the switch, optimisers and learning rates."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.openmoe.config import ObjectiveConfig, OptimizerConfig
from modules.openmoe.objective import (
    IGNORED,
    MIXTURE,
    UL2,
    Objective,
    causal,
    corrupt,
    corrupted_lengths,
    decoder_row,
    noise_counts,
    random_noise_mask,
    random_partition,
)
from modules.openmoe.optim import build_optimizer, build_schedule, learning_rate


def test_reference_examples(oracle: Any) -> None:
    data = oracle("ul2.json")
    for case in data["cases"]:
        if "mask" in case:
            sentinels = list(range(case["vocab"] - 1, 0, -1))
            inputs, targets = corrupt(case["tokens"], case["mask"], sentinels, case["eos"])
        else:
            inputs, targets = case["tokens"][: case["split"]], case["tokens"][case["split"] :]
        inputs = [*case["task_prefix"], *inputs]
        assert inputs == case["inputs"]
        assert targets == case["targets"]
        if "decoder_tokens" not in case:
            continue
        ids, labels, prefix = decoder_row(inputs, targets)
        assert [*ids, targets[-1]] == case["decoder_tokens"]
        assert prefix == len(inputs)
        predicted = [0, *(int(label != IGNORED) for label in labels)]  # a label belongs to the token after it
        assert predicted == case["loss_mask"]


def test_reference_lengths(oracle: Any) -> None:
    data = oracle("ul2.json")
    for case in data["lengths"]:
        lengths = corrupted_lengths(case["inputs_length"], case["mu"], case["r"])
        assert lengths == (case["tokens_length"], case["targets_length"]), case
    for case in data["span_counts"]:
        assert noise_counts(case["length"], case["mu"], case["r"]) == (case["noise_tokens"], case["spans"]), case


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.sampled_from([3, 8, 64]), st.sampled_from([0.15, 0.5]), st.integers(0, 10**6))
def test_corruption_loses_nothing(length: int, mean: int, rate: float, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(3, 100, length).tolist()
    noise = random_noise_mask(length, mean, rate, np.random.default_rng(seed))
    assert len(noise) == length and not noise[0] and noise[-1]
    inputs, targets = corrupt(tokens, noise, list(range(999, 400, -1)), eos_id=1)
    spans: dict[int, list[int]] = {}
    for token in targets[:-1]:
        if token > 400:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    restored = [t for token in inputs[:-1] for t in (spans[token] if token > 400 else [token])]
    assert restored == tokens


def test_every_composition_is_equally_likely() -> None:
    rng = np.random.default_rng(0)
    drawn = [tuple(random_partition(5, 3, rng)) for _ in range(6000)]
    counts = np.array([drawn.count(c) for c in sorted(set(drawn))])
    assert len(counts) == 6  # C(4, 2)
    assert abs(counts - 1000).max() < 150


def mixture(inputs: int = 32, targets: int = 32) -> UL2:
    prompts = {"[NLU] ": [5], "[NLG] ": [6], "[S2S] ": [7, 8]}
    return UL2(inputs, targets, sentinels=list(range(499, 300, -1)), prompts=prompts, eos_id=2, pad_id=0)


def test_mixture_shares_prompts_and_shapes() -> None:
    ul2 = mixture()
    tokens = torch.randint(9, 300, (3000, 65))
    batch = ul2(tokens, torch.full((3000,), 65), np.random.default_rng(0))
    assert batch.input_ids.shape == batch.labels.shape == (3000, ul2.length)
    shares = torch.bincount(batch.denoiser, minlength=len(MIXTURE)) / 3000
    assert torch.allclose(shares, torch.tensor([d.share for d in MIXTURE]), atol=0.03)
    first = {"[NLU] ": 5, "[NLG] ": 6, "[S2S] ": 7}
    expected = torch.tensor([first[MIXTURE[i].prompt] for i in batch.denoiser])
    assert torch.equal(batch.input_ids[:, 0], expected)
    predicted = batch.labels != IGNORED
    assert not predicted[:, 0].any() and predicted.any(1).all()
    assert (predicted.cumsum(1).bool() == (torch.arange(ul2.length) >= batch.prefix_length.unsqueeze(1) - 1)).all()
    assert not (predicted & ~batch.mask).any()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, 65), min_size=1, max_size=8), st.integers(0, 1000))
def test_short_blocks_become_examples_too(lengths: list[int], seed: int) -> None:
    ul2 = mixture()
    tokens = torch.randint(9, 300, (len(lengths), 65))
    batch = ul2(tokens, torch.tensor(lengths), np.random.default_rng(seed))
    assert ((batch.labels != IGNORED).sum(1) > 0).all()


def test_causal_predicts_every_real_next_token() -> None:
    tokens = torch.tensor([[1, 11, 12, 13, 2], [1, 21, 2, 0, 0]])
    batch = causal(tokens, torch.tensor([5, 3]))
    assert batch.input_ids.tolist() == [[1, 11, 12, 13], [1, 21, 2, 0]]
    assert batch.labels.tolist() == [[11, 12, 13, 2], [21, 2, IGNORED, IGNORED]]
    assert batch.mask.tolist() == [[True] * 4, [True, True, False, False]]


@pytest.mark.parametrize(("unit", "before", "after"), [("steps", (9, 0), (10, 0)), ("tokens", (99, 9), (0, 10))])
def test_switch(unit: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    config = ObjectiveConfig(pretraining="ul2", switch_at=10, switch_unit=unit)  # type: ignore[arg-type]
    objective = Objective(config, mixture(), seed=0)
    assert objective.uses_ul2(*before) and not objective.uses_ul2(*after)
    tokens, length = torch.randint(9, 300, (4, 65)), torch.full((4,), 65)
    options = {"batch": 0, "tokens_seen": before[1]}
    first = objective(tokens, length, step=before[0], **options)
    again = objective(tokens, length, step=before[0], **options)
    other = objective(tokens, length, step=before[0], rank=1, **options)
    assert torch.equal(first.input_ids, again.input_ids)
    assert not torch.equal(first.input_ids, other.input_ids)
    assert (first.denoiser >= 0).all()
    switched = objective(tokens, length, step=after[0], batch=0, tokens_seen=after[1])
    assert (switched.denoiser == -1).all()


def test_too_few_sentinels_are_named() -> None:
    with pytest.raises(ValueError, match="sentinels, but there are 2"):
        UL2(64, 64, sentinels=[9, 8], prompts={"[NLU] ": []}, eos_id=2, pad_id=0)


def test_learning_rates_of_the_paper(oracle: Any) -> None:
    data = oracle("lr_schedule.json")
    config = OptimizerConfig(name="adafactor", lr=data["base"], schedule="inverse_sqrt", warmup_steps=data["warmup"])
    for step, rate in data["steps"].items():
        assert learning_rate(int(step), config, 500_000) == pytest.approx(rate, rel=1e-12)


def test_cosine_rises_then_falls_to_its_floor() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(step, config, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_optimizers_follow_the_schedule_and_spare_norms(name: str) -> None:
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 4), "ffn": torch.nn.Linear(4, 4)})
    config = OptimizerConfig(name=name, lr=0.1, schedule="inverse_sqrt", warmup_steps=4, weight_decay=0.5)  # type: ignore[arg-type]
    optimizer = build_optimizer(model.named_parameters(), config)
    schedule = build_schedule(optimizer, config, 10)
    decayed = [group["weight_decay"] for group in optimizer.param_groups for _ in group["params"]]
    assert sorted(decayed) == [0.0, 0.0, 0.5]  # embedding, bias; only the matrix is decayed
    for step in range(8):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(learning_rate(step, config, 10))
        before = model["ffn"].weight.clone()
        model["ffn"](model["embedding"].weight).square().sum().backward()
        optimizer.step()
        schedule.step()
        assert not torch.equal(before, model["ffn"].weight)
