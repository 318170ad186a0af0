"""What each data set can be asked, checked without importing torch or any data library."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

Share = Annotated[float, Field(ge=0.0, lt=1.0)]

TRAINABLE_DOMAINS = ("prose", "code", "technical", "conversation", "conversation_other")
UI_LANGUAGES = ("de", "fr", "es", "it", "nl", "ru", "ar", "he", "ja", "ko", "zh_Hans", "zh_Hant")
DOMAINS = (*TRAINABLE_DOMAINS, *(f"ui_{language}" for language in UI_LANGUAGES))


class Settings(BaseModel):
    """Base of every settings block: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoaderConfig(Settings):
    seed: NonNegativeInt = 0  # splits and order
    batch_size: PositiveInt = 16
    eval_batch_size: PositiveInt = 32
    num_workers: NonNegativeInt = 0


class TextDataConfig(LoaderConfig):
    """Arguments of `datamodules.text.TextData`."""

    mixture: dict[str, PositiveFloat] = {"prose": 0.5, "code": 0.5}  # training domains and their shares of blocks
    warmup_mixture: dict[str, PositiveFloat] | None = None  # shares of the first `warmup_blocks` blocks
    warmup_blocks: NonNegativeInt = 0
    test_domains: tuple[str, ...] | None = None  # None: every domain
    block_length: Annotated[int, Field(ge=2)] = 128  # predicted tokens in a block
    packing: Literal["document", "concatenate"] = "document"  # document: no block crosses a document's end
    vocab_size: Annotated[int, Field(ge=260)] = 1024  # byte-level BPE with pad, bos and eos
    sentinels: NonNegativeInt = 300  # mask tokens of span corruption, at the top of the ids
    total_vocab: PositiveInt = 1408  # rows of an embedding for these ids, sentinels included; usually a multiple of 128
    val_share: Share = 0.05  # of the documents of each training domain
    test_share: Share = 0.05
    blocks_per_epoch: PositiveInt | None = None  # None: as many as there are training blocks
    val_blocks: PositiveInt = 64  # at most, of each training domain
    test_blocks: PositiveInt = 40  # at most, of each domain
    max_bytes: PositiveInt = 4_000_000  # of each training domain
    max_eval_bytes: PositiveInt = 300_000  # of each other domain
    cache_dir: str | None = None  # None: the user's cache directory, or ORCHESTRA_CACHE

    @model_validator(mode="after")
    def _consistent(self) -> TextDataConfig:
        named = [*self.mixture, *(self.warmup_mixture or {})]
        for domain in named:
            if domain not in TRAINABLE_DOMAINS:
                raise ValueError(
                    f"mixture: {domain!r} cannot be trained on; choose from {', '.join(TRAINABLE_DOMAINS)}"
                )
        for domain in self.test_domains or ():
            if domain not in DOMAINS:
                raise ValueError(f"test_domains: {domain!r} is unknown; choose from {', '.join(DOMAINS)}")
        if not self.mixture:
            raise ValueError("mixture is empty: name at least one training domain")
        needed = self.vocab_size + self.sentinels
        if self.total_vocab < needed:
            raise ValueError(
                f"total_vocab={self.total_vocab} cannot hold vocab_size={self.vocab_size} and "
                f"sentinels={self.sentinels}; use at least {needed}, e.g. {-(-needed // 128) * 128}"
            )
        if self.val_share + self.test_share >= 1.0:
            raise ValueError(f"val_share={self.val_share} and test_share={self.test_share} leave nothing to train on")
        return self


class HubSource(Settings):
    """One part of a streamed mixture: a data set on the Hugging Face hub."""

    weight: PositiveFloat
    path: str
    name: str | None = None
    split: str = "train"
    text_field: str = "text"
    data_dir: str | None = None
    data_files: Any = None


class HubTextDataConfig(LoaderConfig):
    """Arguments of `datamodules.hub_text.HubTextData`."""

    title: str
    sources: dict[str, HubSource]
    tokenizer: str = "google/umt5-small"  # a hub id or a directory
    sentinels: NonNegativeInt = 300
    total_vocab: PositiveInt = 256_384
    block_length: Annotated[int, Field(ge=2)] = 2048
    batch_size: PositiveInt = 8
    eval_batch_size: PositiveInt = 8
    held_out: Annotated[float, Field(gt=0.0, lt=0.5)] = 0.0005  # share of documents, by a hash of their text
    eval_blocks: PositiveInt = 256
    shuffle_buffer: NonNegativeInt = 10_000

    @model_validator(mode="after")
    def _consistent(self) -> HubTextDataConfig:
        if not self.sources:
            raise ValueError("sources is empty: name at least one data set")
        return self
