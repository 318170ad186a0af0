"""Causal multi-head attention with rotary positions and a key-value cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modules.openmoe.config import ModelConfig


def rotate(x: Tensor, positions: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotary position embedding, half-split: dimension i turns with dimension i + d/2.

    Args:
        x: `[B, S, heads, d]`.
        positions: `[B, S]` or `[S]` int64, counted from 0.
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = base ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angle = positions.to(wide).unsqueeze(-1) * frequency
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)
    first, second = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@dataclass
class KVCache:
    """Keys and values of each layer, `[B, heads, capacity, d]`, and how many positions of each row are filled."""

    capacity: int
    lengths: Tensor  # [B] int64
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def append(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, S, d]` at `positions` `[B, S]` and return everything held for the layer."""
        batch, heads, _, size = key.shape
        if layer not in self.keys:
            shape = (batch, heads, self.capacity, size)
            self.keys[layer], self.values[layer] = key.new_zeros(shape), value.new_zeros(shape)
        where = positions.view(batch, 1, -1, 1).expand_as(key)
        self.keys[layer].scatter_(2, where, key)
        self.values[layer].scatter_(2, where, value)
        return self.keys[layer], self.values[layer]


class Attention(nn.Module):
    """Multi-head attention; the logits' scale is 1/sqrt(head size) unless `attention_scale` says otherwise."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.q = nn.Linear(config.d_model, config.attention_dim, bias=False)
        self.k = nn.Linear(config.d_model, config.attention_dim, bias=False)
        self.v = nn.Linear(config.d_model, config.attention_dim, bias=False)
        self.out = nn.Linear(config.attention_dim, config.d_model, bias=False)

    def forward(
        self, x: Tensor, positions: Tensor, allowed: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """`x` `[B, S, D]`; `allowed` `[B, 1, S, keys]` bool replaces the causal rule when given."""
        batch, length, _ = x.shape
        heads = (batch, length, self.config.num_heads, self.config.head_size)
        query = rotate(self.q(x).view(heads), positions, self.config.rope_base).transpose(1, 2)
        key = rotate(self.k(x).view(heads), positions, self.config.rope_base).transpose(1, 2)
        value = self.v(x).view(heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.append(self.layer, key, value, positions)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=self.config.attention_scale
        )
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))
