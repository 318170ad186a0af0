"""When checkpoints are taken, and how training goes on from one bit for bit.

Resumable checkpoints are taken between two training steps, after any validation that the earlier step was due, so
that nothing is half-done in them. Their loop counters therefore say "everything that was started is completed",
which is the one state from which Lightning's loops continue without repeating or skipping anything.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Literal

import pytorch_lightning as pl

from orchestra import random_state
from orchestra.checkpoint_files import BEST, step_checkpoints
from orchestra.errors import Interrupted, UsageError
from orchestra.interrupts import INTERRUPTS
from orchestra.resume import other_batch


class Checkpoints(pl.callbacks.Checkpoint):
    """Keeps the newest resumable checkpoints and the best by the objective; answers SIGTERM and Ctrl-C.

    Args:
        directory: where the files go: `step-<optimiser steps>.ckpt` and `best.ckpt`.
        metric: objective, `<stage>/<name>`. Only a `val/` metric selects a best checkpoint.
        direction: `minimize` or `maximize`.
        every_n_steps: optimiser steps between resumable checkpoints.
        keep: how many of the newest stay (at least 2, so that a torn one has a predecessor).
    """

    def __init__(
        self,
        directory: str,
        metric: str,
        direction: Literal["minimize", "maximize"],
        every_n_steps: int = 100,
        keep: int = 2,
    ) -> None:
        self.directory = Path(directory)
        self.metric = metric
        self.sign = 1.0 if direction == "minimize" else -1.0
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._last_saved = -1
        self._restored: dict[str, Any] | None = None
        self._before_validation: list[dict[str, Any]] = []

    @property
    def best_path(self) -> Path | None:
        path = self.directory / BEST
        return path if self.best_score is not None and path.exists() else None

    @property
    def last_path(self) -> Path | None:
        """The newest resumable checkpoint, whole or not."""
        found = step_checkpoints(self.directory)
        return found[0] if found else None

    # --- state ---

    @property
    def state_key(self) -> str:
        return "orchestra.Checkpoints"

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score = state_dict["best_score"]
        self.best_step = state_dict["best_step"]

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        loop = trainer.fit_loop.epoch_loop
        _settle_counters(checkpoint["loops"]["fit_loop"], trainer.fit_loop)
        checkpoint["orchestra"] = {
            "random_state": self._before_validation if trainer.validating else random_state.collect(),
            "logged_steps": loop._batches_that_stepped,
            "validation_pending": trainer.validating,
            "samples_per_batch": _samples_per_batch(trainer),
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            self._restored = checkpoint.get("orchestra")
            self._last_saved = checkpoint["global_step"]

    # --- when ---

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        INTERRUPTS.install()  # Lightning has just put its own SIGTERM handler: exactly one may act
        INTERRUPTS.defer(True)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._restored is not None:
            self._restore(trainer)
        interrupted = _anywhere(trainer, INTERRUPTS.received is not None)
        accumulating = trainer.fit_loop.epoch_loop.batch_progress.current.completed % trainer.accumulate_grad_batches
        due = trainer.global_step > 0 and trainer.global_step % self.every_n_steps == 0
        if (due or interrupted) and not accumulating:
            self._save_resumable(trainer)
        if interrupted and not accumulating:
            raise Interrupted(INTERRUPTS.received or 15)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # A validation that is interrupted runs again from its start, and even its data loaders draw random numbers.
        fetcher = trainer.fit_loop._data_fetcher
        if fetcher is not None and trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher):
            self._before_validation = random_state.collect()

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.fn == "fit" and _anywhere(trainer, INTERRUPTS.received is not None):
            self._save_resumable(trainer)
            raise Interrupted(INTERRUPTS.received or 15)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking or self.metric not in trainer.callback_metrics:
            return
        score = float(trainer.callback_metrics[self.metric])
        better = self.best_score is None or self.sign * score < self.sign * self.best_score
        if better and not math.isnan(score):
            self.best_score, self.best_step = score, trainer.global_step
            trainer.save_checkpoint(self.directory / BEST, weights_only=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_resumable(trainer)
        INTERRUPTS.defer(False)
        if INTERRUPTS.received is not None:
            raise Interrupted(INTERRUPTS.received)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        INTERRUPTS.defer(False)

    # --- how ---

    def _save_resumable(self, trainer: pl.Trainer) -> None:
        if trainer.global_step == self._last_saved and not trainer.validating:
            return
        trainer.save_checkpoint(self.directory / f"step-{trainer.global_step:09d}.ckpt", weights_only=False)
        self._last_saved = trainer.global_step
        if trainer.is_global_zero:
            for old in step_checkpoints(self.directory)[max(self.keep, 2) :]:
                shutil.rmtree(old) if old.is_dir() else old.unlink()  # DeepSpeed's are directories

    def _restore(self, trainer: pl.Trainer) -> None:
        """Finish what the checkpoint left to do. Runs after Lightning's loops have restarted, before the first step."""
        restored, self._restored = self._restored, None
        assert restored is not None
        before, now = restored["samples_per_batch"], _samples_per_batch(trainer)
        if before is not None and now is not None and before != now:
            raise UsageError(other_batch(before, trainer.world_size, now // trainer.world_size))
        loop = trainer.fit_loop.epoch_loop
        # Lightning infers these from the loop counters, and is one off for some of the moments at which we save.
        loop._batches_that_stepped = restored["logged_steps"]
        random_state.restore(restored["random_state"])
        if restored["validation_pending"]:
            connector = trainer._logger_connector
            first_iteration = connector._first_loop_iter
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
            connector._first_loop_iter = first_iteration
            loop.update_lr_schedulers("step", update_plateau_schedulers=True)
            loop._batches_that_stepped += 1


def _samples_per_batch(trainer: pl.Trainer) -> int | None:
    """Samples of one training batch over all processes, where the loader tells."""
    size = getattr(trainer.train_dataloader, "batch_size", None)
    return None if size is None else size * trainer.world_size


def _anywhere(trainer: pl.Trainer, flag: bool) -> bool:
    """Whether `flag` is set in any process, so that all of them leave the loop at the same step."""
    return trainer.strategy.reduce_boolean_decision(flag, all=False) if trainer.world_size > 1 else flag


def _settle_counters(saved: dict[str, Any], fit_loop: Any) -> None:
    """Make the counters say that each batch that was begun is completed (see the module's docstring)."""
    batches = saved["epoch_loop.batch_progress"]
    for scope in ("total", "current"):
        done = batches[scope]["completed"]
        batches[scope] |= {"ready": done, "started": done, "processed": done}
    batches["is_last_batch"] = batches["current"]["completed"] >= fit_loop.max_batches  # not of the batch just fetched
    epochs = saved["epoch_progress"]
    if epochs["current"]["completed"] == epochs["current"]["started"] > 0:  # training has ended
        if batches["current"]["completed"] < fit_loop.max_batches:
            # Cut short by max_steps or max_time. Lightning counts the epoch as done; a longer run would finish it.
            for scope in ("total", "current"):
                epochs[scope]["processed"] -= 1
                epochs[scope]["completed"] -= 1
        else:
            batches["current"] |= {"ready": 0, "started": 0, "processed": 0, "completed": 0}
