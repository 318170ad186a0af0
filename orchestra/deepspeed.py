"""DeepSpeed under Lightning, on GPUs and, for tests and small machines, on CPUs over gloo."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning import strategies
from pytorch_lightning.accelerators import CPUAccelerator
from pytorch_lightning.strategies.deepspeed import remove_module_hooks


class DeepSpeedStrategy(strategies.DeepSpeedStrategy):
    """Lightning's strategy without its insistence on a CUDA device for every process.

    Takes the arguments of `pytorch_lightning.strategies.DeepSpeedStrategy`. On CPUs the processes talk over gloo.
    """

    @property
    def on_cpu(self) -> bool:
        return isinstance(self.accelerator, CPUAccelerator)

    def setup_environment(self) -> None:
        if self.on_cpu:
            super(strategies.DeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        if not self.on_cpu:
            super().setup_distributed()
            return
        self._process_group_backend = "gloo"
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: torch.nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        if not self.on_cpu:
            return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return self._engine_on_cpu(model, self.config, trained, optimizer, lr_scheduler)

    def _initialize_deepspeed_inference(self, model: torch.nn.Module) -> None:
        if not self.on_cpu:
            super()._initialize_deepspeed_inference(model)
            return
        assert isinstance(self.config, dict)
        remove_module_hooks(model)
        config = {"train_micro_batch_size_per_gpu": 1}
        config |= {name: self.config[name] for name in ("fp16", "bf16") if name in self.config}
        self.model, _ = self._engine_on_cpu(model, config, [], None, None)

    def _engine_on_cpu(self, model: torch.nn.Module, config: Any, trained: Any, optimizer: Any, schedule: Any) -> Any:
        """Lightning names a device index to DeepSpeed, which a CPU does not have."""
        import deepspeed

        engine, wrapped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(),
            config=config,
            model=model,
            model_parameters=trained,
            optimizer=optimizer,
            lr_scheduler=schedule,
            dist_init_required=False,
        )
        return engine, wrapped
