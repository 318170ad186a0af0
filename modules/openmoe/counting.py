"""Parameter counts of a decoder, total and active, beside the paper's (table 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modules.openmoe.config import ModelConfig

# Table 2 of the paper, by size: total, active without and with the embedding.
PAPER = {"base": ("650M", "142M", "339M"), "8b": ("8.7B", "2.1B", "2.6B"), "34b": ("34B", "6.0B", "6.8B")}


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part. The paper's table counts attention, feed-forward (residual ones included), experts and one
    embedding, and leaves out routers and norms."""

    attention: int
    ffn: int
    experts: int
    active_experts: int
    embedding: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        """As the paper counts."""
        return self.attention + self.ffn + self.experts + self.embedding

    @property
    def active(self) -> int:
        """Used by one token, without the embedding, as the paper counts."""
        return self.attention + self.ffn + self.active_experts

    @property
    def everything(self) -> int:
        """Every number in the state dict."""
        return self.total + self.router + self.norms


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts of `Decoder(config)` without building it."""
    matrices = 3 if config.ffn == "swiglu" else 4
    one = matrices * config.d_model * config.d_ff
    chosen = sum(config.is_moe_layer(i) for i in range(config.num_layers))
    expert_layers = chosen if config.layout == "moe" else 0
    without_ffn = expert_layers if config.residual == "none" else 0
    widened = chosen * config.top_k if config.layout == "dense_matched" else 0
    third_norms = expert_layers if config.residual == "sequential" else 0
    return ParameterCount(
        attention=4 * config.d_model * config.attention_dim * config.num_layers,
        ffn=one * (config.num_layers - without_ffn + widened),
        experts=one * config.num_experts * expert_layers,
        active_experts=one * config.top_k * expert_layers,
        embedding=config.vocab_size * config.d_model * (1 if config.tie_embeddings else 2),
        router=config.d_model * config.num_experts * expert_layers,
        norms=config.d_model * (2 * config.num_layers + third_norms + 1),
    )


def model_card(config: ModelConfig) -> str:
    """A Markdown table of the parameter counts, with the paper's for the sizes that it prints."""
    count = count_parameters(config)
    size = {(768, 12): "base", (2048, 24): "8b", (3072, 32): "34b"}.get((config.d_model, config.num_layers))
    theirs = PAPER.get(size or "", ("", "", ""))
    released = count_parameters(config.model_copy(update={"ffn": "released", "tie_embeddings": False}))
    rows = [
        ("total", _short(count.total), theirs[0], _short(released.total)),
        ("active, without embedding", _short(count.active), theirs[1], _short(released.active)),
        ("active, with embedding", _short(count.active + count.embedding), theirs[2], ""),
        ("in the state dict", f"{count.everything:,}", "", f"{released.everything:,}"),
    ]
    layers = f"{config.num_layers} layers of width {config.d_model}, feed-forward {config.d_ff}"
    experts = (
        f"{config.num_experts} experts, top-{config.top_k}, in every {config.moe_every}th layer"
        if config.layout == "moe"
        else f"no experts ({config.layout})"
    )
    head = ["| parameters | this model | paper | as the released code builds it |", "|---|---|---|---|"]
    table = [*head, *(f"| {' | '.join(row)} |" for row in rows)]
    return f"{layers}; {experts}; vocabulary {config.vocab_size}.\n\n" + "\n".join(table)


def count_on_meta(config: ModelConfig) -> int:
    """Parameters of the real module, built without memory."""
    from modules.openmoe.transformer import Decoder

    with torch.device("meta"):
        decoder = Decoder(config)
    return sum(parameter.numel() for parameter in decoder.parameters())


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)
