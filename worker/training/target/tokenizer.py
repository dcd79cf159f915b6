"""Byte-level BPE tokenizer for a target model trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"

# Words keep their leading space, digits stand alone, and a run of newlines is one piece.
WORD_PATTERN = r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}|\n+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"

# A plain-text model has no roles: a chat is its messages, a blank line between them.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a lossless byte-level BPE tokenizer with `vocab_size` entries, `<|endoftext|>` among them.

    It puts that token in front of every text: what comes behind it is a new one.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    first = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[first])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
