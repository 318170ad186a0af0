"""DeepSpeed under Lightning, on GPUs and, for tests and small machines, on CPUs over gloo."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning import strategies
from pytorch_lightning.accelerators import CPUAccelerator


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
        import deepspeed

        engine, wrapped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(),  # no device rank: there is one CPU for all
            config=self.config,
            model=model,
            model_parameters=filter(lambda parameter: parameter.requires_grad, model.parameters()),
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped
