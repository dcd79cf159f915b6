"""The sequence of a job, before anything is drawn."""

from __future__ import annotations

import torch

from swiftbatch.jobs.job import JobRecord, unpacked
from swiftbatch.worker.constraints.thinking import Thinking
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec


def sequence_of(
    record: JobRecord, codec: TextCodec, vocab_size: int, device: torch.device | str = "cpu"
) -> tuple[Sequence, Thinking | None]:
    """Return a job's prompt with the tokens that its output begins with, and its thought if the model thinks."""
    sampling = codec.with_stop_tokens(record.job.sampling)
    thinking = codec.thinking(record.job, record.last_marker)
    sequence = Sequence(
        record.job_id,
        unpacked(record.prompt_token_ids),
        sampling,
        vocab_size,
        device,
        codec.bad_word_ids(sampling.bad_words),
        codec.rules(sampling, thinking, record.job.template),
    )
    sequence.lora = record.job.lora_name
    sequence.extend(list(record.job.begun_ids or ()))
    return sequence, thinking
