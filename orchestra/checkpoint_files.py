"""Checkpoint files: written atomically, read with `weights_only=True`, the same whatever the number of processes.

A checkpoint is one file in Lightning's format. When experts are spread over processes it is a directory instead, so
that no process has to hold them all:

    step-000000100.ckpt/
      shared.pt           Lightning's checkpoint without the experts
      experts-0-of-2.pt   weights and optimiser states of the first half of every expert stack, and so on

Both hold whole parameters and plain optimiser states, and `read` gives any process the part that its own layout asks
for. So every layout reads what any other has written. `python -m orchestra.consolidate` makes one file of a directory.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import TorchCheckpointIO
from torch import Tensor

from orchestra.errors import UsageError
from orchestra.expert_parallel import Part, part_of

log = logging.getLogger(__name__)

BEST = "best.ckpt"
_STEP_FILE = re.compile(r"step-(\d+)\.ckpt")
_PARTIAL = ".partial"
_SHARED = "shared.pt"
_EXPERTS = "experts-{index}-of-{parts}.pt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames: a reader sees the old file or the whole new one, never a part."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + _PARTIAL)
        _write(checkpoint, partial)
        _replace(partial, target)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(path, map_location=map_location or "cpu")


def write_parts(
    path: Path,
    *,
    shared: Mapping[str, Any] | None,
    experts: Mapping[str, Any] | None,
    part: Part,
    barrier: Callable[[], None],
) -> None:
    """Write a directory checkpoint together with the other processes, all of which must call this.

    Args:
        path: the directory.
        shared: what goes to `shared.pt`; given by one process, which also puts the directory in its place.
        experts: `state_dict` and `optimizer_states` of part `part`; None in processes that only hold copies.
        part: which part of the experts.
        barrier: waits for every process.
    """
    partial = path.with_name(path.name + _PARTIAL)
    if shared is not None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(shared, partial / _SHARED)
    barrier()
    if experts is not None:
        _write(experts, partial / _EXPERTS.format(index=part[0], parts=part[1]))
    barrier()
    if shared is not None:
        _replace(partial, path)
    barrier()


def read(
    path: str | Path, *, part: Part = (0, 1), experts: Collection[str] = (), map_location: Any = "cpu"
) -> dict[str, Any]:
    """The checkpoint at `path`, with part `part` of every expert parameter.

    Args:
        path: file or directory.
        part: which part of the experts is wanted; (0, 1) is all of them.
        experts: names of expert parameters, needed to cut those of a file. Its optimiser states come whole.
        map_location: as for `torch.load`.
    """
    path = Path(path)
    if not path.is_dir():
        loaded: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=True)
        weights = loaded["state_dict"]
        weights |= {name: part_of([weights[name]], part) for name in experts if name in weights}
        return loaded
    loaded = torch.load(path / _SHARED, map_location=map_location, weights_only=True)
    pieces = [torch.load(file, map_location=map_location, weights_only=True, mmap=True) for file in _expert_files(path)]
    loaded["state_dict"] |= {
        name: part_of([piece["state_dict"][name] for piece in pieces], part) for name in pieces[0]["state_dict"]
    }
    if "optimizer_states" in loaded:
        (states,) = loaded["optimizer_states"]
        for number, first in pieces[0]["optimizer_states"].items():
            states["state"][number] = {
                key: part_of([piece["optimizer_states"][number][key] for piece in pieces], part)
                if isinstance(value, Tensor) and value.ndim
                else value
                for key, value in first.items()
            }
    return loaded


def _expert_files(path: Path) -> list[Path]:
    """The experts' files of a directory, in order.

    Raises:
        UsageError: one is missing.
    """
    found = list(path.glob(_EXPERTS.format(index="*", parts="*")))
    parts = int(found[0].stem.rpartition("-")[2]) if found else 1
    files = [path / _EXPERTS.format(index=index, parts=parts) for index in range(parts)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise UsageError(f"checkpoint {path} is not complete: {', '.join(missing)} is missing")
    return files


def _write(content: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(content), file)
        file.flush()
        os.fsync(file.fileno())


def _replace(partial: Path, target: Path) -> None:
    """Put `partial` in the place of `target`, for good."""
    old = target.with_name(target.name + ".old")
    if target.is_dir():  # a directory cannot be renamed over another
        target.replace(old)
    elif partial.is_dir():
        target.unlink(missing_ok=True)
    partial.replace(target)
    shutil.rmtree(old, ignore_errors=True)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)


def step_checkpoints(directory: str | Path) -> list[Path]:
    """Resumable checkpoints of a run, newest first."""
    found = [path for path in Path(directory).glob("step-*.ckpt") if _STEP_FILE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(_STEP_FILE.fullmatch(path.name)[1]), reverse=True)  # type: ignore[index]


def newest_whole(directory: str | Path) -> Path | None:
    """The newest resumable checkpoint that reads back whole, warning about each torn one; None if there is none.

    Raises:
        UsageError: there are checkpoints and all are damaged.
    """
    found = step_checkpoints(directory)
    for path in found:
        if is_whole(path):
            return path
        log.warning("Checkpoint %s is damaged (truncated or altered); falling back to the one before.", path)
    if found:
        raise UsageError(f"resume: every checkpoint in {directory} is damaged: {', '.join(p.name for p in found)}")
    return None


def is_whole(path: Path) -> bool:
    """Whether the archive (of a directory, each of its archives) is complete and every part matches its checksum."""
    if path.is_dir():
        try:
            return is_whole(path / _SHARED) and all(is_whole(file) for file in _expert_files(path))
        except UsageError:
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False
