"""Texts that a model itself says behind prompts, as its users get them: sampled by the engine that decodes plainly."""

from __future__ import annotations

from collections import deque
from functools import partial

from rich.progress import Progress

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling import MAX_SEED, SamplingParams
from swiftbatch.worker.caches.memory.memory_plan import SlotsWanted
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.model.files import ModelFiles
from swiftbatch.worker.target.step_costs import measure_step_costs
from swiftbatch.worker.target.target import TargetModel

NUM_AT_A_TIME = 32  # a forward's rows on a CPU, half of them on a GPU


def sampled_texts(
    files: ModelFiles, device: str, prompts: list[list[int]], sampling: SamplingParams
) -> list[list[int]]:
    """Prompts with `sampling.max_tokens` tokens behind each; an end of sequence does not end one.

    The model in bf16. Each text has noise of its own, from the seed and its number. Raises ModelError where it gives
    logits that nothing can be drawn from.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens
    slots = SlotsWanted(longest_job=longest, num_slots=min(NUM_AT_A_TIME, len(prompts)))
    target = TargetModel.load(files, "bfloat16", device, slots=slots)
    engine = Engine(target, create_drafter("autoregressive", target, partial(measure_step_costs, target)))
    sequences = [
        Sequence(f"{number}", prompt, _of_one(sampling, number), target.vocab_size, target.device)
        for number, prompt in enumerate(prompts)
    ]
    waiting = deque(sequences)
    with Progress(transient=True) as progress:
        task = progress.add_task("own texts", total=len(prompts) * sampling.max_tokens)
        while waiting or engine.sequences:
            while waiting and len(engine.sequences) < NUM_AT_A_TIME:
                engine.start(waiting.popleft())
            engine.step()
            for sequence in [each for each in engine.sequences if each.finish_reason is not None]:
                engine.stop(sequence)
                if sequence.error is not None:
                    raise ModelError(f"model {files.name}: {sequence.error}")
            progress.update(task, completed=engine.counters.num_generation_tokens)
    return [sequence.token_ids.tolist() for sequence in sequences]


def _of_one(sampling: SamplingParams, number: int) -> SamplingParams:
    """Return the sampling of the text with this number; the seed combines the number with that of `sampling`."""
    seed = ((sampling.seed or 0) << 32) + number & MAX_SEED
    return sampling.model_copy(update={"seed": seed, "ignore_eos": True})
