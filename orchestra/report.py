"""What a person reads about a run: its description in MLflow and the summary in the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from rich.console import Console

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
    """The end of a run: the objective, where things are, and the commands to go on with, each on one line."""
    config, checkpoints, tracker = experiment.config, experiment.checkpoints, experiment.tracker
    best = f"  (best, at step {checkpoints.best_step})" if checkpoints and checkpoints.best_step is not None else ""
    lines = [("objective", f"{config.objective.metric} = {_number(objective)}{best}")]
    # The plain quantities; those of single domains or groups are in MLflow.
    plain = [name for name in sorted(results) if name.startswith("test/") and "_" not in name]
    lines += [("", f"{name} = {_number(results[name])}") for name in plain]
    checkpoint = (checkpoints.best_path or checkpoints.last_path) if checkpoints else None
    if checkpoint:
        lines.append(("checkpoint", str(_relative(checkpoint))))
    lines.append(("directory", str(_relative(experiment.directory))))
    if tracker is not None:
        lines.append(("MLflow run", f"{tracker.run_id}  ({config.experiment_name} / {config.run_name})"))
        lines += [("see it", text) for text in (tracker.ui_command, tracker.ui_address) if text]
    run = tracker.run_id if tracker is not None else _relative(experiment.directory)
    lines.append(("train longer", f"python train.py resume={run} trainer.max_steps=<more>"))
    command = _overrides()
    if checkpoint:
        lines.append(("test again", f"python train.py {command} train=false checkpoint={_relative(checkpoint)}"))
    lines.append(("more seeds", f"python train.py -m {command} seed=0,1,2"))
    console = Console(highlight=False, soft_wrap=True)
    console.rule(f"[bold]{config.run_name}", align="left")
    for label, text in lines:
        console.print(f"[bold]{label:<14}[/]", end="")
        console.print(text, markup=False)


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
