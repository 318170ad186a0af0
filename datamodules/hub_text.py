"""The paper's pre-training mixtures, streamed from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from datamodules import tokenizer as local
from datamodules.config import HubSource, HubTextDataConfig
from datamodules.errors import DataUnavailableError
from datamodules.resumable import ResumableDataModule


class HubTextData(ResumableDataModule):
    """Documents of several hub data sets, interleaved by their weights and cut into blocks, never held on disk.

    Settings: `datamodules.config.HubTextDataConfig`. A document is held out for evaluation by a hash of its text, so
    the split needs no index. Batches are those of `datamodules.text.TextData`. Each process and worker reads its own
    shards; the position in the stream is part of a checkpoint (one worker), so a resumed run goes on where it stopped.

    Raises:
        DataUnavailableError: a data set or the tokenizer cannot be reached (`setup`).
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = HubTextDataConfig(**settings)
        self.save_hyperparameters(self.config.model_dump(mode="json"))
        self.name = self.config.title
        self.domains = list(self.config.sources)
        self.trained = list(self.domains)
        self.languages: dict[str, str | None] = dict.fromkeys(self.domains)
        self.vocab_size = self.config.total_vocab
        self.sentinel_ids = local.sentinel_ids(self.config.total_vocab, self.config.sentinels)
        self.source = ", ".join(dict.fromkeys(source.path for source in self.config.sources.values()))
        self.sizes = {"sources": {name: source.weight for name, source in self.config.sources.items()}}
        self._train: _Stream | None = None
        self._stream_state: dict[str, Any] | None = None

    @property
    def digest(self) -> str:
        """Of the settings: the data themselves are never all here."""
        return hashlib.sha256(json.dumps(self.config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()

    def setup(self, stage: str | None = None) -> None:
        """Open the tokenizer and the streams."""
        if self._train is not None:
            return
        from transformers import AutoTokenizer

        config = self.config
        try:
            fast = AutoTokenizer.from_pretrained(config.tokenizer)
        except OSError as error:
            raise _unavailable(f"tokenizer {config.tokenizer!r}") from error
        self.tokenizer = fast.backend_tokenizer
        self.eos_id = fast.eos_token_id
        self.pad_id = fast.pad_token_id if fast.pad_token_id is not None else self.eos_id
        self.bos_id = fast.bos_token_id if fast.bos_token_id is not None else self.pad_id
        self._train = self._open("train", config.shuffle_buffer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def train_dataloader(self) -> DataLoader[Any]:
        assert self._train is not None
        if self._stream_state is not None:
            self._train.load_state_dict(self._stream_state)
            self._stream_state = None
        return DataLoader(self._train, batch_size=self.config.batch_size, num_workers=self.config.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation("test")

    def _evaluation(self, split: str) -> DataLoader[Any]:
        blocks = self._open(split, 0)
        taken = [block for block, _ in zip(blocks, range(self.config.eval_blocks), strict=False)]
        return DataLoader(taken, batch_size=self.config.eval_batch_size)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self._train.state_dict() if self._train is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._stream_state = state_dict["stream"]

    def _open(self, split: str, shuffle_buffer: int) -> _Stream:
        from datasets import interleave_datasets

        streams = [self._one(name, source, split) for name, source in self.config.sources.items()]
        weights = torch.tensor([source.weight for source in self.config.sources.values()], dtype=torch.float64)
        mixed = interleave_datasets(
            streams,
            probabilities=(weights / weights.sum()).tolist(),
            seed=self.config.seed,
            stopping_strategy="all_exhausted",
        )
        if shuffle_buffer:
            mixed = mixed.shuffle(seed=self.config.seed, buffer_size=shuffle_buffer)
        if self.trainer is not None and self.trainer.world_size > 1 and split == "train":
            from datasets.distributed import split_dataset_by_node

            mixed = split_dataset_by_node(mixed, rank=self.trainer.global_rank, world_size=self.trainer.world_size)
        return _Stream(mixed, self)

    def _one(self, name: str, source: HubSource, split: str) -> Any:
        from datasets import load_dataset

        try:
            stream = load_dataset(
                source.path,
                source.name,
                split=source.split,
                data_dir=source.data_dir,
                data_files=source.data_files,
                streaming=True,
            )
        except (OSError, ConnectionError) as error:
            raise _unavailable(f"data set {source.path!r}") from error
        index, field, share = self.domains.index(name), source.text_field, self.config.held_out
        stream = stream.filter(lambda row: _split_of(row[field], share) == split)
        columns = stream.column_names
        return stream.map(lambda row: {"text": row[field], "domain": index}, remove_columns=columns)

    def describe(self) -> str:
        """The mixture as a Markdown table."""
        rows = [f"| {name} | {source.path} | {source.weight:g} |" for name, source in self.config.sources.items()]
        return "\n".join([f"{self.config.title}, streamed.", "", "| part | data set | share |", "|---|---|---|", *rows])


class _Stream(IterableDataset[dict[str, Tensor]]):
    """Blocks of a stream of documents; a block never crosses a document's end."""

    def __init__(self, documents: Any, data: HubTextData) -> None:
        self.documents, self.data = documents, data
        self._before: dict[str, Any] | None = None  # state of the stream in front of the current document
        self._given = 0  # blocks of the current document that have been given
        self._skip = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        documents = self.documents
        if worker is not None:
            documents = documents.shard(worker.num_workers, worker.id)
        length = self.data.config.block_length
        rows = iter(documents)
        number = 0
        while True:
            self._before, self._given = documents.state_dict(), 0
            try:
                row = next(rows)
            except StopIteration:
                return
            ids = [*self.data.encode(row["text"]), self.data.eos_id]
            number += 1
            for begin in range(0, len(ids), length):
                self._given += 1
                if self._skip:
                    self._skip -= 1
                    continue
                yield self._block(ids[begin : begin + length], row["domain"], number)

    def _block(self, ids: list[int], domain: int, document: int) -> dict[str, Tensor]:
        tokens = torch.full((self.data.config.block_length + 1,), self.data.pad_id, dtype=torch.int64)
        tokens[0] = self.data.bos_id
        tokens[1 : len(ids) + 1] = torch.tensor(ids)
        return {
            "tokens": tokens,
            "length": torch.tensor(len(ids) + 1),
            "domain": torch.tensor(domain),
            "document": torch.tensor(document),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"documents": self._before, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["documents"] is not None:
            self.documents.load_state_dict(state["documents"])
        self._skip = state["given"]


def _split_of(text: str, held_out: float) -> str:
    """`val`, `test` or `train`, from the text alone."""
    place = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64
    return "val" if place < held_out else "test" if place < 2 * held_out else "train"


def _unavailable(what: str) -> DataUnavailableError:
    return DataUnavailableError(
        f"The {what} cannot be reached. It comes from the Hugging Face hub, which needs a connection (and, for gated "
        "data, HF_TOKEN). Offline, use the packaged text: datamodule=text"
    )
