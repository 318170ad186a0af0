"""What every run can be asked, whatever the method: the top-level keys and the trainer's, checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
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

ROOT = Path(__file__).resolve().parent.parent
CONFIG_DIR = ROOT / "conf"
CONFIG_NAME = "train"

SCALES = ("small", "paper")


def register_resolvers() -> None:
    """Make `${by_scale:${scale},<small>,<paper>}` and `${variant_of:<module option>}` available in config files."""
    OmegaConf.register_new_resolver("by_scale", _by_scale, replace=True)
    OmegaConf.register_new_resolver("variant_of", lambda option: str(option).rpartition("/")[2], replace=True)


def _by_scale(scale: str, small: Any, paper: Any) -> Any:
    return {"small": small, "paper": paper}[scale]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Objective(Section):
    """The one number an experiment is about."""

    metric: Annotated[str, Field(pattern=r"^(train|val|test)/\S+$")]
    direction: Literal["minimize", "maximize"]


class Paper(Section):
    title: str
    authors: str
    venue: str
    url: str


Limit = Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0.0, le=1.0)] | None


class TrainerConfig(Section):
    """Arguments of `pytorch_lightning.Trainer` that configs may set. `strategy` may also be a `_target_` node."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"]
    devices: Literal["auto"] | PositiveInt | list[NonNegativeInt]
    num_nodes: PositiveInt
    strategy: str | dict[str, Any]
    precision: Literal[
        "32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "transformer-engine", "32", "64"
    ]
    max_epochs: Annotated[int, Field(ge=-1)] | None
    min_epochs: NonNegativeInt | None
    max_steps: Annotated[int, Field(ge=-1)]
    min_steps: NonNegativeInt | None
    max_time: str | None
    limit_train_batches: Limit
    limit_val_batches: Limit
    limit_test_batches: Limit
    val_check_interval: PositiveInt | Annotated[float, Field(gt=0.0, le=1.0)] | None
    check_val_every_n_epoch: PositiveInt | None
    num_sanity_val_steps: Annotated[int, Field(ge=-1)]
    accumulate_grad_batches: PositiveInt
    gradient_clip_val: PositiveFloat | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
    log_every_n_steps: PositiveInt
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    detect_anomaly: bool
    profiler: Literal["simple", "advanced", "pytorch"] | None
    sync_batchnorm: bool
    enable_progress_bar: bool
    enable_model_summary: bool
    use_distributed_sampler: bool

    @property
    def world_size(self) -> int | None:
        """Number of processes; None where it is only known on the machine that runs them."""
        devices = len(self.devices) if isinstance(self.devices, list) else self.devices
        return None if devices == "auto" else int(devices) * self.num_nodes

    @model_validator(mode="after")
    def _consistent(self) -> TrainerConfig:
        ep_size = self.strategy.get("ep_size", 1) if isinstance(self.strategy, dict) else 1
        if self.world_size is not None and isinstance(ep_size, int) and self.world_size % max(ep_size, 1):
            raise ValueError(
                f"strategy.ep_size={ep_size} does not divide the {self.world_size} processes "
                f"(devices={self.devices} on num_nodes={self.num_nodes})"
            )
        return self


class DeepSpeedStrategyConfig(Section):
    """Arguments of `orchestra.deepspeed.DeepSpeedStrategy` that configs may set; see DeepSpeed's documentation."""

    stage: Annotated[int, Field(ge=0, le=3)] = 1
    ep_size: PositiveInt = 1
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_optimizer_device: Literal["cpu", "nvme"] = "cpu"
    offload_params_device: Literal["cpu", "nvme"] = "cpu"
    nvme_path: str = "/local_nvme"
    pin_memory: bool = False
    overlap_comm: bool = True
    contiguous_gradients: bool = True
    allgather_bucket_size: PositiveInt = 200_000_000
    reduce_bucket_size: PositiveInt = 200_000_000
    sub_group_size: PositiveInt = 1_000_000_000_000
    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    loss_scale: NonNegativeFloat = 0.0
    initial_scale_power: PositiveInt = 16
    loss_scale_window: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    min_loss_scale: PositiveInt = 1
    timeout: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> DeepSpeedStrategyConfig:
        if self.stage == 3 and self.ep_size > 1:
            raise ValueError(
                f"stage=3 with ep_size={self.ep_size}: DeepSpeed cannot cut the weights of spread experts; "
                "use stage 0, 1 or 2, or ep_size=1"
            )
        if self.stage < 3 and self.offload_parameters:
            raise ValueError(f"offload_parameters needs stage=3, not {self.stage}")
        if self.stage == 0 and self.offload_optimizer:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3, not 0")
        return self


class CheckpointsConfig(Section):
    """Arguments of `orchestra.checkpoints.Checkpoints`."""

    directory: str
    metric: str
    direction: Literal["minimize", "maximize"]
    every_n_steps: PositiveInt = 100
    keep: Annotated[int, Field(ge=2)] = 2


class MLflowTrackerConfig(Section):
    """Arguments of `orchestra.tracking.MLflowTracker` that configs set."""

    experiment: str
    run_name: str
    directory: str
    tracking_uri: str | None = None
    parent_run_id: str | None = None
    system_metrics_interval: PositiveFloat | None = 10.0
    flush_interval: PositiveFloat = 1.0
    drain_timeout: PositiveFloat = 30.0


class ProgressBarConfig(Section):
    """`orchestra.progress.ProgressBar` takes no arguments."""


class RunConfig(Section):
    """The top level of a composed config. Nodes with a `_target_` are checked against their own description."""

    method: str
    summary: str
    paper: Paper
    variant: str
    experiment_name: str
    run_name: Annotated[str, Field(min_length=1, pattern=r"^\S+$")]
    scale: Literal["small", "paper"]
    seed: NonNegativeInt
    objective: Objective
    train: bool
    test: bool
    debug: bool
    checkpoint: str | None
    resume: str | None
    threads: PositiveInt | None
    output_dir: str
    tags: dict[str, str]
    notes: str | None
    module: dict[str, Any]
    datamodule: dict[str, Any]
    trainer: dict[str, Any]
    callbacks: dict[str, Any]
    logger: dict[str, Any] | None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if not self.train and self.checkpoint is None and self.resume is None:
            raise ValueError("train=false tests a trained model; say which one with checkpoint=<path> or resume=<run>")
        return self
