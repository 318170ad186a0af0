"""Continuing a run: finding it, composing what it was composed of, and refusing to continue something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from orchestra.errors import UsageError

CONFIG_FILE = "config.yaml"  # the resolved config of a run, in its directory
_HYDRA_OVERRIDES = Path(".hydra") / "overrides.yaml"
_SEARCHED = ("outputs", "multirun")
# A resumed run may train longer, log elsewhere or run on other hardware; what it learns from what stays.
_HARDWARE = tuple(f"trainer.{key}" for key in ("accelerator", "devices", "num_nodes", "strategy", "precision"))
_BATCH_SIZE = "datamodule.batch_size"
_FIXED = ("method", "module", "datamodule", "seed", "objective")


def expand(overrides: list[str]) -> list[str]:
    """Replace `resume=<run id or directory>` by the overrides that the run was started with, in its own directory.

    Overrides given now win over the saved ones. Without `resume=` the list comes back as it is.

    Raises:
        UsageError: no such run, or its directory is not on this machine.
    """
    asked = [o for o in overrides if o.startswith("resume=")]
    if not asked or asked[-1] in ("resume=null", "resume="):
        return overrides
    directory = find_run(asked[-1].removeprefix("resume=").strip("'\""))
    saved_file = directory / _HYDRA_OVERRIDES
    if not saved_file.exists():
        raise UsageError(f"resume: {directory} is not the directory of a run ({_HYDRA_OVERRIDES} is missing)")
    saved = yaml.safe_load(saved_file.read_text()) or []
    given = [o for o in overrides if not o.startswith("resume=")]
    given_keys = {_key(o) for o in given}
    kept = [o for o in saved if _key(o) not in given_keys and _key(o) != "resume"]
    if "trainer" in given_keys:  # another trainer, such as trainer=cpu: the old one's hardware goes with it
        kept = [o for o in kept if not _key(o).startswith(_HARDWARE)]
    return [*kept, *given, f"resume='{directory}'", f"hydra.run.dir='{directory}'"]


def find_run(run: str) -> Path:
    """The directory of `run`, a directory or an MLflow run id."""
    if Path(run).is_dir():
        return Path(run).resolve()
    for root in _SEARCHED:
        for record in Path(root).rglob("tracking.json"):
            if json.loads(record.read_text()).get("run_id") == run:
                return record.parent.resolve()
    raise UsageError(
        f"resume: no run {run!r} is known here. Give the MLflow run id or the directory of a run under "
        f"{' or '.join(f'{name}/' for name in _SEARCHED)}; run ids are found from the directory the run was started in."
    )


def check_unchanged(config: DictConfig) -> None:
    """Refuse to resume a run as something that it was not.

    Raises:
        UsageError: names the keys that differ and their two values.
    """
    if config.resume is None:
        return
    saved_file = Path(config.resume) / CONFIG_FILE
    if not saved_file.exists():
        raise UsageError(
            f"resume: {config.resume} never started training ({CONFIG_FILE} is missing); start it again instead"
        )
    saved = _flat(yaml.safe_load(saved_file.read_text()))
    now = _flat(OmegaConf.to_container(config, resolve=True))
    batch, batch_now = _samples_per_batch(saved), _samples_per_batch(now)
    known = batch is not None and batch_now is not None
    if batch is not None and batch_now is not None and batch != batch_now:
        raise UsageError(other_batch(batch, _world_size(now) or 1, now[_BATCH_SIZE]))
    spread = {_BATCH_SIZE} if known else set()  # the same batch over another number of processes
    changed = [
        f"{key} was {saved.get(key)}, now {now.get(key)}"
        for key in sorted((saved.keys() | now.keys()) - spread)
        if key.partition(".")[0] in _FIXED and saved.get(key) != now.get(key)
    ]
    if changed:
        raise UsageError(
            "resume continues a run as it was, and these keys differ:\n  "
            + "\n  ".join(changed)
            + "\nStart a new run from its weights instead: checkpoint=<path of a checkpoint>"
        )


def other_batch(before: int, processes: int, batch_size: int) -> str:
    """What to say when a run would go on with batches of another size than `before`, over all processes."""
    advice = (
        f"set datamodule.batch_size={before // processes}"
        if before % processes == 0
        else f"use a number of processes that divides {before}, and datamodule.batch_size={before} divided by it"
    )
    return (
        f"resume: the run trains on batches of {before} over all processes; {processes} of datamodule.batch_size="
        f"{batch_size} make {processes * batch_size}. To go on with {processes}, {advice}"
    )


def _world_size(flat: dict[str, Any]) -> int | None:
    devices = flat.get("trainer.devices")
    count = len(devices) if isinstance(devices, list) else devices
    return count * flat.get("trainer.num_nodes", 1) if isinstance(count, int) else None


def _samples_per_batch(flat: dict[str, Any]) -> int | None:
    """Samples of one batch over all processes; None where the config does not tell."""
    world, size = _world_size(flat), flat.get(_BATCH_SIZE)
    return world * size if world is not None and isinstance(size, int) else None


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        flat: dict[str, Any] = {}
        for key, inner in value.items():
            flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value}
