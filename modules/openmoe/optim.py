"""Optimisers and learning rates (section 4 of the paper's appendix: Adafactor with inverse square root)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from modules.openmoe.config import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of optimiser step `step` (from 0).

    `inverse_sqrt` is lr / sqrt(max(step, warmup_steps)): constant at first, with no ramp, as in the paper, where lr is
    1 and warmup_steps 10000. `cosine` and `constant` rise linearly over `warmup_steps`; `cosine` then falls to
    `min_lr_ratio` of lr at `total_steps`.
    """
    warmup = config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return config.lr / math.sqrt(max(step, warmup, 1))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    low = config.min_lr_ratio
    return config.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or Adafactor over named parameters. Norms, embeddings and routers are not decayed: shrinking them changes
    what they mean (scale, token identity, the sharpness of routing)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in parameters:
        exempt = parameter.ndim < 2 or "embedding" in name or "router" in name
        (kept if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    if config.name == "adamw":
        # Not fused: a fused step unscales gradients by itself, and Lightning then refuses to clip them.
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, foreach=True)
    from transformers.optimization import Adafactor

    return Adafactor(groups, lr=config.lr, decay_rate=-0.8, scale_parameter=True, relative_step=False)


def build_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int) -> Any:
    """A per-step scheduler that follows `learning_rate`."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, config, total_steps) / config.lr
    )
