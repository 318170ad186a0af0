"""What the router learns: the analyses of section 4 of the paper, as plain functions of routing decisions.

Shapes: N routed tokens with k choices each among E experts, V token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

POSITION_BUCKETS = 16  # positions are looked at in this many equal buckets
NULL_PERMUTATIONS = 5


@dataclass(frozen=True)
class RoutingRecord:
    """Routing of real tokens by one layer: `token`, `position`, `domain` `[N]`, `expert` `[N, k]` by falling
    probability, `kept` `[N, k]` False where the expert was full."""

    token: Ints
    position: Ints
    domain: Ints
    expert: Ints
    kept: NDArray[np.bool_]
    num_experts: int
    vocab: int

    def __len__(self) -> int:
        return len(self.token)

    def where(self, chosen: NDArray[np.bool_]) -> RoutingRecord:
        """The tokens where `chosen` `[N]` holds."""
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name not in ("num_experts", "vocab")}
        return RoutingRecord(**arrays, num_experts=self.num_experts, vocab=self.vocab)


class RoutingCollector:
    """Gathers the routing of one layer batch by batch."""

    def __init__(self, num_experts: int, vocab: int) -> None:
        self.num_experts, self.vocab = num_experts, vocab
        self._parts: list[tuple[NDArray[np.generic], ...]] = []

    def update(self, input_ids: Tensor, mask: Tensor, domain: Tensor, expert: Tensor, kept: Tensor) -> None:
        """Add a batch: `input_ids`, `mask` `[B, S]`, `domain` `[B]`, `expert`, `kept` `[B, S, k]`."""
        position = mask.new_ones(mask.shape).long().cumsum(1) - 1
        columns = (input_ids, position, domain.unsqueeze(1).expand_as(input_ids), expert, kept)
        self._parts.append(tuple(column[mask].cpu().numpy() for column in columns))

    def record(self) -> RoutingRecord:
        """Everything collected so far.

        Raises:
            ValueError: nothing was.
        """
        if not self._parts:
            raise ValueError("no routing was collected")
        token, position, domain, expert, kept = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        return RoutingRecord(token, position, domain, expert, kept, self.num_experts, self.vocab)


# --- shares of experts by group --------------------------------------------------------------------------------------


def group_counts(group: Ints, expert: Ints, num_groups: int, num_experts: int) -> Floats:
    """n(g, e) `[G, E]`: how often a token of group g was routed to expert e, before dropping."""
    flat = np.repeat(group, expert.shape[1]) * num_experts + expert.reshape(-1)
    return np.bincount(flat, minlength=num_groups * num_experts).reshape(num_groups, num_experts).astype(np.float64)


def shares(counts: Floats) -> Floats:
    """R_g(e) `[G, E]`: the share of each group's choices that go to each expert; a row of zeros for an empty group."""
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)


def tokens_used(counts: Floats, top_k: int, min_occurrences: int) -> Ints:
    """Token ids that occur at least `min_occurrences` times."""
    return np.flatnonzero(counts.sum(-1) >= min_occurrences * top_k)


def specialisation(counts: Floats, groups: Ints | None = None) -> float:
    """Mean over groups of TV(R_g, R_overall): 0 when every group uses the experts alike. `groups` chooses rows; empty
    groups are left out; NaN when none is left."""
    chosen = counts if groups is None else counts[groups]
    chosen = chosen[chosen.sum(-1) > 0]
    if not len(chosen):
        return float("nan")
    overall = counts.sum(0) / counts.sum()
    return float(0.5 * np.abs(shares(chosen) - overall).sum(-1).mean())


def share_std(counts: Floats) -> Floats:
    """Standard deviation over the E experts of each row of R: 0 is uniform (figures 13 and 14)."""
    return shares(counts).std(-1)


def share_std_ceiling(num_experts: int, top_k: int) -> float:
    """What `share_std` is for a group that always goes to the same k experts."""
    return float(np.sqrt(max(0.0, 1 / (top_k * num_experts) - 1 / num_experts**2)))


def normalised_entropy(counts: Floats) -> Floats:
    """Entropy of each row of R divided by ln E: 1 is uniform; 1 when there is one expert."""
    experts = counts.shape[-1]
    if experts == 1:
        return np.ones(len(counts))
    share = shares(counts)
    return -(share * np.log(np.where(share > 0, share, 1.0))).sum(-1) / np.log(experts)


def entropy(counts: Floats) -> float:
    """H(expert) in nats of counts `[E]`."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def mutual_information(counts: Floats) -> float:
    """I(expert; group) in nats from n(g, e) `[G, E]`."""
    joint = counts / counts.sum()
    expected = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    some = joint > 0
    return float((joint[some] * np.log(joint[some] / expected[some])).sum())


def information_share(counts: Floats) -> float:
    """I(expert; group) / H(expert): the part of the routing that knowing the group explains; 0 with one expert."""
    whole = entropy(counts.sum(0))
    return mutual_information(counts) / whole if whole > 0 else 0.0


def information_share_null(group: Ints, expert: Ints, num_groups: int, num_experts: int, seed: int = 0) -> float:
    """`information_share` when the experts are permuted among tokens: what a finite sample alone gives."""
    rng = np.random.default_rng(seed)
    drawn = [
        information_share(group_counts(group, expert[rng.permutation(len(expert))], num_groups, num_experts))
        for _ in range(NULL_PERMUTATIONS)
    ]
    return float(np.mean(drawn))


def top_tokens(counts: Floats, number: int = 10) -> Ints:
    """The ids that each expert was given most often `[E, number]`, ties to the lower id (tables 9 and 15)."""
    return np.argsort(-counts.T, axis=-1, kind="stable")[:, :number]


# --- early routing learning ------------------------------------------------------------------------------------------


def routing_agreement(earlier: Floats, final: Floats, used: Ints) -> tuple[float, float]:
    """How much of the final token-to-expert table an earlier one already has (figure 11).

    Returns:
        The share of tokens whose id has the same most frequent expert in both, and the mean of 1 - TV(R_v, R_v') over
        ids; both weighted by how often an id occurs in `final`. NaN when `used` is empty.
    """
    weight = final[used].sum(-1)
    if not weight.sum():
        return float("nan"), float("nan")
    same = earlier[used].argmax(-1) == final[used].argmax(-1)
    overlap = 1 - 0.5 * np.abs(shares(earlier[used]) - shares(final[used])).sum(-1)
    return float(np.average(same, weights=weight)), float(np.average(overlap, weights=weight))


# --- drop towards the end --------------------------------------------------------------------------------------------


def drop_by_position(position: Ints, kept: NDArray[np.bool_], length: int) -> Floats:
    """Share of (token, choice) pairs dropped at each position `[length]`; NaN where no token was (figure 12)."""
    k = kept.shape[1]
    pairs = np.bincount(position, minlength=length)[:length] * k
    dropped = np.bincount(position, weights=(~kept).sum(1), minlength=length)[:length]
    return np.divide(dropped, pairs, out=np.full(length, np.nan), where=pairs > 0)


def drop_slope(by_position: Floats) -> float:
    """Mean drop rate of the last third of positions minus that of the first; NaN for fewer than three positions."""
    third = len(by_position) // 3
    if third == 0:
        return float("nan")
    first, last = by_position[:third], by_position[-third:]
    if np.isnan(first).all() or np.isnan(last).all():
        return float("nan")
    return float(np.nanmean(last) - np.nanmean(first))


# --- everything at once ----------------------------------------------------------------------------------------------


def analyse(
    record: RoutingRecord,
    *,
    domains: Sequence[str],
    languages: Mapping[str, str | None] | None = None,
    min_occurrences: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Every number of the analyses, under flat stable names.

    Args:
        domains: names of the values in `record.domain`.
        languages: natural language of each domain that stands for one. `tv_language` and `mi_share_language` compare
            these with each other, `tv_domain` and `mi_share_domain` the others.
        min_occurrences: token ids seen less often are left out of the per-token means.
    """
    experts, k = record.num_experts, record.expert.shape[1]
    by_token = group_counts(record.token, record.expert, record.vocab, experts)
    length = int(record.position.max()) + 1
    by_position = group_counts(record.position, record.expert, length, experts)
    buckets = position_buckets(record.position, length)
    used = tokens_used(by_token, k, min_occurrences)
    foreign = np.isin(record.domain, [i for i, name in enumerate(domains) if (languages or {}).get(name)])
    found = {
        "std_token": float(share_std(by_token[used]).mean()) if len(used) else float("nan"),
        "std_position": float(share_std(by_position[by_position.sum(-1) > 0]).mean()),
        "std_ceiling": share_std_ceiling(experts, k),
        "entropy_token": float(normalised_entropy(by_token[used]).mean()) if len(used) else float("nan"),
        "tv_token": specialisation(by_token, used),
        "tv_position": specialisation(group_counts(buckets, record.expert, POSITION_BUCKETS, experts)),
        "mi_share_token": information_share(by_token),
        "mi_share_token_null": information_share_null(record.token, record.expert, record.vocab, experts, seed),
        "mi_share_position": information_share(by_position),
        "mi_share_position_null": information_share_null(record.position, record.expert, length, experts, seed),
        "drop_rate": float(1 - record.kept.mean()),
        "drop_slope": drop_slope(drop_by_position(record.position, record.kept, length)),
    }
    for kind, part in (("domain", record.where(~foreign)), ("language", record.where(foreign))):
        if len(part):
            by_group = group_counts(part.domain, part.expert, len(domains), experts)
            found[f"tv_{kind}"] = specialisation(by_group)
            found[f"mi_share_{kind}"] = information_share(by_group)
            found[f"mi_share_{kind}_null"] = information_share_null(
                part.domain, part.expert, len(domains), experts, seed
            )
    for index, name in enumerate(domains):
        part = record.where(record.domain == index)
        if len(part):
            found[f"drop_rate_{name}"] = float(1 - part.kept.mean())
            found[f"drop_slope_{name}"] = drop_slope(drop_by_position(part.position, part.kept, length))
    return found


def position_buckets(position: Ints, length: int) -> Ints:
    """The bucket `[0, POSITION_BUCKETS)` of each position."""
    return position * POSITION_BUCKETS // length
