"""Figures and tables of an experiment: saved in the run's directory and shown in MLflow. The base that methods use."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytorch_lightning as pl
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct for colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

_STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """The look that all figures share."""
    import matplotlib
    from cycler import cycler

    with matplotlib.rc_context(_STYLE | {"axes.prop_cycle": cycler(color=COLOURS)}):
        yield


def save_figure(owner: pl.LightningModule, name: str, figure: Figure) -> None:
    """Write `figures/<name>.png` in the run's directory and log it; on the first process only."""
    if _first_process(owner):
        path = _path(owner, "figures", f"{name}.png")
        figure.savefig(path)
        _log(owner, path, "figures", name)


def save_table(owner: pl.LightningModule, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `tables/<name>.csv`, with the first row's keys as its header, and log it; on the first process only."""
    if _first_process(owner) and rows:
        path = _path(owner, "tables", f"{name}.csv")
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        _log(owner, path, "tables", name)


def _first_process(owner: pl.LightningModule) -> bool:
    return owner.trainer.is_global_zero


def _path(owner: pl.LightningModule, kind: str, file: str) -> Path:
    path = Path(owner.trainer.default_root_dir) / kind / file
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _log(owner: pl.LightningModule, path: Path, kind: str, name: str) -> None:
    folder = str(Path(kind, name).parent)
    for logger in owner.loggers:
        if hasattr(logger, "log_artifact"):
            logger.log_artifact(path, folder)
