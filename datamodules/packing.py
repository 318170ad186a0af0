"""Cutting tokenised documents into blocks of fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Blocks:
    """Blocks as ranges of one long token array; nothing is copied.

    Attributes:
        start: `[N]` int64, first token of each block.
        length: `[N]` int64, its tokens, at most the block length.
        document: `[N]` int64, the document that the block begins in.
    """

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    document: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start)

    def take(self, count: int) -> Blocks:
        """`count` blocks spread evenly, so that a small evaluation still sees every document's part."""
        chosen = np.linspace(0, len(self) - 1, count).round().astype(np.int64) if count < len(self) else slice(None)
        return Blocks(self.start[chosen], self.length[chosen], self.document[chosen])


def cut(
    offsets: NDArray[np.int64], documents: Sequence[int], block_length: int, packing: Literal["document", "concatenate"]
) -> Blocks:
    """Blocks of the given documents.

    Args:
        offsets: `[D + 1]`, where each document begins in the token array; each ends with an end-of-document token.
        documents: which of them to use.
        block_length: tokens in a block (a begin token is put before them, so this is the number of predictions).
        packing: `document` never lets a block cross a document's end, so a document's last block may be short;
            `concatenate` cuts runs of neighbouring documents as one text.
    """
    starts, lengths, owners = [], [], []
    runs = [[d] for d in documents] if packing == "document" else _runs(sorted(documents))
    for run in runs:
        begin, end = int(offsets[run[0]]), int(offsets[run[-1] + 1])
        first = np.arange(begin, end, block_length, dtype=np.int64)
        starts.append(first)
        lengths.append(np.minimum(block_length, end - first))
        owners.append(np.searchsorted(offsets, first, side="right") - 1)
    if not starts:
        empty = np.zeros(0, np.int64)
        return Blocks(empty, empty, empty)
    return Blocks(np.concatenate(starts), np.concatenate(lengths), np.concatenate(owners))


def _runs(documents: list[int]) -> list[list[int]]:
    """Maximal runs of consecutive numbers."""
    runs: list[list[int]] = []
    for document in documents:
        if runs and document == runs[-1][-1] + 1:
            runs[-1].append(document)
        else:
            runs.append([document])
    return runs
