"""Train, test and track one experiment: `python train.py experiment=openmoe`. See `--help` and the README."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hydra

from orchestra import cli

if TYPE_CHECKING:
    from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> float | None:
    """Run the composed experiment and return its objective (what sweeps optimise)."""
    from orchestra.run import run  # heavy: torch, lightning, mlflow

    with cli.answering():
        return run(config)


if __name__ == "__main__":
    cli.entry(main)
