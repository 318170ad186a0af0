"""Every random state of a process, in types that `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def collect() -> list[dict[str, Any]]:
    """The random states of every process, in rank order (one entry without `torch.distributed`)."""
    if not (dist.is_available() and dist.is_initialized()):
        return [_local()]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, _local())
    return states


def restore(states: list[dict[str, Any]]) -> None:
    """Put back what `collect` returned. With another number of processes each keeps its fresh seed."""
    distributed = dist.is_available() and dist.is_initialized()
    world, rank = (dist.get_world_size(), dist.get_rank()) if distributed else (1, 0)
    if len(states) != world:
        return
    state = states[rank]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for device, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state, device)


def _local() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }
