"""Language-model text in several domains, offline: real documents, a local tokenizer, fixed-length blocks."""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from datamodules import corpora, tokenizer
from datamodules.archives import cache_directory
from datamodules.config import DOMAINS, TextDataConfig
from datamodules.errors import DataSettingsError
from datamodules.packing import Blocks, cut, select
from datamodules.resumable import ResumableDataModule

_FORMAT = 1  # raise it when the prepared files change their meaning
_TOKENIZER_BYTES = 3_000_000  # of training text for the tokenizer: more changes little at these vocabularies


@dataclass(frozen=True)
class Part:
    """Blocks of one domain in one split."""

    domain: int
    tokens: NDArray[np.integer]
    blocks: Blocks


class BlockDataset(Dataset[dict[str, Tensor]]):
    """Blocks of several parts, numbered one part after the other.

    An item holds `tokens` int64 `[block_length + 1]` (a begin token, the block, padding), `length` (tokens that are
    not padding), `domain` and `document`.
    """

    def __init__(self, parts: Sequence[Part], block_length: int) -> None:
        self.parts, self.block_length = parts, block_length
        self.first = np.cumsum([0, *(len(part.blocks) for part in parts)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        part, local = self.parts[number], index - int(self.first[number])
        start, length = int(part.blocks.start[local]), int(part.blocks.length[local])
        tokens = torch.full((self.block_length + 1,), tokenizer.PAD_ID, dtype=torch.int64)
        tokens[0] = tokenizer.BOS_ID
        tokens[1 : length + 1] = torch.from_numpy(part.tokens[start : start + length].astype(np.int64))
        return {
            "tokens": tokens,
            "length": torch.tensor(length + 1),
            "domain": torch.tensor(part.domain),
            "document": torch.tensor(int(part.blocks.document[local])),
        }


class TextData(ResumableDataModule):
    """Documents of `datamodules.corpora`, split by document, tokenised and cut into blocks.

    Settings: `datamodules.config.TextDataConfig`. Domains that are trained on are split into training, validation and
    test documents; the others are for testing only. Validation is in-domain; the test loader holds every test domain,
    told apart by the batch's `domain`, an index into `domains`.

    Batches: `tokens` int64 `[B, block_length + 1]`, `length`, `domain` and `document` int64 `[B]`.

    Raises:
        DataUnavailableError: an archive is missing and cannot be downloaded (`prepare_data`).
        DataSettingsError: the blocks are longer than a whole corpus (`setup`).
    """

    name = "packaged-text"
    source = "package archives and installed packages (see datamodules/corpora.py)"
    pad_id, bos_id, eos_id = tokenizer.PAD_ID, tokenizer.BOS_ID, tokenizer.EOS_ID

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = TextDataConfig(**settings)
        self.save_hyperparameters(self.config.model_dump(mode="json"))
        config = self.config
        self.trained = sorted({*config.mixture, *(config.warmup_mixture or {})}, key=DOMAINS.index)
        tested = config.test_domains or DOMAINS
        self.domains = [name for name in DOMAINS if name in self.trained or name in tested]
        self.languages = {name: corpora.LANGUAGES.get(name) for name in self.domains}
        self.vocab_size = config.total_vocab
        self.sentinel_ids = tokenizer.sentinel_ids(config.total_vocab, config.sentinels)
        self._parts: dict[str, list[Part]] = {}

    # --- preparing ---

    @property
    def directory(self) -> Path:
        """Where the prepared files are: named by everything that they depend on."""
        config = self.config
        key = {
            "format": _FORMAT,
            "versions": corpora.versions(self.domains),
            "domains": self.domains,
            "trained": self.trained,
            "seed": config.seed,
            **{name: getattr(config, name) for name in ("vocab_size", "val_share", "test_share")},
            **{name: getattr(config, name) for name in ("max_bytes", "max_eval_bytes")},
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return self._cache / "text" / digest

    @property
    def _cache(self) -> Path:
        return Path(self.config.cache_dir) if self.config.cache_dir else cache_directory()

    def prepare_data(self) -> None:
        """Collect the documents, train the tokenizer and encode everything, once; later calls find it done."""
        target = self.directory
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if target.is_dir():
                return
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                built = Path(scratch) / "built"
                built.mkdir()
                self._build(built)
                built.replace(target)

    def _build(self, target: Path) -> None:
        config = self.config
        texts = {
            domain: corpora.documents(
                domain,
                max_bytes=config.max_bytes if domain in self.trained else config.max_eval_bytes,
                cache=self._cache,
            )
            for domain in self.domains
        }
        learned = tokenizer.train(self._tokenizer_texts(texts), config.vocab_size)
        learned.save(str(target / "tokenizer.json"))
        content = hashlib.sha256()
        for domain, documents in texts.items():
            encoded = [encoding.ids for encoding in learned.encode_batch_fast(documents)]
            sizes = [len(ids) + 1 for ids in encoded]
            flat = np.fromiter((token for ids in encoded for token in (*ids, self.eos_id)), np.uint32, sum(sizes))
            np.save(target / f"{domain}.tokens.npy", flat)
            np.save(target / f"{domain}.offsets.npy", np.cumsum([0, *sizes]))
            content.update(domain.encode())
            content.update(flat.tobytes())
        (target / "digest.txt").write_text(content.hexdigest())

    def _tokenizer_texts(self, texts: dict[str, list[str]]) -> list[str]:
        """Training documents only, the domains of the mixture in equal parts."""
        domains = [domain for domain in self.trained if domain in self.config.mixture]
        chosen = []
        for domain in domains:
            left = _TOKENIZER_BYTES // len(domains)
            for number in self._split(domain, len(texts[domain]))["train"]:
                text = texts[domain][number]
                chosen.append(text)
                left -= len(text)
                if left <= 0:
                    break
        return chosen

    # --- splitting ---

    def _split(self, domain: str, count: int) -> dict[str, NDArray[np.int64]]:
        """Document numbers of each split, from the seed alone."""
        order = np.random.default_rng([self.config.seed, DOMAINS.index(domain)]).permutation(count)
        if domain not in self.trained:
            return {"train": order[:0], "val": order[:0], "test": order}
        val, test = round(count * self.config.val_share), round(count * self.config.test_share)
        val, test = max(val, int(self.config.val_share > 0)), max(test, int(self.config.test_share > 0))
        return {"val": order[:val], "test": order[val : val + test], "train": order[val + test :]}

    def setup(self, stage: str | None = None) -> None:
        """Open the prepared files and cut the blocks of every split."""
        if self._parts:
            return
        config, directory = self.config, self.directory
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.digest = (directory / "digest.txt").read_text()
        parts: dict[str, list[Part]] = {"train": [], "val": [], "test": []}
        self.sizes: dict[str, Any] = {"train": {}, "val": {}, "test": {}}
        for index, domain in enumerate(self.domains):
            tokens = np.load(directory / f"{domain}.tokens.npy", mmap_mode="r")
            offsets = np.load(directory / f"{domain}.offsets.npy")
            if domain in self.trained and config.block_length > offsets[-1]:
                raise DataSettingsError(
                    f"datamodule.block_length={config.block_length} is longer than all of {domain!r} "
                    f"({offsets[-1]} tokens)"
                )
            for split, documents in self._split(domain, len(offsets) - 1).items():
                chosen, bounds = select(tokens, offsets, documents)
                blocks = cut(bounds, config.block_length, config.packing)
                if split != "train":
                    blocks = blocks.take(config.val_blocks if split == "val" else config.test_blocks)
                wanted = split != "test" or domain in (config.test_domains or DOMAINS)
                if len(blocks) and wanted:
                    parts[split].append(Part(index, chosen, blocks))
                    self.sizes[split][domain] = {
                        "documents": len(documents),
                        "blocks": len(blocks),
                        "tokens": int(blocks.length.sum()),
                    }
        self._parts = parts

    # --- reading ---

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without begin or end."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; sentinels, begin, end and padding are left out."""
        return str(self.tokenizer.decode([i for i in ids if i < self.config.vocab_size], skip_special_tokens=True))

    def train_dataloader(self) -> DataLoader[Any]:
        config = self.config
        dataset = BlockDataset(self._parts["train"], config.block_length)
        return self.resumable_loader(
            dataset, self._order, batch_size=config.batch_size, seed=config.seed, num_workers=config.num_workers
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("test")

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        dataset = BlockDataset(self._parts[split], self.config.block_length)
        return DataLoader(dataset, batch_size=self.config.eval_batch_size, num_workers=self.config.num_workers)

    def _order(self, epoch: int) -> Sequence[int]:
        return _mixture_order(
            tuple((self.domains[part.domain], len(part.blocks)) for part in self._parts["train"]),
            tuple(sorted(self.config.mixture.items())),
            tuple(sorted((self.config.warmup_mixture or {}).items())),
            self.config.warmup_blocks if epoch == 0 else 0,
            self.config.blocks_per_epoch,
            self.config.seed,
            epoch,
        )

    def describe(self) -> str:
        """The splits as a Markdown table."""
        rows = [
            f"| {split} | {domain} | {size['documents']} | {size['blocks']} | {size['tokens']} |"
            for split, domains in self.sizes.items()
            for domain, size in domains.items()
        ]
        head = ["| split | domain | documents | blocks | tokens |", "|---|---|---|---|---|"]
        return f"{self.source}. Blocks of {self.config.block_length} tokens.\n\n" + "\n".join(head + rows)


@functools.lru_cache(maxsize=2)
def _mixture_order(
    parts: tuple[tuple[str, int], ...],
    mixture: tuple[tuple[str, float], ...],
    warmup: tuple[tuple[str, float], ...],
    warmup_blocks: int,
    blocks: int | None,
    seed: int,
    epoch: int,
) -> tuple[int, ...]:
    """Block numbers of an epoch: each block's domain is drawn by the mixture's shares, and within a domain every block
    comes once before any comes twice."""
    rng = np.random.default_rng([seed, epoch])
    names = [name for name, _ in parts]
    sizes = dict(parts)
    total = blocks or sum(size for name, size in parts if name in dict(mixture))
    warm = min(warmup_blocks, total) if warmup else 0
    drawn = np.concatenate([_draw(rng, names, dict(warmup), warm), _draw(rng, names, dict(mixture), total - warm)])
    first = np.cumsum([0, *sizes.values()])
    order = np.empty(total, np.int64)
    for number, name in enumerate(names):
        where = np.flatnonzero(drawn == number)
        passes = -(-len(where) // sizes[name])
        within = [rng.permutation(sizes[name]) for _ in range(passes)]
        if passes:
            order[where] = first[number] + np.concatenate(within)[: len(where)]
    return tuple(order.tolist())


def _draw(rng: np.random.Generator, names: list[str], shares: dict[str, float], count: int) -> NDArray[np.int64]:
    weights = np.array([shares.get(name, 0.0) for name in names])
    return rng.choice(len(names), size=count, p=weights / weights.sum()) if count else np.zeros(0, np.int64)
