"""What the decoder is trained to predict (section 2.3): the UL2 mixture of denoisers, or every next token.

A training example is an input followed by a target in one sequence, with the loss on the target alone. All rounding is
half to even, as in the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modules.openmoe.config import ObjectiveConfig

IGNORED = -100


@dataclass(frozen=True)
class Denoiser:
    """One part of the mixture: mean length of a noise span and share of noise; PrefixLM has neither."""

    name: str
    share: float
    prompt: str
    mean_span: float = 0.0
    rate: float = 0.0


MIXTURE = (
    Denoiser("prefix_lm", 0.5, "[S2S] "),
    Denoiser("span_3_15", 0.1, "[NLU] ", 3, 0.15),
    Denoiser("span_8_15", 0.1, "[NLU] ", 8, 0.15),
    Denoiser("span_3_50", 0.1, "[NLG] ", 3, 0.5),
    Denoiser("span_8_50", 0.1, "[NLG] ", 8, 0.5),
    Denoiser("span_64_50", 0.1, "[NLG] ", 64, 0.5),
)


@dataclass(frozen=True)
class DecoderBatch:
    """What the decoder gets: `input_ids`, `labels` (-100 ignored) int64 and `mask` bool, all `[B, S]`;
    `prefix_length` `[B]`, the tokens that belong to the input; `denoiser` `[B]`, index into `MIXTURE` or -1."""

    input_ids: Tensor
    labels: Tensor
    mask: Tensor
    prefix_length: Tensor
    denoiser: Tensor

    def to(self, device: torch.device) -> DecoderBatch:
        return DecoderBatch(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})


# --- span corruption -------------------------------------------------------------------------------------------------


def noise_counts(length: int, mean_span: float, rate: float) -> tuple[int, int]:
    """Noise tokens and noise spans in a chunk of `length` tokens.

    Raises:
        ValueError: fewer than two tokens, of which one could be neither noise nor kept.
    """
    if length < 2:
        raise ValueError(f"span corruption needs at least 2 tokens, got {length}")
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def corrupted_lengths(inputs_length: int, mean_span: float, rate: float) -> tuple[int, int]:
    """Longest chunk whose corrupted input fits `inputs_length`, and the length of its target (T5's rule)."""

    def lengths(tokens: int) -> tuple[int, int]:
        noise, spans = noise_counts(tokens, mean_span, rate)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = 2
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    if rate == 0.5 and lengths(tokens)[1] > lengths(tokens)[0]:
        tokens -= 1
    return tokens, lengths(tokens)[1]


def random_partition(total: int, parts: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`parts` positive integers that sum to `total`; every such composition is equally likely."""
    cuts = np.sort(rng.choice(total - 1, size=parts - 1, replace=False)) + 1 if parts > 1 else np.zeros(0, np.int64)
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(np.int64)


def random_noise_mask(length: int, mean_span: float, rate: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """`[length]`, True for noise: kept and noise spans alternate, beginning with kept and ending with noise."""
    noise, spans = noise_counts(length, mean_span, rate)
    noisy = random_partition(noise, spans, rng)
    kept = random_partition(length - noise, spans, rng)
    sizes = np.stack([kept, noisy], 1).ravel()
    return np.repeat(np.tile([False, True], spans), sizes)


def corrupt(
    tokens: Sequence[int], noise: Sequence[bool] | NDArray[np.bool_], sentinels: Sequence[int], eos_id: int
) -> tuple[list[int], list[int]]:
    """Input with each noise span replaced by one sentinel, and target with the spans behind their sentinels."""
    inputs: list[int] = []
    targets: list[int] = []
    used = 0
    inside = False
    for token, noisy in zip(tokens, noise, strict=True):
        if noisy:
            if not inside:
                inputs.append(sentinels[used])
                targets.append(sentinels[used])
                used += 1
            targets.append(token)
        else:
            inputs.append(token)
        inside = bool(noisy)
    return [*inputs, eos_id], [*targets, eos_id]


# --- decoder form ----------------------------------------------------------------------------------------------------


def decoder_row(inputs: Sequence[int], targets: Sequence[int]) -> tuple[list[int], list[int], int]:
    """One sequence: what the decoder reads, the label of each position, and how long the input is."""
    sequence = [*inputs, *targets]
    labels = [IGNORED] * len(sequence)
    first = max(len(inputs), 1)  # nothing predicts the very first token
    labels[first - 1 : -1] = sequence[first:]
    return sequence[:-1], labels[:-1], len(inputs)


def collate(
    rows: Sequence[tuple[list[int], list[int], int]], denoisers: Sequence[int], length: int, pad_id: int
) -> DecoderBatch:
    """Rows of `decoder_row` padded at their end to `length`.

    Raises:
        ValueError: a row is longer.
    """
    shape = (len(rows), length)
    ids, labels = torch.full(shape, pad_id), torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.bool)
    for i, (sequence, targets, _) in enumerate(rows):
        size = len(sequence)
        if size > length:
            raise ValueError(f"example of {size} tokens does not fit a sequence of {length}")
        ids[i, :size], labels[i, :size] = torch.tensor(sequence), torch.tensor(targets)
        mask[i, :size] = True
    return DecoderBatch(ids, labels, mask, torch.tensor([row[2] for row in rows]), torch.tensor(list(denoisers)))


def causal(tokens: Tensor, length: Tensor) -> DecoderBatch:
    """Every next token of `tokens` `[B, L + 1]`, of which `length` `[B]` are real: sequences of L tokens."""
    position = torch.arange(tokens.shape[1] - 1, device=tokens.device)
    mask = position < length.unsqueeze(1) - 1
    labels = torch.where(mask, tokens[:, 1:], IGNORED)
    nothing = torch.zeros_like(length)
    return DecoderBatch(tokens[:, :-1], labels, mask, nothing, nothing - 1)


class UL2:
    """The mixture of denoisers over blocks of text.

    Every block becomes one example: a denoiser is drawn by its share and takes a chunk of the length it needs from a
    random place in the block (the whole block when that is shorter, with its noise counted for what is there).
    A block of fewer than two tokens is learnt causally.

    Args:
        inputs_length: tokens of the corrupted input, prompt apart.
        targets_length: PrefixLM uses `inputs_length + targets_length` tokens of text.
        sentinels: mask token ids, first mask first.
        prompts: token ids of each mode prompt in `MIXTURE`.
    """

    def __init__(
        self,
        inputs_length: int,
        targets_length: int,
        *,
        sentinels: Sequence[int],
        prompts: dict[str, list[int]],
        eos_id: int,
        pad_id: int,
    ) -> None:
        self.sentinels, self.prompts, self.eos_id, self.pad_id = sentinels, prompts, eos_id, pad_id
        self.chunk = [
            corrupted_lengths(inputs_length, d.mean_span, d.rate)[0] if d.rate else inputs_length + targets_length
            for d in MIXTURE
        ]
        examples = [
            n + 2 * (noise_counts(n, d.mean_span, d.rate)[1] + 1) if d.rate else n
            for n, d in zip(self.chunk, MIXTURE, strict=True)
        ]
        spans = [noise_counts(n, d.mean_span, d.rate)[1] for n, d in zip(self.chunk, MIXTURE, strict=True) if d.rate]
        if max(spans) > len(sentinels):
            raise ValueError(
                f"inputs of {inputs_length} tokens need {max(spans)} sentinels, but there are {len(sentinels)}"
            )
        self.length = max(examples) + max(len(prompt) for prompt in prompts.values())

    def __call__(self, tokens: Tensor, length: Tensor, rng: np.random.Generator) -> DecoderBatch:
        """`tokens` `[B, L + 1]` with a begin token first, `length` `[B]` real ones -> sequences of `self.length`."""
        chosen = rng.choice(len(MIXTURE), size=len(tokens), p=[d.share for d in MIXTURE])
        rows = [
            self._example(block[1:size].tolist(), int(which), rng)
            for block, size, which in zip(tokens, length.tolist(), chosen, strict=True)
        ]
        return collate(rows, chosen.tolist(), self.length, self.pad_id)

    def _example(self, text: list[int], which: int, rng: np.random.Generator) -> tuple[list[int], list[int], int]:
        denoiser = MIXTURE[which]
        size = min(self.chunk[which], len(text))
        begin = int(rng.integers(len(text) - size + 1))
        chunk = text[begin : begin + size]
        prompt = self.prompts[denoiser.prompt]
        if size < 2:
            return decoder_row(prompt, [*chunk, self.eos_id])
        if denoiser.rate == 0.0:
            split = int(rng.integers(1, size))
            return decoder_row([*prompt, *chunk[:split]], chunk[split:])
        noise = random_noise_mask(size, denoiser.mean_span, denoiser.rate, rng)
        inputs, targets = corrupt(chunk, noise, self.sentinels, self.eos_id)
        return decoder_row([*prompt, *inputs], targets)


class Objective:
    """UL2 until the switch, causal afterwards (or one of them throughout).

    The random choices of a batch are a pure function of seed, step and rank, so a resumed run makes the same ones.
    """

    def __init__(self, config: ObjectiveConfig, ul2: UL2 | None, seed: int) -> None:
        self.config, self.ul2, self.seed = config, ul2, seed

    def uses_ul2(self, step: int, tokens_seen: int) -> bool:
        """Whether the UL2 phase is still on after `step` optimiser steps and `tokens_seen` tokens."""
        if self.config.pretraining != "ul2":
            return False
        progress = step if self.config.switch_unit == "steps" else tokens_seen
        return self.config.switch_at is None or progress < self.config.switch_at

    def __call__(
        self, tokens: Tensor, length: Tensor, *, step: int, batch: int, tokens_seen: int, rank: int = 0
    ) -> DecoderBatch:
        """The training batch for optimiser step `step`; `batch` counts batches when several make one step."""
        if not self.uses_ul2(step, tokens_seen):
            return causal(tokens, length)
        assert self.ul2 is not None
        return self.ul2(tokens, length, np.random.default_rng([self.seed, step, batch, rank]))
