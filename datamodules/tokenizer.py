"""A byte-level BPE tokenizer trained locally, with the mask tokens of span corruption at the top of its ids."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train on `texts`. Ids 0, 1 and 2 are padding, begin and end of a document; every byte is in the vocabulary, so
    nothing is unknown. The same texts in the same order give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentinel_ids(total_vocab: int, count: int) -> list[int]:
    """Ids of the mask tokens, first mask first: they count down from the top, as in T5."""
    return [total_vocab - 1 - i for i in range(count)]
