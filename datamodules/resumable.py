"""Training data whose order is a pure function of seed, epoch and position, so that a run resumes mid-epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


def shuffled(size: int, seed: int) -> Callable[[int], Sequence[int]]:
    """The usual order: every index once an epoch, epoch `e` shuffled by `seed + e`."""

    def order(epoch: int) -> Sequence[int]:
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed + epoch)).tolist()

    return order


class ResumableSampler(Sampler[int]):
    """Indices of one process: entry `i * world_size + rank` of the epoch's order, from `start` on.

    The order over all processes together is that of one process with the same global batch. `len()` stays the whole
    epoch's, because training loops count batches of the epoch and not of what is left of it.

    Args:
        order: the indices of an epoch over all processes, a pure function of the epoch's number.
        start: samples of this process to skip in epoch `epoch`; later epochs begin at their first sample.
    """

    def __init__(
        self,
        order: Callable[[int], Sequence[int]],
        *,
        start: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.order, self.start, self.epoch = order, start, epoch
        self.rank, self.world_size = rank, world_size
        self.size = len(order(epoch)) // world_size

    def set_epoch(self, epoch: int) -> None:
        """Called by the training loop at the start of every epoch."""
        if epoch != self.epoch:
            self.start = 0
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        mine = self.order(self.epoch)[self.rank :: self.world_size][: self.size]
        return iter(mine[self.start :])

    def __len__(self) -> int:
        return self.size


class ResumableDataModule(pl.LightningDataModule):
    """Base of every DataModule here: remembers how far an epoch has come and starts there again.

    Subclasses build their training loader with `resumable_loader`. Its worker processes and base seed come from a
    generator of its own, so that iterating over data never touches the global random state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stopped_at = (0, 0)  # epoch, batches of it that the loaded checkpoint has completed

    def state_dict(self) -> dict[str, Any]:
        """Batches of the current epoch that training has completed (not those that workers have fetched)."""
        assert self.trainer is not None
        loop: Any = self.trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.completed
        finished = done >= loop.max_batches
        # Not `current_epoch`, which counts an epoch that max_steps has cut short as done.
        return {"epoch": loop.epoch_progress.current.started - 1, "batches_done": 0 if finished else done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stopped_at = state_dict["epoch"], state_dict["batches_done"]

    def resumable_loader(
        self,
        dataset: Dataset[Any],
        order: Callable[[int], Sequence[int]],
        *,
        batch_size: int,
        seed: int,
        num_workers: int = 0,
        **options: Any,
    ) -> DataLoader[Any]:
        """A training DataLoader over `dataset` in `order` that starts where the loaded checkpoint stopped.

        Strategies may ask for it more than once, DeepSpeed's before the trainer knows the epoch.
        """
        rank, world_size, epoch = 0, 1, 0
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
            epoch = self.trainer.current_epoch
        done = self._stopped_at[1] if epoch == self._stopped_at[0] else 0
        sampler = ResumableSampler(order, start=done * batch_size, epoch=epoch, rank=rank, world_size=world_size)
        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(seed),
            **options,
        )
