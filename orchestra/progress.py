"""The progress bar: one line per epoch, without the logger's version number."""

from __future__ import annotations

import sys
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Refreshes ten times a second on a terminal; in a log file it writes a line now and then."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=1 if sys.stderr.isatty() else 50)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics
