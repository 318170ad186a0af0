"""DeepSpeed under Lightning: ZeRO and expert parallelism, on GPUs and, over gloo, on CPUs.

Lightning has no notion of expert parallelism, and DeepSpeed knows only the experts of its own layer. This strategy
spreads the experts of any model (`orchestra.expert_parallel`), lets DeepSpeed shard states and reduce gradients, and
writes checkpoints that hold whole parameters (`orchestra.checkpoint_files`), so that a run may go on with another
number of processes, another `ep_size`, another ZeRO stage, or as a single process without DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning import strategies
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies.deepspeed import remove_module_hooks
from torch import nn

from orchestra import expert_parallel
from orchestra.checkpoint_files import read, write_parts
from orchestra.errors import UsageError

if TYPE_CHECKING:
    import pytorch_lightning as pl


class DeepSpeedStrategy(strategies.DeepSpeedStrategy):
    """Lightning's strategy with experts spread over processes and checkpoints that fit any layout.

    Args:
        ep_size: processes that share the experts of a layer; it must divide their number and that of the experts.
            1 keeps every expert in every process.
        options: arguments of `pytorch_lightning.strategies.DeepSpeedStrategy`, such as `stage` (ZeRO 0 to 3).

    Raises:
        UsageError: on `setup`, when the layout is impossible.
    """

    def __init__(self, ep_size: int = 1, **options: Any) -> None:
        self.ep_size = ep_size
        self.stage = int(options.get("stage", 2))
        super().__init__(**options)
        self._groups: Any = None

    @property
    def on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    # --- processes ---

    def setup_environment(self) -> None:
        if self.on_cpu:
            super(strategies.DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if self.world_size % self.ep_size:
            raise UsageError(f"trainer.strategy.ep_size={self.ep_size} does not divide the {self.world_size} processes")
        if not self.on_cpu:
            super().setup_distributed()
            return
        self._process_group_backend = "gloo"
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def _part(self) -> expert_parallel.Part:
        """Which part of every expert stack this process keeps."""
        return self.global_rank % self.ep_size, self.ep_size

    def _spread_experts(self) -> None:
        model = self.lightning_module
        assert model is not None
        already = any(hasattr(p, "total_experts") for p in model.parameters())
        if self.ep_size > 1 and not already:
            from orchestra.deepspeed_engine import expert_group

            expert_parallel.shard(model, *expert_group(self.ep_size))

    # --- engines ---

    def setup(self, trainer: pl.Trainer) -> None:
        self._spread_experts()
        super().setup(trainer)

    def _init_optimizers(self) -> Any:
        from orchestra.deepspeed_engine import ELEMENTWISE, Groups

        optimizer, schedule = super()._init_optimizers()
        kind = type(optimizer).__name__
        if self.stage > 0 and not isinstance(optimizer, ELEMENTWISE):
            raise UsageError(
                f"ZeRO cuts parameters into pieces, which {kind} cannot update one by one; "
                "set trainer.strategy.stage=0 or another optimizer"
            )
        if self.stage == 0 and self.precision_plugin.precision != "32-true":
            raise UsageError(
                f"ZeRO stage 0 keeps no float32 weights beside {self.precision_plugin.precision}; "
                "set trainer.strategy.stage=1 or trainer.precision=32-true"
            )
        self._groups = Groups(optimizer, schedule.scheduler if schedule is not None else None)
        return optimizer, schedule

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        from orchestra.deepspeed_engine import build_engine

        assert isinstance(self.config, dict)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine = build_engine(model, self.config, optimizer, lr_scheduler, trained)
        self._groups.rename(engine.optimizer)
        return engine, engine.optimizer

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        from orchestra.deepspeed_engine import build_engine

        assert isinstance(self.config, dict)
        remove_module_hooks(model)
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
        kept = ("fp16", "bf16", *(("zero_optimization", "zero_allow_untested_optimizer") if self.zero_stage_3 else ()))
        config |= {name: self.config[name] for name in kept if name in self.config}
        self.model = build_engine(model, config, None, None, [])

    # --- checkpoints ---

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # weights go into the module before DeepSpeed takes it, states into DeepSpeed's optimiser after

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # gathered in `save_checkpoint`, parameter by parameter

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write one file, or a directory when experts are spread. Every process must call this."""
        target = Path(self.broadcast(filepath))
        experts = self._gather(checkpoint)
        if self.ep_size == 1:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, target)
            self.barrier()
            return
        write_parts(
            target,
            shared=checkpoint if self.is_global_zero else None,
            experts=experts if self.global_rank < self.ep_size else None,  # the first group; the others hold copies
            part=self._part,
            barrier=self.barrier,
        )

    def _gather(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Put whole weights and states into `checkpoint`, but for spread experts, whose part is returned."""
        from orchestra.deepspeed_engine import full_parameter, full_state

        model = self.lightning_module
        assert model is not None
        keep_experts = self.global_rank < self.ep_size
        parts: dict[str, Any] = {"state_dict": {}, "optimizer_states": {}}
        weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        spread = expert_parallel.expert_parameters(model) if self.ep_size > 1 else {}
        for name, parameter in model.named_parameters():
            whole = full_parameter(parameter)
            if name in spread:
                del weights[name]
                if keep_experts:
                    parts["state_dict"][name] = whole
            elif self.is_global_zero:
                weights[name] = whole
        checkpoint["state_dict"] = weights
        if "optimizer_states" not in checkpoint:
            return parts
        ids = {id(parameter) for parameter in spread.values()}
        (optimizer,) = self.optimizers
        states: dict[int, Any] = {}
        for number, parameter in self._groups.parameters.items():
            state = full_state(optimizer, parameter)
            if id(parameter) in ids:
                if keep_experts:
                    parts["optimizer_states"][number] = state
            elif self.is_global_zero:
                states[number] = state
        checkpoint["optimizer_states"] = [{"state": states, "param_groups": self._groups.pack(optimizer)}]
        checkpoint["lr_schedulers"] = [self._groups.schedule_to_file(s) for s in checkpoint["lr_schedulers"]]
        return parts

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        names = expert_parallel.expert_parameters(self.lightning_module) if self.ep_size > 1 else {}
        return read(checkpoint_path, part=self._part, experts=names)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        self._spread_experts()
        self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        from orchestra.deepspeed_engine import load_masters, load_states

        (saved,) = checkpoint["optimizer_states"]
        (optimizer,) = self.optimizers
        self._groups.unpack(saved["param_groups"], optimizer)
        if self.stage > 0:
            assert self.lightning_module is not None
            load_masters(self.lightning_module, checkpoint["state_dict"])
        load_states(self.deepspeed_engine, saved["state"], self._groups.parameters)
        schedules = checkpoint["lr_schedulers"]
        schedules[:] = [self._groups.schedule_from_file(state) for state in schedules]
