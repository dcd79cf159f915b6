"""Ways in which tokenizers of GGUF files cut text before they merge it: those of `transformers`' loader.

It takes GPT-2's way for any name that it does not know, and the tokens of a text are then others than the model's.
"""

from __future__ import annotations

from swiftbatch.worker.model.gguf.gguf_model import GGUFModel
from swiftbatch.worker.model.gguf.header import GGUFError

KINDS = ("gpt2", "llama")  # merges of bytes, and SentencePiece's, which cuts in one way alone
OF_GPT2 = ("gpt-2", "granite-docling", "jais", "mpt", "olmo", "phi-2", "trillion")
# as GPT-2, with digits one by one: no merge joins digits there, so that is no difference
OF_DIGITS = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
OTHERS = (
    *("dbrx", "deepseek-r1-qwen", "f2llmv2", "falcon-h1", "falcon3", "gpt-4o", "jina-v5-nano", "kanana2", "kormo"),
    *("lfm2", "llama-bpe", "llama-v3", "llama3", "llama4", "megrez", "midm-2.0", "minimax-m2", "pixtral", "qwen2"),
    *("qwen35", "smaug-bpe", "talkie", "tekken"),
)
KNOWN = sorted((*OF_GPT2, *OF_DIGITS, *OTHERS))


def refuse_unknown_split(model: GGUFModel) -> None:
    """Raise GGUFError for a tokenizer that would give other tokens than the model's."""
    kind, split = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in KINDS:
        raise GGUFError(f"its tokenizer.ggml.model is {kind!r:.60}, expected {' or '.join(KINDS)}")
    if kind == "gpt2" and split not in KNOWN:
        raise GGUFError(f"its tokenizer.ggml.pre is {split!r:.60}, expected one of {', '.join(KNOWN)}")
    tokens, types = (model.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not tokens or (types is not None and len(types) != len(tokens)):
        raise GGUFError("its metadata has no tokens, or other numbers of tokens and of their types")
