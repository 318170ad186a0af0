from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Two cores are shared by the suite's own processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Small data, small model, few steps: seconds of training.
SMALL = [
    "experiment=openmoe",
    "datamodule.max_bytes=150000",
    "datamodule.max_eval_bytes=20000",
    "datamodule.vocab_size=300",
    "datamodule.total_vocab=640",
    "datamodule.block_length=32",
    "datamodule.batch_size=4",
    "datamodule.val_blocks=6",
    "datamodule.test_blocks=3",
    "module.model.d_model=16",
    "module.model.d_ff=16",
    "module.model.num_layers=2",
    "module.model.num_experts=4",
    "module.analysis.probe_blocks=4",
    "module.analysis.min_occurrences=3",
    "trainer.max_steps=12",
    "trainer.val_check_interval=4",
    "callbacks.checkpoints.every_n_steps=2",
]

Train = Callable[..., subprocess.CompletedProcess[str]]


def start_training(directory: Path, *overrides: str, small: bool = True) -> subprocess.Popen[str]:
    """`python train.py` as a user types it, in `directory`."""
    flags = [override for override in overrides if override.startswith("-")]  # Hydra wants them first
    values = [override for override in overrides if override not in flags]
    command = [sys.executable, str(ROOT / "train.py"), *flags, *(SMALL if small else []), *values]
    return subprocess.Popen(
        command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Run `train.py` to its end in an empty directory."""

    def run(*overrides: str, small: bool = True, check: bool = False) -> subprocess.CompletedProcess[str]:
        process = start_training(tmp_path, *overrides, small=small)
        out, err = process.communicate(timeout=300)
        assert not check or process.returncode == 0, err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run
