"""Resuming from any checkpoint ends where the uninterrupted run ends: weights, optimiser, metrics, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules.resumable import ResumableDataModule, shuffled
from orchestra.checkpoint_files import AtomicCheckpointIO, step_checkpoints
from orchestra.checkpoints import Checkpoints
from orchestra.errors import Interrupted
from orchestra.interrupts import INTERRUPTS

BATCHES = 7


class Recorder(Logger):
    """Keeps every logged point."""

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[tuple[str, int], float] = {}
        self.repeated: list[tuple[str, int]] = []

    name = "recorder"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for key, value in metrics.items():
            if key != "epoch":
                assert step is not None
                if (key, step) in self.points:
                    self.repeated.append((key, step))
                self.points[key, step] = float(value)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...


class Data(ResumableDataModule):
    def __init__(self, num_workers: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(4 * BATCHES, 3, generator=generator)
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        data = TensorDataset(self.x)
        return self.resumable_loader(
            data, shuffled(len(data), seed=1), batch_size=4, seed=1, num_workers=self.num_workers
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(self.x[:8]), batch_size=4)


class Noisy(pl.LightningModule):
    """Regression whose steps draw random numbers, so that a lost random state shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = ((self.net(x) - x + 0.1 * torch.randn_like(x)) ** 2).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        (x,) = batch
        self.log("val/mse", ((self.net(x) - x) ** 2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    directory: Path,
    settings: dict[str, Any],
    resume_from: Path | None = None,
    workers: int = 0,
    callbacks: list[pl.Callback] | None = None,
    first_points: Recorder | None = None,
) -> Any:
    pl.seed_everything(0 if resume_from is None else 99, verbose=False)  # a resumed run must not depend on its seed
    recorder = first_points or Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=recorder,
        callbacks=[
            *(callbacks or []),
            Checkpoints(str(directory), "val/mse", "minimize", every_n_steps=1, keep=1000),
        ],
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )
    model = Noisy()
    trainer.fit(model, datamodule=Data(workers), ckpt_path=resume_from, weights_only=True)
    return model, recorder, trainer


SETTINGS = {
    "epochs, validation in the middle": {"max_epochs": 3, "val_check_interval": 3},
    "epochs, validation at their end": {"max_epochs": 3},
    "steps, validation across epochs": {"max_steps": 17, "val_check_interval": 5, "check_val_every_n_epoch": None},
    "accumulation": {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_every_checkpoint_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = SETTINGS[name]
    model, recorder, trainer = fit(tmp_path / "whole", settings)
    checkpoints = step_checkpoints(tmp_path / "whole")
    assert len(checkpoints) == trainer.global_step
    for checkpoint in checkpoints:
        again, points, resumed = fit(tmp_path / checkpoint.stem, settings, resume_from=checkpoint)
        assert resumed.global_step == trainer.global_step
        assert not points.repeated
        for key, value in points.points.items():
            assert recorder.points[key] == value, (checkpoint.name, key)
        done = int(checkpoint.stem.removeprefix("step-"))
        expected = {key for key in recorder.points if key[1] >= done}
        assert expected <= points.points.keys(), (checkpoint.name, sorted(expected - points.points.keys()))
        for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs), checkpoint.name
        mine, other = resumed.optimizers[0].state_dict()["state"], trainer.optimizers[0].state_dict()["state"]
        assert all(torch.equal(mine[i][k], other[i][k]) for i in other for k in other[i])


@pytest.mark.filterwarnings("ignore")
def test_a_finished_run_continues_as_if_it_had_been_longer(tmp_path: Path) -> None:
    common = {"val_check_interval": 5, "check_val_every_n_epoch": None}
    whole, recorder, _ = fit(tmp_path / "whole", {"max_steps": 17, **common})
    fit(tmp_path / "short", {"max_steps": 10, **common})
    newest = step_checkpoints(tmp_path / "short")[0]
    longer, points, _ = fit(tmp_path / "longer", {"max_steps": 17, **common}, resume_from=newest)
    assert {k: v for k, v in recorder.points.items() if k[1] >= 10} == points.points
    assert all(torch.equal(a, b) for a, b in zip(longer.parameters(), whole.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_workers_that_fetch_ahead_do_not_lose_batches(tmp_path: Path) -> None:
    settings = SETTINGS["steps, validation across epochs"]
    whole, _, _ = fit(tmp_path / "whole", settings, workers=1)
    checkpoint = step_checkpoints(tmp_path / "whole")[6]
    again, _, _ = fit(tmp_path / "again", settings, resume_from=checkpoint, workers=1)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


class InterruptedWhileValidating(pl.Callback):
    """Sends the process SIGTERM in the middle of the second validation."""

    def __init__(self) -> None:
        self.validations = 0

    def on_validation_start(self, *_: Any) -> None:
        self.validations += 1

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.validations == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore")
def test_sigterm_during_validation_loses_nothing(tmp_path: Path) -> None:
    settings = SETTINGS["steps, validation across epochs"]
    whole, recorder, _ = fit(tmp_path / "whole", settings)
    with INTERRUPTS.handled(), pytest.raises(Interrupted) as caught:
        fit(tmp_path / "cut", settings, callbacks=[InterruptedWhileValidating()], first_points=(first := Recorder()))
    assert caught.value.exit_code == 128 + signal.SIGTERM
    newest = step_checkpoints(tmp_path / "cut")[0]
    assert newest.name == "step-000000010.ckpt"
    again, points, _ = fit(tmp_path / "again", settings, resume_from=newest)
    assert first.points | points.points == recorder.points
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))
