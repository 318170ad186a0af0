"""Packaged text: archives, splits, blocks, order."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import archives, corpora
from datamodules.archives import Archive
from datamodules.config import DOMAINS, TextDataConfig
from datamodules.errors import DataSettingsError, DataUnavailableError
from datamodules.hub_text import HubTextData
from datamodules.packing import cut, select
from datamodules.resumable import ResumableSampler, shuffled
from datamodules.text import TextData

SMALL = {
    "max_bytes": 150_000,
    "max_eval_bytes": 20_000,
    "vocab_size": 300,
    "total_vocab": 640,
    "block_length": 32,
    "batch_size": 4,
    "val_blocks": 6,
    "test_blocks": 3,
}


@pytest.fixture(scope="module")
def data() -> TextData:
    made = TextData(**SMALL)
    made.prepare_data()
    made.setup()
    return made


def test_blocks_hold_one_document_each_and_give_its_text_back(data: TextData) -> None:
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        batch = next(iter(loader))
        assert batch["tokens"].dtype == torch.int64 and batch["tokens"].shape[1] == 33
        assert (batch["tokens"][:, 0] == data.bos_id).all()
        for tokens, length in zip(batch["tokens"], batch["length"], strict=True):
            assert (tokens[length:] == data.pad_id).all()
            inside = tokens[1:length]
            assert (inside != data.bos_id).all() and (inside[:-1] != data.eos_id).all()
    (part,) = [p for p in data._parts["val"] if data.domains[p.domain] == "prose"]
    text = corpora.documents("prose", max_bytes=150_000)
    assert data.decode(part.tokens[:40].tolist())[:60] in "\n\n".join(text)


def test_every_test_domain_is_there_and_out_of_domain_text_is_never_trained_on(data: TextData) -> None:
    assert {data.domains[int(d)] for batch in data.test_dataloader() for d in batch["domain"]} == set(DOMAINS)
    assert set(data.sizes["train"]) == set(data.sizes["val"]) == {"prose", "code"}


def test_splits_share_no_document(data: TextData) -> None:
    for domain in ("prose", "code"):
        split = data._split(domain, 100)
        numbers = np.concatenate(list(split.values()))
        assert sorted(numbers) == list(range(100)) and len(split["val"]) == len(split["test"]) == 5


def test_the_same_settings_give_the_same_batches_and_another_seed_others(data: TextData) -> None:
    again = TextData(**SMALL)
    again.setup()
    first = next(iter(data.train_dataloader()))
    assert torch.equal(first["tokens"], next(iter(again.train_dataloader()))["tokens"])
    assert again.digest == data.digest
    other = TextData(**SMALL, seed=1)
    other.prepare_data()
    other.setup()
    assert not torch.equal(first["tokens"], next(iter(other.train_dataloader()))["tokens"])


def test_sentinels_are_the_highest_ids_and_bytes_need_no_unknown(data: TextData) -> None:
    assert data.sentinel_ids[0] == data.vocab_size - 1 == 639 and len(data.sentinel_ids) == 300
    assert min(data.sentinel_ids) >= data.config.vocab_size
    text = "naïve 日本語 \U0001f600 ∑"
    assert data.decode(data.encode(text)) == text


def test_the_mixture_follows_its_shares_and_the_warm_up_its_own() -> None:
    made = TextData(
        **SMALL,
        mixture={"prose": 0.8, "code": 0.2},
        warmup_mixture={"conversation": 1.0},
        warmup_blocks=50,
        blocks_per_epoch=2000,
    )
    made.prepare_data()
    made.setup()
    loader = made.train_dataloader()
    domains = torch.cat([batch["domain"] for batch in loader])
    names = [made.domains[int(d)] for d in domains]
    assert set(names[:48]) == {"conversation"} and "conversation" not in names[50:]
    assert names[50:].count("prose") / len(names[50:]) == pytest.approx(0.8, abs=0.04)


def test_a_block_longer_than_a_corpus_is_refused(data: TextData) -> None:
    with pytest.raises(DataSettingsError, match="block_length=10000000 is longer than all of 'prose'"):
        TextData(**{**SMALL, "block_length": 10_000_000}).setup()


def test_settings_are_checked_without_heavy_imports() -> None:
    code = "import sys; from datamodules.config import TextDataConfig; print('torch' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "False\n"
    with pytest.raises(ValueError, match=r"use at least 1324, e\.g\. 1408"):
        TextDataConfig(total_vocab=1300)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 16), st.booleans())
def test_cutting_keeps_every_token_once(sizes: list[int], length: int, whole: bool) -> None:
    offsets = np.cumsum([0, *sizes])
    blocks = cut(offsets, length, "document" if whole else "concatenate")
    covered = [i for s, n in zip(blocks.start, blocks.length, strict=True) for i in range(s, s + n)]
    assert covered == list(range(offsets[-1]))
    for start, size, document in zip(blocks.start, blocks.length, blocks.document, strict=True):
        assert 0 < size <= length and offsets[document] <= start < offsets[document + 1]
        assert not whole or start + size <= offsets[document + 1]


def test_selecting_documents_keeps_their_tokens() -> None:
    tokens, offsets = select(np.arange(10), np.array([0, 3, 7, 10]), np.array([2, 0]))
    assert tokens.tolist() == [7, 8, 9, 0, 1, 2] and offsets.tolist() == [0, 3, 6]


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 60), st.integers(1, 4), st.integers(0, 5))
def test_processes_together_see_the_order_of_one(size: int, world: int, epoch: int) -> None:
    order = shuffled(size, seed=3)
    ranks = [list(ResumableSampler(order, rank=r, world_size=world, epoch=epoch)) for r in range(world)]
    together = [index for step in zip(*ranks, strict=True) for index in step]
    assert together == list(order(epoch))[: size // world * world]


def test_a_sampler_starts_late_only_in_the_epoch_it_was_told() -> None:
    sampler = ResumableSampler(shuffled(10, seed=0), start=4, epoch=2)
    whole = list(ResumableSampler(shuffled(10, seed=0), epoch=2))
    sampler.set_epoch(2)
    assert list(sampler) == whole[4:] and len(sampler) == 10
    sampler.set_epoch(3)
    assert len(list(sampler)) == 10


# --- archives --------------------------------------------------------------------------------------------------------


def archive_of(file: Path) -> Archive:
    return Archive("no-such-distribution", "1.0", file.name, hashlib.sha256(file.read_bytes()).hexdigest())


def test_an_archive_put_into_the_cache_is_used_and_checked(tmp_path: Path) -> None:
    (tmp_path / "archives").mkdir()
    file = tmp_path / "archives" / "no_such_distribution-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("pkg/data/a.txt", "hello")
        made.writestr("pkg/data/b.bin", "no")
    (found,) = archives.members(archive_of(file), "pkg/data/", suffixes=[".txt"], cache=tmp_path)
    assert found.read_text() == "hello"
    file.write_bytes(file.read_bytes() + b"x")
    other = Archive("no-such-distribution", "1.0", file.name, "0" * 64)
    with pytest.raises(DataUnavailableError, match="not the pinned archive"):
        archives.members(other, "pkg/", cache=tmp_path)


def test_archives_cannot_write_outside(tmp_path: Path) -> None:
    (tmp_path / "archives").mkdir()
    file = tmp_path / "archives" / "no_such_distribution-1.0.zip"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("../evil.txt", "x")
    with pytest.raises(DataUnavailableError, match="unsafe path"):
        archives.members(archive_of(file), "pkg/", cache=tmp_path)
    tar = tmp_path / "archives" / "no_such_distribution-1.0.tar.gz"
    (tmp_path / "x").write_text("x")
    with tarfile.open(tar, "w:gz") as made_tar:
        made_tar.add(tmp_path / "x", arcname="top/../../evil.txt")
    with pytest.raises(DataUnavailableError, match="unsafe path"):
        archives.members(archive_of(tar), "pkg/", cache=tmp_path)
    assert not list(tmp_path.glob("**/evil.txt"))


def test_a_missing_archive_names_both_ways_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(archives._run, "retry", lambda *_: False, raising=False)
    missing = Archive("no-such-distribution", "1.0", "no_such_distribution-1.0-py3-none-any.whl", "0" * 64)
    with pytest.raises(DataUnavailableError) as caught:
        archives.members(missing, "pkg/", cache=tmp_path)
    assert "pip install --no-deps no-such-distribution==1.0" in str(caught.value)
    assert missing.filename in str(caught.value)


# --- streamed mixtures -----------------------------------------------------------------------------------------------


def hub(tmp_path: Path, data: TextData, **changes: Any) -> HubTextData:
    """Two local JSON files and a local tokenizer in place of the hub."""
    from transformers import PreTrainedTokenizerFast

    for name in ("a", "b"):
        rows = [json.dumps({"text": f"{name} document number {i} " * 9}) for i in range(60)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=data.tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    sources = {
        name: {"weight": weight, "path": "json", "data_files": str(tmp_path / f"{name}.jsonl")}
        for name, weight in (("a", 3.0), ("b", 1.0))
    }
    options = {"title": "local", "sources": sources, "tokenizer": str(tmp_path / "tokenizer"), "total_vocab": 640}
    options |= {"block_length": 16, "batch_size": 2, "held_out": 0.2, "shuffle_buffer": 0, "eval_blocks": 4}
    made = HubTextData(**(options | changes))
    made.setup()
    return made


def test_streams_are_mixed_split_and_cut(tmp_path: Path, data: TextData) -> None:
    made = hub(tmp_path, data)
    batches = list(made.train_dataloader())
    first = batches[0]["tokens"]
    assert first.shape == (2, 17) and (first[:, 0] == made.bos_id).all()
    early = torch.cat([batch["domain"] for batch in batches[:60]])
    assert (early == 0).float().mean() > 0.6
    texts = {split: set() for split in ("train", "val")}
    for split, loader in (("train", batches), ("val", made.val_dataloader())):
        for batch in loader:
            texts[split] |= {made.decode(row.tolist()) for row in batch["tokens"]}
    assert texts["val"] and not {t for t in texts["val"] if "number" in t and len(t) > 20} & texts["train"]


def test_a_stream_goes_on_where_it_stopped(tmp_path: Path, data: TextData) -> None:
    whole = [batch["tokens"] for batch in hub(tmp_path, data).train_dataloader()]
    interrupted = hub(tmp_path, data)
    loader = iter(interrupted.train_dataloader())
    for _ in range(5):
        next(loader)
    state = interrupted.state_dict()
    resumed = hub(tmp_path, data)
    resumed.load_state_dict(state)
    rest = [batch["tokens"] for batch in resumed.train_dataloader()]
    assert len(rest) == len(whole) - 5 and all(torch.equal(a, b) for a, b in zip(rest, whole[5:], strict=True))


def test_a_hub_that_cannot_be_reached_names_the_offline_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = HubTextData(title="t", sources={"a": {"weight": 1, "path": "nobody/nothing"}}, tokenizer="nobody/nothing")
    with pytest.raises(DataUnavailableError, match="datamodule=text"):
        made.setup()
