"""Training data whose order is a pure function of seed, epoch and position, so that a run resumes mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class ResumableSampler(Sampler[int]):
    """Shuffled indices of one process: entry `i * world_size + rank` of the epoch's order, from `start` on.

    The order over all processes together is that of one process with the same global batch. `len()` stays the whole
    epoch's, because training loops count batches of the epoch and not of what is left of it.

    Args:
        size: samples in the data set.
        seed: order of epoch `e` comes from `seed + e`.
        shuffle: False keeps the data set's order.
        start: samples of this process to skip in the first epoch that is iterated.
        epoch: the epoch that `start` belongs to.
    """

    def __init__(
        self,
        size: int,
        *,
        seed: int,
        shuffle: bool = True,
        start: int = 0,
        epoch: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.start, self.epoch = start, epoch
        self.rank, self.world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Called by the training loop at the start of every epoch; a later epoch begins at its first sample."""
        if epoch != self.epoch:
            self.start = 0
        self.epoch = epoch

    def order(self) -> list[int]:
        """The epoch's order over all processes."""
        if not self.shuffle:
            return list(range(self.size))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.size, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        mine = self.order()[self.rank :: self.world_size][: len(self)]
        return iter(mine[self.start :])

    def __len__(self) -> int:
        return self.size // self.world_size


class ResumableDataModule(pl.LightningDataModule):
    """Base of every DataModule here: remembers how far an epoch has come and starts there again.

    Subclasses build their training loader with `resumable_loader`. Its worker processes and base seed come from a
    generator of its own, so that iterating over data never touches the global random state.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches_done = 0

    def state_dict(self) -> dict[str, Any]:
        """Batches of the current epoch that training has completed (not those that workers have fetched)."""
        assert self.trainer is not None
        loop = self.trainer.fit_loop
        done = loop.epoch_loop.batch_progress.current.completed
        finished = done >= loop.max_batches
        return {"batches_done": 0 if finished else done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches_done = state_dict["batches_done"]

    def resumable_loader(
        self,
        dataset: Dataset[Any],
        *,
        size: int,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        num_workers: int = 0,
        **options: Any,
    ) -> DataLoader[Any]:
        """A training DataLoader over `size` indices of `dataset` that starts where the loaded checkpoint stopped."""
        rank, world_size, epoch = 0, 1, 0
        if self.trainer is not None:
            rank, world_size = self.trainer.global_rank, self.trainer.world_size
            epoch = self.trainer.current_epoch
        done, self._batches_done = self._batches_done, 0
        sampler = ResumableSampler(
            size,
            seed=seed,
            shuffle=shuffle,
            start=done * batch_size,
            epoch=epoch,
            rank=rank,
            world_size=world_size,
        )
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
