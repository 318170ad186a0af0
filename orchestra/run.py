"""One run: instantiate, track, fit, test, return the objective."""

from __future__ import annotations

import json
import logging
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

from orchestra import provenance, report, resume, validation
from orchestra.checkpoint_files import AtomicCheckpointIO, is_whole, newest_whole, read
from orchestra.checkpoints import Checkpoints
from orchestra.errors import Interrupted, UsageError
from orchestra.interrupts import INTERRUPTS
from orchestra.memory import keep_freed_memory
from orchestra.secrets import mask_mapping
from orchestra.tracking import MLflowTracker

log = logging.getLogger(__name__)


@dataclass
class Experiment:
    """Everything that a run instantiates from its config."""

    config: DictConfig
    directory: Path
    module: pl.LightningModule
    datamodule: pl.LightningDataModule
    trainer: pl.Trainer
    checkpoints: Checkpoints | None
    tracker: MLflowTracker | None
    resume_from: Path | None


def run(config: DictConfig) -> float | None:
    """Train and test what `config` describes, track it, and return the objective.

    Raises:
        UsageError: the config asks for something that cannot be done (nothing is left behind in that case).
        Interrupted: SIGTERM or Ctrl-C; a checkpoint has been written and the run is marked KILLED.
    """
    apply_debug(config)
    validation.check(config)
    directory = Path(config.output_dir)
    with INTERRUPTS.handled():
        try:
            experiment = build(config)
            if experiment.tracker is not None:
                experiment.tracker.start()
        except BaseException:
            _remove_if_unused(directory)
            raise
        return _tracked(experiment)


def build(config: DictConfig) -> Experiment:
    """Instantiate module, data, callbacks, tracker and trainer, and prepare the data. Starts nothing."""
    keep_freed_memory()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    pl.seed_everything(config.seed, workers=True, verbose=False)
    directory = Path(config.output_dir)
    resume_from = newest_whole(directory / "checkpoints") if config.resume is not None else None
    if config.checkpoint is not None and not is_whole(Path(config.checkpoint)):
        raise UsageError(f"checkpoint={config.checkpoint} is not a readable checkpoint file")
    datamodule = instantiate(config.datamodule, _convert_="all")
    module = instantiate(config.module, _convert_="all")
    datamodule.prepare_data()
    datamodule.setup("fit")
    callbacks = [instantiate(node, _convert_="all") for node in config.callbacks.values() if node is not None]
    tracker = _tracker(config, directory)
    # Lightning refuses callbacks that have nothing to do.
    idle: list[type[pl.Callback]] = [] if tracker is not None else [pl.callbacks.LearningRateMonitor]
    idle += [] if config.trainer.enable_progress_bar else [pl.callbacks.ProgressBar]
    callbacks = [callback for callback in callbacks if not isinstance(callback, tuple(idle))]
    trainer = instantiate(
        config.trainer,
        callbacks=callbacks,
        logger=tracker or False,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=str(directory),
        _convert_="all",
    )
    checkpoints = next((c for c in callbacks if isinstance(c, Checkpoints)), None)
    return Experiment(config, directory, module, datamodule, trainer, checkpoints, tracker, resume_from)


def apply_debug(config: DictConfig) -> None:
    """`debug=true`: one batch of training, validation and test through the same code as a real run."""
    if config.debug:
        with open_dict(config):
            config.trainer.max_steps = 1
            config.trainer.max_epochs = -1
            config.trainer.val_check_interval = 1
            config.trainer.accumulate_grad_batches = 1
            for stage in ("train", "val", "test"):
                config.trainer[f"limit_{stage}_batches"] = 1


def _tracker(config: DictConfig, directory: Path) -> MLflowTracker | None:
    if config.logger is None:
        return None
    record = directory / "tracking.json"
    continued = json.loads(record.read_text())["run_id"] if config.resume is not None and record.exists() else None
    tags = {
        "method": config.method,
        "variant": config.variant,
        "paper": config.paper.title,
        "scale": config.scale,
        "seed": str(config.seed),
        **config.tags,
    }
    tracker: MLflowTracker = instantiate(config.logger, run_id=continued, tags=tags, _convert_="all")
    return tracker


def _tracked(experiment: Experiment) -> float | None:
    """Fit and test under the tracker; the run's status tells how it ended."""
    tracker = experiment.tracker
    try:
        _record(experiment)
        objective, results = _fit_and_test(experiment)
    except Interrupted as signal:
        if tracker is not None:
            tracker.finish("KILLED")
        report.print_interrupted(experiment, signal)
        raise
    except BaseException:
        if tracker is not None:
            tracker.finish("FAILED", error=traceback.format_exc())
        raise
    if tracker is not None:
        tracker.finish("FINISHED")
    if experiment.trainer.is_global_zero:
        report.print_summary(experiment, objective, results)
    return objective


def _fit_and_test(experiment: Experiment) -> tuple[float | None, dict[str, float]]:
    config, trainer, module = experiment.config, experiment.trainer, experiment.module
    results: dict[str, float] = {}
    if config.checkpoint is not None:
        module.load_state_dict(read(config.checkpoint)["state_dict"])
    if config.train:
        if experiment.resume_from is not None:
            log.info("Resuming from %s", experiment.resume_from)
        trainer.fit(module, datamodule=experiment.datamodule, ckpt_path=experiment.resume_from, weights_only=True)
        results |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    if config.test:
        tested = trainer.test(
            module,
            datamodule=experiment.datamodule,
            ckpt_path=_tested_checkpoint(experiment),
            verbose=False,
            weights_only=True,
        )
        for metrics in tested:
            results |= metrics
    best = _best(experiment)
    if experiment.tracker is not None and best is not None and trainer.is_global_zero:
        experiment.tracker.log_artifact(best, "checkpoints")
    objective = results.get(config.objective.metric)
    if experiment.checkpoints is not None and experiment.checkpoints.best_score is not None:
        objective = experiment.checkpoints.best_score
    if experiment.tracker is not None and objective is not None:
        experiment.tracker.log_metrics({"objective": objective}, step=trainer.global_step)
    return objective, results


def _tested_checkpoint(experiment: Experiment) -> str | None:
    """The best checkpoint after training, the newest otherwise; None tests the weights as they are in memory."""
    if experiment.config.checkpoint is not None and not experiment.config.train:
        return str(experiment.config.checkpoint)
    best = _best(experiment)
    return str(best) if best is not None else None


def _best(experiment: Experiment) -> Path | None:
    if experiment.checkpoints is None:
        return None
    return experiment.checkpoints.best_path or experiment.checkpoints.last_path


def _record(experiment: Experiment) -> None:
    """What the run is made of, before it starts: config, parameters, code, packages, data, description."""
    if not experiment.trainer.is_global_zero:
        return
    config = experiment.config
    resolved: dict[str, Any] = mask_mapping(OmegaConf.to_container(config, resolve=True))
    experiment.directory.mkdir(parents=True, exist_ok=True)
    config_file = experiment.directory / resume.CONFIG_FILE
    config_file.write_text(OmegaConf.to_yaml(OmegaConf.create(resolved)))
    tracker = experiment.tracker
    if tracker is None:
        return
    tracker.log_parameters({k: v for k, v in resolved.items() if k not in ("paper", "output_dir", "notes", "tags")})
    tracker.log_artifact(config_file, "config")
    tracker.log_text(provenance.packages(), "environment/packages.txt")
    tracker.log_dict(provenance.machine(), "environment/machine.json")
    code = provenance.code()
    if code.dirty:
        tracker.log_text(code.diff, "code/uncommitted.diff")
    tracker.log_dataset(**report.dataset_facts(experiment.datamodule))
    tracker.set_description(report.description(experiment))


def _remove_if_unused(directory: Path) -> None:
    """Hydra has made the run's directory before we could say no; leave nothing half-written behind."""
    made_before_work = {".hydra", "train.log", "outbox.jsonl", "delivery.lock"}
    if directory.is_dir() and {path.name for path in directory.iterdir()} <= made_before_work:
        shutil.rmtree(directory)
        for parent in (directory.parent, directory.parent.parent):
            if any(parent.iterdir()):
                break
            parent.rmdir()
