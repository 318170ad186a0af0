"""Routing analyses against brute force, and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.openmoe import analysis


def test_every_number_of_the_oracle(oracle: Any) -> None:
    data = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in oracle("analysis").items()}
    experts, vocab = data["num_experts"], data["vocab"]
    counts = analysis.group_counts(data["token"], data["expert"], vocab, experts)
    domains = analysis.group_counts(data["domain"], data["expert"], int(data["domain"].max()) + 1, experts)
    length = int(data["position"].max()) + 1
    positions = analysis.group_counts(data["position"], data["expert"], length, experts)
    used = analysis.tokens_used(counts, 2, data["n_min"])
    other = analysis.group_counts(data["token"], data["expert_other"], vocab, experts)
    top1, overlap = analysis.routing_agreement(other, counts, used)
    dropped = analysis.drop_by_position(data["position"], data["kept"], length)
    ours = {
        "counts": counts,
        "R_token": analysis.shares(counts),
        "overall": counts.sum(0) / counts.sum(),
        "tokens_used": used,
        "std_token": analysis.share_std(counts[used]),
        "std_position": analysis.share_std(positions),
        "normalised_entropy": analysis.normalised_entropy(counts[used]),
        "tv_domain": analysis.specialisation(domains),
        "tv_token": analysis.specialisation(counts, used),
        "tv_position": analysis.specialisation(positions),
        "mi_token": analysis.mutual_information(counts),
        "mi_domain": analysis.mutual_information(domains),
        "entropy_expert": analysis.entropy(counts.sum(0)),
        "mi_share_token": analysis.information_share(counts),
        "mi_share_domain": analysis.information_share(domains),
        "top1_agreement": top1,
        "routing_overlap": overlap,
        "drop_by_position": dropped,
        "drop_slope": analysis.drop_slope(dropped),
        "drop_rate": 1 - data["kept"].mean(),
        "ceiling_std": analysis.share_std_ceiling(experts, 2),
        "top_tokens": analysis.top_tokens(counts, 5),
    }
    inputs = {"token", "position", "domain", "expert", "expert_other", "kept", "num_experts", "vocab", "n_min"}
    assert ours.keys() == data.keys() - inputs
    for name, value in ours.items():
        np.testing.assert_allclose(value, data[name], rtol=1e-9, atol=1e-9, err_msg=name)


def record(tokens: int = 4000, experts: int = 8, *, by_token: bool, seed: int = 0) -> analysis.RoutingRecord:
    rng = np.random.default_rng(seed)
    token = rng.integers(0, 40, tokens)
    first = token % experts if by_token else rng.integers(0, experts, tokens)
    expert = np.stack([first, (first + 1 + rng.integers(0, experts - 1, tokens)) % experts], 1)
    position = np.arange(tokens) % 50
    kept = np.ones((tokens, 2), bool)
    kept[position >= 40, 1] = False
    return analysis.RoutingRecord(token, position, rng.integers(0, 3, tokens), expert, kept, experts, 60)


def test_routing_by_token_is_told_from_routing_at_random() -> None:
    names = ["prose", "code", "ui_de"]
    languages = {"ui_de": "de"}
    by_token = analysis.analyse(record(by_token=True), domains=names, languages=languages)
    random = analysis.analyse(record(by_token=False), domains=names, languages=languages)
    assert by_token["mi_share_token"] > 5 * by_token["mi_share_token_null"]
    assert random["mi_share_token"] == pytest.approx(random["mi_share_token_null"], rel=0.2)
    assert by_token["std_token"] > 3 * random["std_token"]
    assert by_token["drop_rate"] == pytest.approx(0.1)
    assert by_token["drop_slope"] > 0.2 and by_token["drop_slope_code"] > 0.2
    assert all(np.isfinite(value) for value in by_token.values())


def test_empty_groups_and_rare_tokens_give_defined_results() -> None:
    one = analysis.analyse(record(tokens=30, by_token=True), domains=["a", "b", "c", "empty"], min_occurrences=100)
    assert np.isnan(one["std_token"]) and "tv_language" not in one
    assert "drop_rate_empty" not in one
    single = analysis.RoutingRecord(*(np.zeros(5, int),) * 3, np.zeros((5, 1), int), np.ones((5, 1), bool), 1, 1)
    alone = analysis.analyse(single, domains=["a"], min_occurrences=1)
    assert alone["mi_share_token"] == 0.0 and alone["entropy_token"] == 1.0 and np.isnan(alone["drop_slope"])


def test_collector_leaves_padding_out() -> None:
    collector = analysis.RoutingCollector(4, 10)
    with pytest.raises(ValueError, match="no routing"):
        collector.record()
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    expert = torch.arange(12).view(2, 3, 2) % 4
    collector.update(ids, mask, torch.tensor([0, 1]), expert, torch.ones(2, 3, 2, dtype=torch.bool))
    found = collector.record()
    assert found.token.tolist() == [1, 2, 3, 4, 5]
    assert found.position.tolist() == [0, 1, 2, 0, 1]
    assert found.domain.tolist() == [0, 0, 0, 1, 1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_renaming_experts_or_tokens_changes_nothing(seed: int) -> None:
    base = record(400, by_token=True, seed=seed)
    rng = np.random.default_rng(seed)
    experts, tokens = rng.permutation(8), rng.permutation(60)
    renamed = analysis.RoutingRecord(
        tokens[base.token], base.position, base.domain, experts[base.expert], base.kept, 8, 60
    )
    names = ["a", "b", "c"]
    before = analysis.analyse(base, domains=names, min_occurrences=5)
    after = analysis.analyse(renamed, domains=names, min_occurrences=5)
    assert before.keys() == after.keys()
    for name in before:
        if "null" not in name:  # the permutation null is drawn, not computed
            assert before[name] == pytest.approx(after[name], nan_ok=True), name
