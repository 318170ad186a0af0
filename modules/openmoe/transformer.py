"""The decoder: pre-norm blocks of attention and feed-forward, experts in every n-th (Xue et al., section 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modules.openmoe.attention import Attention, KVCache
from modules.openmoe.config import ModelConfig
from modules.openmoe.experts import Kind, gated
from modules.openmoe.moe import MoELayer
from modules.openmoe.router import Routing


@dataclass
class DecoderOutput:
    """`logits` `[B, S, V]` in float32 or wider, and one `Routing` per MoE layer, first layer first."""

    logits: Tensor
    routings: list[Routing]


class FeedForward(nn.Module):
    """Dense gated feed-forward; the input matrices stand side by side in one product (see `experts.Experts`)."""

    def __init__(self, d_model: int, d_ff: int, kind: Kind = "swiglu") -> None:
        super().__init__()
        self.kind: Kind = kind
        self.w_in = nn.Linear(d_model, (2 if kind == "swiglu" else 3) * d_ff, bias=False)
        self.w_out = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_out(gated(self.w_in(x), self.kind))
        return out


class Block(nn.Module):
    """One layer. With experts, the dense feed-forward stays beside them as a residual expert (equation 4)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        expert_layer = config.is_moe_layer(layer)
        self.norm_attention = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = Attention(config, layer)
        self.norm_ffn = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.moe = MoELayer(config) if config.layout == "moe" and expert_layer else None
        widened = config.top_k * config.d_ff if config.layout == "dense_matched" and expert_layer else 0
        has_ffn = self.moe is None or config.residual != "none"
        self.ffn = FeedForward(config.d_model, config.d_ff + widened, config.ffn) if has_ffn else None
        sequential = self.moe is not None and config.residual == "sequential"
        self.norm_residual = nn.RMSNorm(config.d_model, eps=config.norm_eps) if sequential else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        allowed: Tensor | None = None,
        cache: KVCache | None = None,
        dropless: bool = False,
    ) -> tuple[Tensor, Routing | None]:
        """`x` `[B, S, D]` -> the same shape, and the routing when the layer has experts."""
        attended = self.dropout(self.attention(self.norm_attention(x), positions, allowed, cache))
        if self.config.parallel_block:  # both branches read the layer's input
            fed, routing = self._feed_forward(x, mask, dropless)
            return x + attended + fed, routing
        x = x + attended
        fed, routing = self._feed_forward(x, mask, dropless)
        return x + fed, routing

    def _feed_forward(self, x: Tensor, mask: Tensor | None, dropless: bool) -> tuple[Tensor, Routing | None]:
        """What the feed-forward half adds to `x`."""
        h = self.norm_ffn(x)
        if self.moe is None:
            assert self.ffn is not None
            return self.dropout(self.ffn(h)), None
        out, routing = self.moe(h, mask, dropless=dropless)
        out = self.dropout(out)
        if self.norm_residual is not None:  # released checkpoints: experts first, then the dense feed-forward
            assert self.ffn is not None
            out = out + self.dropout(self.ffn(self.norm_residual(x + out)))
        elif self.ffn is not None:
            out = out + self.dropout(self.ffn(h))
        return out, routing


class Decoder(nn.Module):
    """OpenMoE's language model. `activation_checkpointing` recomputes each block in the backward pass."""

    def __init__(self, config: ModelConfig, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        if not self.embedding.weight.is_meta:
            self.reset_parameters()

    def forward(
        self,
        input_ids: Tensor,
        *,
        mask: Tensor | None = None,
        prefix_length: Tensor | None = None,
        cache: KVCache | None = None,
        dropless: bool = False,
    ) -> DecoderOutput:
        """Logits of the next token at every position.

        Args:
            input_ids: `[B, S]` int64.
            mask: `[B, S]` bool, True for real tokens, which come first; padding is never routed or counted.
            prefix_length: `[B]` int64, tokens that see each other both ways when `prefix_attention` is bidirectional.
            cache: continue after what the cache holds; its lengths grow by the real tokens of each row.
            dropless: lift every capacity, as generation does.
        """
        batch, length = input_ids.shape
        positions = torch.arange(length, device=input_ids.device).expand(batch, length)
        if cache is not None:
            positions = positions + cache.lengths.unsqueeze(-1)
        allowed = self._allowed(positions, prefix_length, cache)
        x = self.embedding(input_ids)
        routings = []
        for block in self.blocks:
            if self.activation_checkpointing and self.training:
                x, routing = checkpoint(block, x, positions, mask, allowed, None, dropless, use_reentrant=False)
            else:
                x, routing = block(x, positions, mask, allowed, cache, dropless)
            if routing is not None:
                routings.append(routing)
        if cache is not None:
            cache.lengths = cache.lengths + (length if mask is None else mask.sum(-1))
        return DecoderOutput(self._logits(self.norm(x)), routings)

    def _logits(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.embedding.weight if self.output is None else self.output.weight
        with torch.autocast(x.device.type, enabled=False):
            return x.to(wide) @ weight.to(wide).t()

    def _allowed(self, positions: Tensor, prefix: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """Which keys each query may see, `[B, 1, S, keys]`; None for plain causal attention."""
        bidirectional = prefix is not None and self.config.prefix_attention == "bidirectional"
        if cache is None and not bidirectional:
            return None
        keys = torch.arange(cache.capacity if cache is not None else positions.shape[1], device=positions.device)
        allowed = keys <= positions.unsqueeze(-1)
        if bidirectional:
            assert prefix is not None
            allowed = allowed | (keys < prefix.view(-1, 1, 1))
        return allowed.unsqueeze(1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight afresh, each expert on its own (copies of one expert would stay copies)."""
        config = self.config
        scale = 0.1 if config.init == "jax" else 1.0
        # Tied logits then start with variance 1/4: the first loss is close to ln(vocabulary).
        self.embedding.weight.normal_(0.0, 1.0 if config.init == "jax" else 0.5 * config.d_model**-0.5)
        if self.output is not None:
            _truncated(self.output.weight, math.sqrt(scale / config.d_model))
        for name, module in self.named_modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module is not self.output:
                std = math.sqrt(scale / module.in_features)
                if config.init == "jax" and name.endswith("attention.q"):
                    std /= math.sqrt(config.head_size)
                if ".attention." in name:
                    module.weight.normal_(0.0, std)
                else:
                    _truncated(module.weight, std)
            elif isinstance(module, MoELayer):
                module.router.weight.normal_(0.0, config.router_init_std)
                module.experts.w_in.normal_(0.0, math.sqrt(scale / config.d_model))
                module.experts.w_out.normal_(0.0, math.sqrt(scale / config.d_ff))


def _truncated(weight: Tensor, std: float) -> None:
    """Truncated normal at two standard deviations, with `std` the one after truncation."""
    std = std / 0.87962566103423978
    nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std)
