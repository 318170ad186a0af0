"""Whole runs as real processes: what they leave, how they end, and that a killed one continues bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run

from orchestra.checkpoint_files import step_checkpoints
from tests.conftest import ROOT, start_training


def client(directory: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")


def runs(directory: Path) -> list[Run]:
    store = client(directory)
    return list(store.search_runs([e.experiment_id for e in store.search_experiments()]))


def history(directory: Path, run: Run) -> dict[tuple[str, int], float]:
    """Every point of a run but samples of the machine; fails when one was logged twice."""
    points: dict[tuple[str, int], float] = {}
    for name in (name for name in run.data.metrics if not name.startswith("system/")):
        for point in client(directory).get_metric_history(run.info.run_id, name):
            assert (name, point.step) not in points, f"{name} at step {point.step} was logged twice"
            points[name, point.step] = point.value
    return points


def final_state(directory: Path) -> dict[str, Any]:
    (run_directory,) = [path.parent for path in directory.glob("outputs/*/*/tracking.json")]
    state: dict[str, Any] = torch.load(step_checkpoints(run_directory / "checkpoints")[0], weights_only=True)
    return state


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whole run; the others are compared with it."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    code, out, err = finish(start_training(directory))
    assert code == 0, err
    (directory / "stdout.txt").write_text(out)
    return directory


def test_a_run_leaves_everything_in_mlflow(uninterrupted: Path) -> None:
    (run,) = runs(uninterrupted)
    store = client(uninterrupted)
    assert run.info.status == "FINISHED" and run.info.run_name == "openmoe-default-s0"
    experiment = store.get_experiment(run.info.experiment_id)
    assert experiment.name == "openmoe" and experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    assert run.data.params["module.model.d_model"] == "16" and run.data.params["seed"] == "0"
    tags = run.data.tags
    assert (tags["method"], tags["variant"], tags["scale"]) == ("openmoe", "default", "small")
    assert "python" in tags["command"] and "OpenMoE" in tags["paper"]
    assert "| parameters |" in tags["mlflow.note.content"] and "| train | prose |" in tags["mlflow.note.content"]
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "packaged-text" and len(dataset.dataset.digest) == 36
    files = {
        entry.path
        for folder in ("figures/routing", "tables/routing", "checkpoints", "config", "environment")
        for entry in store.list_artifacts(run.info.run_id, folder)
    }
    assert {"figures/routing/drop_towards_the_end.png", "figures/routing/early_learning.png"} <= files
    assert {"checkpoints/best.ckpt", "config/config.yaml", "environment/packages.txt"} <= files
    names = run.data.metrics.keys()
    assert {"train/loss", "val/nll", "val/nll_prose", "test/nll", "test/nll_ui_ja", "test/mi_share_token"} <= names
    assert run.data.metrics["objective"] == min(
        point.value for point in store.get_metric_history(run.info.run_id, "val/nll")
    )
    points = history(uninterrupted, run)
    assert [step for name, step in sorted(points) if name == "train/loss"] == list(range(12))


def test_the_summary_names_commands_that_work(uninterrupted: Path) -> None:
    (run,) = runs(uninterrupted)
    summary = (uninterrupted / "stdout.txt").read_text()
    assert f"val/nll = {run.data.metrics['objective']:.5g}" in summary
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db" in summary
    (again,) = re.findall(r"python train.py (experiment=.* train=false checkpoint=\S+)", summary)
    code, out, err = finish(start_training(uninterrupted, *again.split(), "logger=none", small=False))
    assert code == 0, err
    assert f"test/nll = {run.data.metrics['test/nll']:.5g}" in out


def test_the_same_seed_gives_the_same_numbers(uninterrupted: Path, tmp_path: Path) -> None:
    assert finish(start_training(tmp_path))[0] == 0
    (ours,), (theirs,) = runs(tmp_path), runs(uninterrupted)
    assert history(tmp_path, ours) == history(uninterrupted, theirs)
    other = finish(start_training(tmp_path / "..", "seed=1", f"hydra.run.dir={tmp_path}/other", "logger=none"))
    assert other[0] == 0
    seed_one = torch.load(step_checkpoints(tmp_path / "other" / "checkpoints")[0], weights_only=True)
    assert not same(seed_one["state_dict"], final_state(uninterrupted)["state_dict"])


KILL_SELF = """
import os, signal, sys
import pytorch_lightning as pl
from orchestra import checkpoints
moment = sys.argv.pop(1)
class Killer(checkpoints.Checkpoints):
    def on_train_batch_end(self, trainer, *rest):
        super().on_train_batch_end(trainer, *rest)
        if moment == "step" and trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGKILL)
    def on_validation_batch_end(self, trainer, *rest):
        if moment == "validation" and trainer.global_step == 8:
            os.kill(os.getpid(), signal.SIGKILL)
    def on_test_start(self, trainer, *rest):
        if moment == "test":
            os.kill(os.getpid(), signal.SIGKILL)
if moment == "checkpoint":
    replace = checkpoints.Path.replace
    def torn(self, target):
        if self.name.startswith("step-000000006"):
            self.write_bytes(self.read_bytes()[:5000])
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)
    checkpoints.Path.replace = torn
checkpoints.Checkpoints = Killer
sys.argv[0] = sys.argv.pop(1)
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("moment", ["step", "checkpoint", "validation", "test"])
def test_a_killed_run_continues_bit_for_bit(moment: str, uninterrupted: Path, tmp_path: Path) -> None:
    from tests.conftest import SMALL

    killed = subprocess.run(
        [sys.executable, "-c", KILL_SELF, moment, str(ROOT / "train.py"), *SMALL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    deadline = time.monotonic() + 60
    while (run := runs(tmp_path)[0]).info.status == "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert run.info.status == "KILLED", "the delivery process says that the run was killed"
    (directory,) = tmp_path.glob("outputs/*/*")
    assert not [path for path in (directory / "checkpoints").glob("*.ckpt") if path.stat().st_size < 6000]
    code, _, err = finish(start_training(tmp_path, f"resume={run.info.run_id}", small=False))
    assert code == 0, err
    (resumed,), (whole,) = runs(tmp_path), runs(uninterrupted)
    assert resumed.info.status == "FINISHED" and resumed.info.run_id == run.info.run_id
    assert history(tmp_path, resumed) == history(uninterrupted, whole)
    ours, theirs = final_state(tmp_path), final_state(uninterrupted)
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "orchestra", "routing_tables"):
        assert same(ours[part], theirs[part]), part
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_checkpoints_and_marks_the_run_killed(
    signum: signal.Signals, uninterrupted: Path, tmp_path: Path
) -> None:
    process = start_training(tmp_path, "callbacks.checkpoints.every_n_steps=1000", "trainer.max_steps=100000")
    _wait_for(lambda: any(tmp_path.glob("outputs/*/*/outbox.jsonl")) and '"train/loss"' in _outbox(tmp_path))
    process.send_signal(signum)
    code, _, err = finish(process)
    assert code == 128 + signum, err
    assert "Traceback" not in err and "resume=" in err
    (run,) = runs(tmp_path)
    assert run.info.status == "KILLED"
    (checkpoint,) = tmp_path.glob("outputs/*/*/checkpoints/step-*.ckpt")
    steps = int(checkpoint.stem.removeprefix("step-"))
    assert steps == 1 + max(step for name, step in history(tmp_path, run) if name == "train/loss")


def test_a_second_ctrl_c_exits_at_once(tmp_path: Path) -> None:
    process = start_training(tmp_path, "trainer.max_steps=100000")
    _wait_for(lambda: any(tmp_path.glob("outputs/*/*/outbox.jsonl")) and '"train/loss"' in _outbox(tmp_path))
    os.kill(process.pid, signal.SIGSTOP)  # both signals are pending before the program can answer the first
    process.send_signal(signal.SIGINT)
    os.kill(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, _, _ = finish(process)
    assert code == 130 and time.monotonic() - began < 60


def test_a_failing_run_says_why_in_mlflow(train: Any, tmp_path: Path) -> None:
    # A prompt longer than the block: fails in the middle of training, not in a check.
    done = train("callbacks.checkpoints.directory=/dev/null/nowhere")
    assert done.returncode == 1 and "NotADirectoryError" in done.stderr
    (run,) = runs(tmp_path)
    assert run.info.status == "FAILED"
    path = client(tmp_path).download_artifacts(run.info.run_id, "traceback.txt", str(tmp_path))
    assert "NotADirectoryError" in Path(path).read_text()


def test_a_truncated_newest_checkpoint_falls_back_with_a_warning(uninterrupted: Path, tmp_path: Path) -> None:
    assert finish(start_training(tmp_path, "trainer.max_steps=8"))[0] == 0
    (directory,) = tmp_path.glob("outputs/*/*")
    newest, before = step_checkpoints(directory / "checkpoints")
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    code, _, err = finish(start_training(tmp_path, f"resume={directory}", "trainer.max_steps=8", small=False))
    assert code == 0, err
    assert f"{newest} is damaged" in err and f"Resuming from {before}" in err


def test_resume_refuses_another_model(uninterrupted: Path) -> None:
    (run,) = runs(uninterrupted)
    code, _, err = finish(
        start_training(uninterrupted, f"resume={run.info.run_id}", "module.model.d_ff=32", small=False)
    )
    assert code == 2
    assert "module.model.d_ff was 16, now 32" in err and "checkpoint=" in err


def test_debug_runs_one_batch_of_everything(train: Any, tmp_path: Path) -> None:
    train("debug=true", check=True)
    (run,) = runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert [step for name, step in history(tmp_path, run) if name == "train/loss"] == [0]
    assert {"val/nll", "test/nll"} <= run.data.metrics.keys()


def test_a_multirun_makes_one_run_for_each_value(train: Any, tmp_path: Path) -> None:
    train("-m", "debug=true", "seed=0,1", check=True)
    assert sorted(run.info.run_name for run in runs(tmp_path)) == ["openmoe-default-s0", "openmoe-default-s1"]


@pytest.mark.parametrize("trainer", ["ddp", "deepspeed"])
def test_two_processes_make_one_run(trainer: str, train: Any, tmp_path: Path) -> None:
    hardware = [f"trainer={trainer}", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true"]
    train(*hardware, "trainer.max_steps=4", "datamodule.batch_size=2", check=True)
    (run,) = runs(tmp_path)
    assert run.info.status == "FINISHED"
    assert len(list(tmp_path.glob("outputs/*/*"))) == 1
    points = history(tmp_path, run)
    assert [step for name, step in sorted(points) if name == "train/loss"] == [0, 1, 2, 3]


def _outbox(directory: Path) -> str:
    (path,) = directory.glob("outputs/*/*/outbox.jsonl")
    return path.read_text()


def _wait_for(condition: Any, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


def test_nothing_secret_reaches_the_store(tmp_path: Path) -> None:
    os.environ["MY_SERVICE_TOKEN"] = "abcdef-very-secret"
    try:
        code, _, err = finish(
            start_training(tmp_path, "debug=true", "+tags.note=abcdef-very-secret", "notes=abcdef-very-secret")
        )
    finally:
        del os.environ["MY_SERVICE_TOKEN"]
    assert code == 0, err
    (run,) = runs(tmp_path)
    assert run.data.tags["note"] == "***"
    for path in [
        *tmp_path.glob("mlartifacts/**/*"),
        *tmp_path.glob("outputs/*/*/outbox.jsonl"),
        tmp_path / "mlflow.db",
    ]:
        if path.is_file():
            assert b"abcdef-very-secret" not in path.read_bytes(), path
    json.loads(next(tmp_path.glob("outputs/*/*/tracking.json")).read_text())
