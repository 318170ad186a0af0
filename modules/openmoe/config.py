"""What an OpenMoE experiment can be asked, stated completely and checked without importing torch.

`OpenMoEConfig` describes the arguments of `modules.openmoe.module.OpenMoE`; `ModelConfig` alone describes
the decoder. "Paper" below is the text of Xue et al. (ICML 2024); "released" is what the published
checkpoints do where it differs.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Settings(BaseModel):
    """Base of every settings block: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Settings):
    """The decoder (paper, section 2.1 and table 2). Defaults are the `tiny` size.

    Layer `i` (from 0) holds a Mixture of Experts when `(i + 1) % moe_every == 0`.
    """

    vocab_size: PositiveInt = 1408  # the embedding's rows: tokenizer and sentinels, rounded up to 128
    d_model: PositiveInt = 64
    d_ff: PositiveInt = 128
    num_heads: PositiveInt = 4
    head_dim: PositiveInt | None = None  # None: d_model / num_heads
    num_layers: PositiveInt = 4
    rope_base: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    attention_scale: PositiveFloat | None = None  # None: 1/sqrt(head_dim); released checkpoints need 1.0
    prefix_attention: Literal["causal", "bidirectional"] = "causal"
    tie_embeddings: bool = True  # the paper's table counts one embedding; released checkpoints have two
    ffn: Literal["swiglu", "released"] = "swiglu"  # released: doubly gated, four matrices
    residual: Literal["parallel", "sequential", "none"] = "parallel"  # the dense FFN beside the experts
    parallel_block: bool = False  # attention and FFN both read the layer's input (paper, section 4.5)
    dropout: Fraction = 0.0
    init: Literal["default", "jax"] = "default"  # jax: variance scaling 0.1 as in the training code
    router_init_std: PositiveFloat = 0.02

    layout: Literal["moe", "dense", "dense_matched"] = "moe"  # dense_matched: FFN widened by top_k * d_ff
    moe_every: PositiveInt = 2
    num_experts: PositiveInt = 8
    top_k: PositiveInt = 2
    renormalize: bool = False  # combine weights are raw probabilities in the paper (equation 2)
    capacity_factor: PositiveFloat | None = 1.25  # None: dropless
    eval_capacity_factor: PositiveFloat | None = 2.0
    capacity_rule: Literal["per_choice", "per_token", "port"] = "per_choice"
    min_capacity: PositiveInt = 4
    group: Literal["sequence", "batch"] | PositiveInt = "sequence"  # tokens that compete for capacity
    batch_priority: bool = False  # looks at the future: never for a decoder that generates
    router_jitter: Fraction = 0.0
    balance_scope: Literal["global", "group"] = "global"

    @property
    def attention_dim(self) -> int:
        """Width of queries, keys and values: heads times head size (not `d_model` in the 8b and 34b sizes)."""
        return self.num_heads * self.head_size

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    def is_moe_layer(self, index: int) -> bool:
        """Whether layer `index` (from 0) is where experts go."""
        return (index + 1) % self.moe_every == 0

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}; choose a divisor or set head_dim"
            )
        if self.head_size % 2:
            raise ValueError(f"head size {self.head_size} is odd; rotary positions pair its dimensions")
        if self.layout == "moe":
            if self.top_k > self.num_experts:
                raise ValueError(f"top_k={self.top_k} is more than num_experts={self.num_experts}")
            if self.moe_every > self.num_layers:
                raise ValueError(
                    f"moe_every={self.moe_every} is more than num_layers={self.num_layers}: no layer would have experts"
                )
        return self


class ObjectiveConfig(Settings):
    """What is predicted (paper, section 2.3): UL2's denoisers, every next token, or one then the other."""

    pretraining: Literal["causal", "ul2"] = "causal"
    switch_at: PositiveInt | None = None  # UL2 until here, causal after; None: never
    switch_unit: Literal["steps", "tokens"] = "steps"
    inputs_length: PositiveInt | None = None  # UL2 phase; None: half of the block
    targets_length: PositiveInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveConfig:
        if self.switch_at is not None and self.pretraining == "causal":
            raise ValueError("switch_at ends the UL2 phase; it needs pretraining=ul2")
        return self


class LossWeights(Settings):
    """Weights of the auxiliary losses (paper, table 12)."""

    load_balance: NonNegativeFloat = 0.01
    router_z: NonNegativeFloat = 1e-4
    z: NonNegativeFloat = 1e-3


class OptimizerConfig(Settings):
    """AdamW trains the tiny size well; the paper trains with Adafactor (section 4 of its appendix)."""

    name: Literal["adamw", "adafactor"] = "adamw"
    lr: PositiveFloat = 4e-3  # adafactor with inverse_sqrt: a multiplier of 1/sqrt(max(step, warmup_steps))
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegativeFloat = 0.0
    schedule: Literal["constant", "cosine", "inverse_sqrt"] = "cosine"
    warmup_steps: NonNegativeInt = 20
    min_lr_ratio: Share = 0.05  # cosine ends here, as a share of lr


class AnalysisConfig(Settings):
    """The routing analyses of the paper's section 4, run at test time."""

    layer: NonNegativeInt | None = None  # which MoE layer, counted from 0; None: the third, or the last if fewer
    min_occurrences: PositiveInt = 20  # token ids seen less often are left out (paper: 128)
    checkpoints: tuple[Share, ...] = (0.1, 0.3, 0.5, 0.75, 1.0)  # fractions of training, for early routing learning
    probe_blocks: PositiveInt = 64  # validation blocks routed at each of them


class OpenMoEConfig(Settings):
    """Arguments of `modules.openmoe.module.OpenMoE`."""

    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    loss: LossWeights = LossWeights()
    optimizer: OptimizerConfig = OptimizerConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    freeze_router_at: PositiveInt | None = None  # optimiser step from which the router is fixed (section 4.5)
    activation_checkpointing: bool = False
