"""What a person reads about a run: its description in MLflow and the summary in the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from orchestra import provenance

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from orchestra.errors import Interrupted
    from orchestra.run import Experiment


def dataset_facts(datamodule: pl.LightningDataModule) -> dict[str, Any]:
    """What the tracker records about the data: DataModules say it in `name`, `digest`, `source` and `sizes`."""
    return {
        "name": getattr(datamodule, "name", type(datamodule).__name__),
        "digest": getattr(datamodule, "digest", "")[:36],
        "source": getattr(datamodule, "source", "unknown"),
        "context": "training",
        "profile": getattr(datamodule, "sizes", {}),
    }


def description(experiment: Experiment) -> str:
    """The run's Markdown description: what was asked, of which method and data, and how to repeat it."""
    config = experiment.config
    paper = config.paper
    lines = [
        f"## {config.summary}",
        f"Method `{config.method}`, variant `{config.variant}`, scale `{config.scale}`, seed {config.seed}.",
        "",
        f"*{paper.title}*, {paper.authors}, {paper.venue}, <{paper.url}>",
        "",
        "```",
        provenance.command_line(),
        "```",
        f"Objective: `{config.objective.metric}` ({config.objective.direction}).",
        "",
    ]
    if config.notes:
        lines += ["### Notes", config.notes, ""]
    for title, owner in (("Model", experiment.module), ("Data", experiment.datamodule)):
        describe = getattr(owner, "describe", None)
        if describe is not None:
            lines += [f"### {title}", describe(), ""]
    return "\n".join(lines)


def print_summary(experiment: Experiment, objective: float | None, results: dict[str, float]) -> None:
    """The end of a run: the objective, where things are, and the commands to go on with."""
    config = experiment.config
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    best = experiment.checkpoints.best_step if experiment.checkpoints else None
    at = f"  (best, at step {best})" if best is not None else ""
    rows.add_row("objective", f"{config.objective.metric} = {_number(objective)}{at}")
    for name in sorted(results):
        if name.startswith("test/") and name.count("_") == 0:
            rows.add_row("", f"{name} = {_number(results[name])}")
    checkpoint = experiment.checkpoints and (experiment.checkpoints.best_path or experiment.checkpoints.last_path)
    rows.add_row("checkpoint", str(_relative(checkpoint)) if checkpoint else "none")
    rows.add_row("directory", str(_relative(experiment.directory)))
    if experiment.tracker is not None:
        rows.add_row("MLflow run", f"{experiment.tracker.run_id}  ({config.experiment_name} / {config.run_name})")
        rows.add_row("see it", experiment.tracker.ui_command)
        rows.add_row("resume, longer", f"python train.py resume={experiment.tracker.run_id} trainer.max_steps=<more>")
    command = _overrides()
    if checkpoint:
        rows.add_row("test again", f"python train.py {command} train=false checkpoint={_relative(checkpoint)}")
    rows.add_row("sweep", f"python train.py -m {command} seed=0,1,2")
    Console(stderr=False, highlight=False, soft_wrap=True).print(
        Panel(rows, title=f"{config.run_name}", title_align="left", expand=False)
    )


def print_interrupted(experiment: Experiment, signal: Interrupted) -> None:
    """Where an interrupted run stands and how it goes on."""
    if not experiment.trainer.is_global_zero:
        return
    last = experiment.checkpoints.last_path if experiment.checkpoints else None
    state = f"Checkpoint: {_relative(last)}" if last else "No checkpoint had been written yet."
    run = experiment.tracker.run_id if experiment.tracker else experiment.directory
    how = f"Continue with: python train.py resume={run}" if last else "Start it again with the same command."
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"Interrupted. {state}\n{how}")


def _overrides() -> str:
    """The overrides of this run, without those that only concern this start of it."""
    overrides = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    own = ("resume=", "train=", "checkpoint=", "hydra.")
    return shlex.join([o for o in overrides if not o.startswith(own)])


def _relative(path: Any) -> Any:

    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.5g}"
