"""Every option of the method through the real machinery: composed, trained for some steps, validated and tested."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.openmoe.module import OpenMoE
from orchestra import cli
from orchestra.run import run
from tests.conftest import SMALL


def trained(tmp_path: Path, *overrides: str) -> tuple[float | None, dict[str, Any]]:
    """Objective and newest checkpoint of a short run."""
    config = cli.compose_config([*SMALL, "logger=none", "trainer.enable_progress_bar=false", *overrides])
    config.output_dir = str(tmp_path)
    config.callbacks.checkpoints.directory = str(tmp_path / "checkpoints")
    objective = run(config)
    newest = max((tmp_path / "checkpoints").glob("step-*.ckpt"))
    return objective, torch.load(newest, weights_only=True)


@pytest.mark.parametrize(
    "overrides",
    [
        ["module=openmoe/dense"],
        ["module=openmoe/dense_matched"],
        ["module=openmoe/released"],
        ["module.objective.pretraining=ul2", "module.objective.switch_at=6"],
        ["module.objective.pretraining=ul2", "module.model.prefix_attention=bidirectional"],
        ["module.optimizer.name=adafactor", "module.optimizer.schedule=inverse_sqrt", "module.optimizer.lr=0.1"],
        ["module.model.parallel_block=true", "module.model.group=batch", "module.model.balance_scope=group"],
        ["module.activation_checkpointing=true", "trainer.precision=bf16-mixed"],
        ["datamodule.packing=concatenate", "trainer.accumulate_grad_batches=2"],
        ["+datamodule.warmup_mixture={prose: 0.5, conversation: 0.5}", "datamodule.warmup_blocks=16"],
    ],
    ids=lambda overrides: overrides[0],
)
@pytest.mark.filterwarnings("ignore")
def test_options_train_validate_and_test(overrides: list[str], tmp_path: Path) -> None:
    objective, checkpoint = trained(tmp_path, *overrides)
    assert objective is not None and math.isfinite(objective) and objective < math.log(640) + 0.5
    assert checkpoint["global_step"] == 12
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_router_stays_as_it_was(tmp_path: Path) -> None:
    _, early = trained(tmp_path / "early", "trainer.max_steps=6", "module.optimizer.schedule=constant")
    options = ["module.optimizer.schedule=constant", "module.freeze_router_at=6"]
    _, late = trained(tmp_path / "late", *options)
    routers = [name for name in late["state_dict"] if "router" in name]
    others = [name for name in late["state_dict"] if "experts" in name]
    assert routers and all(torch.equal(early["state_dict"][n], late["state_dict"][n]) for n in routers)
    assert not any(torch.equal(early["state_dict"][n], late["state_dict"][n]) for n in others)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_loads_without_config_and_writes_text(tmp_path: Path) -> None:
    trained(tmp_path)
    model = OpenMoE.load_from_checkpoint(tmp_path / "checkpoints" / "best.ckpt", map_location="cpu", weights_only=True)
    generator = torch.Generator().manual_seed(0)
    text = model.complete("In the beginning", max_new_tokens=20, generator=generator)
    assert isinstance(text, str) and text
    assert model.config.model.d_model == 16
    assert set(model.routing_tables) <= {"0.1", "0.3", "0.5", "0.75", "1.0"} and model.routing_tables


@pytest.mark.filterwarnings("ignore")
def test_training_starts_from_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    first, _ = trained(tmp_path / "first")
    options = [
        f"checkpoint={tmp_path}/first/checkpoints/best.ckpt",
        "trainer.max_steps=2",
        "trainer.val_check_interval=1",
    ]
    second, _ = trained(tmp_path / "second", *options)
    assert first is not None and second is not None and second < first + 0.2
