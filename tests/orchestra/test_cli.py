"""What the command line answers: help, and one message with exit code 2 for everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from orchestra import cli, validation
from orchestra.config import CONFIG_DIR
from orchestra.errors import UsageError
from tests.conftest import ROOT

EXPERIMENT = "experiment=openmoe"


def refusal(*overrides: str) -> str:
    """The message for overrides that must be refused before any work."""
    with pytest.raises(UsageError) as caught:
        validation.check(cli.compose_config(list(overrides)))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "named", "offered"),
    [
        ("experiment=opnmoe", "experiment=opnmoe", "openmoe"),
        ("module=openmoe/dens", "module=openmoe/dens", "openmoe/dense"),
        ("trainer=cpuu", "trainer=cpuu", "cpu"),
        ("modul.d_model=3", "modul is not", "module"),
        ("module.model.d_modl=3", "module.model.d_modl", "d_model"),
        ("trainer.max_stps=3", "trainer.max_stps", "max_steps"),
        ("+datamodule.batchsize=3", "datamodule.batchsize=3", "batch_size"),
        ("+module.model.topk=3", "module.model.topk=3", "top_k"),
        ("module.model.d_model=abc", "module.model.d_model=abc", "integer"),
        ("module.optimizer.lr=-1", "module.optimizer.lr=-1", "greater than 0"),
        ("module.model.num_heads=5", "num_heads=5", "d_model=64"),
        ("module.model.top_k=9", "top_k=9", "num_experts=8"),
        ("module.model.capacity_factor=0", "module.model.capacity_factor=0", "greater than 0"),
        ("module.model.residual=both", "module.model.residual=both", "'parallel', 'sequential' or 'none'"),
        ("module.objective.switch_at=5", "switch_at", "pretraining=ul2"),
        ("datamodule.mixture={prse: 1}", "datamodule.mixture.prse", "'prose'"),
        ("+datamodule.mixture.prse=1", "'prse'", "technical"),
        ("datamodule.vocab_size=2048", "total_vocab=1408", "2432"),
        ("trainer.precision=fp4", "trainer.precision=fp4", "bf16-mixed"),
        ("trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0", "greater than 0"),
        ("objective.metric=loss", "objective.metric=loss", "match"),
        ("trainer.limit_val_batches=0", "objective.metric=val/nll", "needs validation"),
        ("train=false", "train=false", "checkpoint="),
        ("callbacks.checkpoints.keep=1", "callbacks.checkpoints.keep=1", "2"),
        ("trainer=null", "Config group override must be a string", ""),
        ("seed=[", "", "'['"),
    ],
)
def test_wrong_settings_are_named_with_what_is_allowed(override: str, named: str, offered: str) -> None:
    message = refusal(*([] if override.startswith("experiment") else [EXPERIMENT]), override)
    assert named in message and offered in message
    assert "Traceback" not in message and len(message) < 700


def test_several_mistakes_are_told_together() -> None:
    message = refusal(EXPERIMENT, "module.optimizer.lr=-1", "module.model.d_ff=0", "datamodule.batch_size=0")
    assert len(message.splitlines()) == 3


def test_no_experiment_says_so() -> None:
    assert "experiment=<name>" in refusal()


def test_a_swept_value_is_checked_before_the_first_run() -> None:
    runs = cli.single_runs([EXPERIMENT, "module.optimizer.lr=1e-3,-2", "seed=choice(1,2,3)"])
    assert len(runs) == 3 and all(EXPERIMENT in run for run in runs)
    with pytest.raises(UsageError, match="lr=-2"):
        for run in runs:
            validation.check(cli.compose_config(run))


@pytest.mark.parametrize("experiment", [path.stem for path in (CONFIG_DIR / "experiment").glob("*.yaml")])
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_experiment_composes_at_both_scales(experiment: str, scale: str) -> None:
    config = cli.compose_config([f"experiment={experiment}", f"scale={scale}"])
    validation.check(config)
    assert config.scale == scale and config.method == experiment


def test_every_variant_composes() -> None:
    for path in sorted((CONFIG_DIR / "module").glob("*/*.yaml")):
        config = cli.compose_config([f"experiment={path.parent.name}", f"module={path.parent.name}/{path.stem}"])
        validation.check(config)
        assert config.variant == path.stem and config.run_name == f"{path.parent.name}-{path.stem}-s0"


@pytest.mark.parametrize("arguments", [["--help"], [EXPERIMENT, "module.optimizer.lr=-1"]])
def test_help_and_mistakes_load_no_heavy_library(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "train.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "hydra" in imported and not imported & {"torch", "pytorch_lightning", "mlflow", "transformers", "numpy"}
    if arguments == ["--help"]:
        assert "openmoe                     Mixture-of-Experts language model" in done.stdout


def test_a_mistake_exits_with_two_without_traceback_or_leftovers(train: Any, tmp_path: Path) -> None:
    done = train("module.optimizer.lr=-1")
    assert done.returncode == 2
    assert done.stderr == "error: module.optimizer.lr=-1: input should be greater than 0\n"
    assert not list(tmp_path.iterdir())


def test_data_that_do_not_fit_are_told_without_leftovers(train: Any, tmp_path: Path) -> None:
    done = train("datamodule.block_length=100000000")
    assert done.returncode == 2
    assert done.stderr.startswith("error: datamodule.block_length=100000000 is longer than all of 'prose'")
    assert not list(tmp_path.iterdir())


def test_config_files_hold_no_unchecked_keys() -> None:
    """What a settings class allows and what its config file lists are the same keys."""
    config = cli.compose_config([EXPERIMENT])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for node in (plain["datamodule"], plain["trainer"]):
        settings = validation.settings_class(node["_target_"])
        assert settings is not None
        assert set(node) - {"_target_"} == set(settings.model_fields)
