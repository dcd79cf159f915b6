"""Our target gives transformers' text, up to rounding ties."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows

pytestmark = pytest.mark.long

NUM_TOKENS = 200
TIE = 1e-4  # rounding may order closer logits either way
PROMPT = "On the last day of the fair, the tailor's apprentice found a letter sewn into the lining of a coat"


def test_greedy_float32_text_is_that_of_transformers_generate(
    embedded_files: ModelFiles, embedded_targets: dict[str, TargetModel]
) -> None:
    target = embedded_targets["float32"]
    prompt_ids = TextCodec(embedded_files).encode(PROMPT)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=0)
    sequence = Sequence("s", prompt_ids, params, target.vocab_size)
    engine = Engine(target, create_drafter("token-recycling", target, free_rows))
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()

    model = AutoModelForCausalLM.from_pretrained(embedded_files.path, dtype=torch.float32, use_safetensors=True)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt_ids])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    theirs = generated[0, len(prompt_ids) :].tolist()
    ours = sequence.output_ids.tolist()
    if ours != theirs:
        first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        logits = model(generated[:, : len(prompt_ids) + first]).logits[0, -1]
        assert abs(float(logits[ours[first]] - logits[theirs[first]])) < TIE, f"differs at token {first}"
