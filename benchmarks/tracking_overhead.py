"""What tracking costs a training loop of 10 ms steps that logs 10 metrics at each.

    python benchmarks/tracking_overhead.py [--steps 300] [--rounds 3]

A real Lightning loop runs without a logger, with ours, and with the `MLFlowLogger` of Lightning, each on an embedded
SQLite store, in turn within every round. The figure is the median over rounds; the goal is under 3% for ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import MLFlowLogger
from torch.utils.data import DataLoader

from orchestra.tracking import MLflowTracker

STEP_SECONDS = 0.010
METRICS = 10


class TenMilliseconds(pl.LightningModule):
    """A step that takes ten milliseconds, as if a device were computing, and logs ten numbers."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.logs = logs
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seconds: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_SECONDS)
        loss = (self.weight - batch).square().mean()
        if self.logs:
            self.log_dict({f"train/m{i}": loss.detach() + i for i in range(METRICS)})
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def step_milliseconds(logger: Any, steps: int) -> float:
    """Mean time of a step, the first few left out."""
    model = TenMilliseconds(logs=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, DataLoader(torch.ones(steps, 1)))
    times = model.seconds[10:]
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tracking_overhead.json"))
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"no logger": [], "ours": [], "MLFlowLogger of Lightning": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(arguments.rounds):
            uri = f"sqlite:///{scratch}/{number}.db"
            ours = MLflowTracker(experiment="e", run_name="r", directory=f"{scratch}/{number}", tracking_uri=uri)
            ours.start()
            peer = MLFlowLogger("e", tracking_uri=f"sqlite:///{scratch}/peer{number}.db")
            for name, logger in (("no logger", False), ("ours", ours), ("MLFlowLogger of Lightning", peer)):
                found[name].append(step_milliseconds(logger, arguments.steps))
            ours.finish("FINISHED")
    median = {name: statistics.median(times) for name, times in found.items()}
    base = median["no logger"]
    print(
        f"{os.cpu_count()} cores; milliseconds a step, median of {arguments.rounds} rounds of {arguments.steps} steps"
    )
    for name, value in median.items():
        print(f"{name:<28}{value:>8.3f}   {100 * (value / base - 1):>+7.1f}%")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"cores": os.cpu_count(), "median": median, "all": found}, indent=2))


if __name__ == "__main__":
    main()
