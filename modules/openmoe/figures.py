"""The figures of section 4: who goes where, how early that is settled, and who is dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from modules.openmoe import analysis
from modules.openmoe.analysis import Floats, Ints, RoutingRecord
from orchestra.figures import COLOURS, style

_BLUE, _ORANGE, _GREEN, _PINK = COLOURS[:4]
_GREY = COLOURS[-1]


def expert_shares(record: RoutingRecord, domains: Sequence[str]) -> Figure:
    """Heat map of the share of each domain's choices that goes to each expert (figures 5 to 9)."""
    counts = analysis.group_counts(record.domain, record.expert, len(domains), record.num_experts)
    present = np.flatnonzero(counts.sum(-1)).tolist()
    share = analysis.shares(counts[present])
    with style():
        figure = Figure(figsize=(1.6 + 0.62 * min(record.num_experts, 16), 1.4 + 0.29 * len(present)))
        axes = figure.add_subplot()
        image = axes.imshow(share, cmap="viridis", aspect="auto", vmin=0)
        axes.set_yticks(range(len(present)), [domains[i] for i in present])
        axes.set_xticks(range(record.num_experts))
        axes.set_xlabel("expert")
        axes.grid(False)
        axes.set_title(f"Where each domain goes (uniform would be {1 / record.num_experts:.3f})")
        figure.colorbar(image, ax=axes, label="share of the domain's choices", pad=0.02)
    return figure


def specialisation_by_token(record: RoutingRecord, min_occurrences: int, label: Callable[[int], str]) -> Figure:
    """Spread of expert shares per token id and per position, between uniform and the ceiling (figures 13 and 14)."""
    by_token = analysis.group_counts(record.token, record.expert, record.vocab, record.num_experts)
    used = analysis.tokens_used(by_token, record.expert.shape[1], min_occurrences)
    length = int(record.position.max()) + 1
    by_position = analysis.group_counts(record.position, record.expert, length, record.num_experts)
    ceiling = analysis.share_std_ceiling(record.num_experts, record.expert.shape[1])
    spread = analysis.share_std(by_token[used])
    with style():
        figure = Figure(figsize=(10, 3.9))
        left, right = figure.subplots(1, 2, sharey=True)
        order = np.argsort(-spread)
        _spread_axes(left, np.arange(len(used)), spread[order], ceiling, _BLUE)
        for rank in (0, len(used) // 2, len(used) - 1) if len(used) > 2 else ():
            left.annotate(
                repr(label(int(used[order[rank]]))),
                (rank, spread[order[rank]]),
                textcoords="offset points",
                xytext=(0, 7),
                ha="left" if rank == 0 else "right" if rank == len(used) - 1 else "center",
                fontsize=8,
            )
        left.set(xlabel=f"token ids seen at least {min_occurrences} times, by spread", ylabel="std over experts")
        left.set_title("By token id")
        _spread_axes(right, np.arange(length), analysis.share_std(by_position), ceiling, _ORANGE)
        right.set(xlabel="position in the block")
        right.set_title("By position")
        left.set_ylim(0, ceiling * 1.15)
    return figure


def _spread_axes(axes, x, y, ceiling, colour):  # type: ignore[no-untyped-def]
    axes.plot(x, y, ".", ms=3, color=colour, alpha=0.7)
    axes.axhline(ceiling, color=_GREY, lw=1, ls=":")
    axes.annotate(
        "always the same experts",
        (0.99, ceiling),
        xycoords=("axes fraction", "data"),
        ha="right",
        va="bottom",
        fontsize=8,
    )
    if len(y):
        axes.axhline(y.mean(), color=colour, lw=1.2, ls="--")
        axes.annotate(
            f"mean {y.mean():.3f}",
            (0.99, y.mean()),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            fontsize=8,
        )


def information(numbers: Mapping[str, float]) -> Figure:
    """How much of the routing token id, domain and position explain, beside what chance alone gives."""
    groups = [group for group in ("token", "language", "domain", "position") if f"mi_share_{group}" in numbers]
    value = [numbers[f"mi_share_{group}"] for group in groups]
    null = [numbers[f"mi_share_{group}_null"] for group in groups]
    place = np.arange(len(groups))
    with style():
        figure = Figure(figsize=(6, 1.1 + 0.55 * len(groups)))
        axes = figure.add_subplot()
        bars = axes.barh(place - 0.19, value, 0.36, color=_BLUE, label="measured")
        chance = axes.barh(place + 0.19, null, 0.36, color=_GREY, label="experts permuted among tokens")
        for group in (bars, chance):
            axes.bar_label(group, fmt="%.3f", padding=3, fontsize=8)
        axes.set_yticks(place, ["token id" if group == "token" else group for group in groups])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, max(*value, *null) * 1.18)
        axes.set_xlabel("I(expert; group) / H(expert)")
        axes.set_title("What decides the expert")
        axes.legend(loc="lower right")
    return figure


def early_learning(fractions: Sequence[float], top1: Sequence[float], overlap: Sequence[float]) -> Figure:
    """Agreement of the token-to-expert table with the final one over training (figure 11)."""
    with style():
        figure = Figure(figsize=(6, 3.6))
        axes = figure.add_subplot()
        axes.plot(fractions, top1, "o-", color=_BLUE, label="same first expert")
        axes.plot(fractions, overlap, "s-", color=_ORANGE, label="overlap of expert shares")
        axes.set_ylim(0, 1.03)
        axes.set_xlim(0, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="of training done", ylabel="agreement with the final table")
        axes.set_title("When routing is settled")
        axes.legend(loc="lower right")
    return figure


def drops_by_position(
    record: RoutingRecord, domains: Sequence[str], trained: Sequence[str], languages: Mapping[str, str | None]
) -> Figure:
    """Drop rate along the block for each domain (figure 12); other languages share a colour and carry their names."""
    length = int(record.position.max()) + 1
    bins = min(16, length)
    bucket = record.position * bins // length
    centre = (np.arange(bins) + 0.5) * length / bins
    with style():
        figure = Figure(figsize=(8.5, 4.6))
        axes = figure.add_subplot()
        ends: list[tuple[float, str, str]] = []
        highest = 0.0
        for index, name in enumerate(domains):
            part = record.domain == index
            if not part.any():
                continue
            rate = analysis.drop_by_position(bucket[part], record.kept[part], bins)
            foreign = languages.get(name) is not None
            colour = _BLUE if name in trained else _ORANGE if foreign else _GREEN
            axes.plot(
                centre, rate, color=colour, lw=2.2 if name in trained else 1.2, alpha=1.0 if name in trained else 0.75
            )
            known = rate[~np.isnan(rate)]
            if len(known):
                ends.append((float(known[-1]), name, colour))
                highest = max(highest, float(known.max()))
        for (_, name, colour), height in zip(
            sorted(ends), _apart([e[0] for e in sorted(ends)], max(highest, 1e-3) / 24), strict=True
        ):
            axes.annotate(name, (length * 1.01, height), color=colour, fontsize=8, va="center", annotation_clip=False)
        axes.set_xlim(0, length * 1.2)
        axes.set_ylim(0, max(highest * 1.08, 0.01))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(xlabel="position in the block", ylabel="(token, choice) pairs dropped")
        for text, colour in (("trained on", _BLUE), ("other languages", _ORANGE), ("other English", _GREEN)):
            axes.plot([], [], color=colour, label=text)
        axes.legend(loc="upper left")
        axes.set_title("Drop towards the end")
    return figure


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Label heights moved up so that neighbours do not overlap."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    return placed


def favourite_tokens(counts: Floats, label: Callable[[int], str], number: int = 10) -> list[dict[str, str]]:
    """The tokens that each expert gets most (tables 9 and 15), one row an expert."""
    favourites: Ints = analysis.top_tokens(counts, number)
    return [
        {
            "expert": str(expert),
            **{f"{rank + 1}": repr(label(int(v))) if counts[v, expert] else "" for rank, v in enumerate(row)},
        }
        for expert, row in enumerate(favourites)
    ]
