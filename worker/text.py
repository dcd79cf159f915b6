"""Text to tokens and back, with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from jobs.job import Job
from worker.model_files import ModelError, ModelFiles


class TextCodec:
    """A model's tokenizer. Raises ModelError where the model folder has none that loads."""

    def __init__(self, files: ModelFiles) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                files.path, trust_remote_code=False, local_files_only=True, clean_up_tokenization_spaces=False
            )
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(
                f"model {files.name}: its tokenizer cannot be loaded from {files.path}: {reason}"
            ) from error
        self._tokenizer.model_max_length = files.max_positions

    def encode_job(self, job: Job) -> list[int]:
        """Token ids of a job's prompt, or of its messages through the tokenizer's chat template.

        Raises ValueError, with a reason for the user, where there are no tokens or no chat template.
        """
        if job.messages is None:
            token_ids = self.encode(job.prompt or "")
        elif self._tokenizer.chat_template is None:
            raise ValueError("messages: this model's tokenizer has no chat template; send a `prompt` instead")
        else:
            messages = [message.model_dump() for message in job.messages]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            token_ids = self.encode(text, add_special_tokens=False)  # a template writes its own special tokens
        if not token_ids:
            raise ValueError("prompt: no tokens come of it; expected at least one")
        return token_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of tokens, without the special ones."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
