"""Cutting tokenised documents into blocks of fixed length."""

from __future__ import annotations

import itertools
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


def cut(offsets: NDArray[np.int64], block_length: int, packing: Literal["document", "concatenate"]) -> Blocks:
    """Blocks of the documents that lie between `offsets` `[D + 1]` of one token array.

    Every document ends with an end-of-document token. `document` never lets a block cross a document's end, so a
    document's last block may be short; `concatenate` cuts the array as one text. A begin token is put before each
    block's tokens when it is read, so `block_length` is also the number of predictions.
    """
    runs = itertools.pairwise(offsets) if packing == "document" else [(offsets[0], offsets[-1])]
    starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for begin, end in runs:
        first = np.arange(begin, end, block_length, dtype=np.int64)
        starts.append(first)
        lengths.append(np.minimum(block_length, end - first))
    start = np.concatenate(starts)
    return Blocks(start, np.concatenate(lengths), np.searchsorted(offsets, start, side="right") - 1)


def select(
    tokens: NDArray[np.integer], offsets: NDArray[np.int64], documents: NDArray[np.int64]
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """The tokens of some documents, one after the other, and their offsets."""
    parts = [tokens[offsets[d] : offsets[d + 1]] for d in documents]
    sizes = np.array([0, *(len(part) for part in parts)], dtype=np.int64)
    return np.concatenate(parts) if parts else tokens[:0], np.cumsum(sizes)
