"""Jobs with slots of one buffer get separate caches' tokens."""

from __future__ import annotations

import time

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel, load_transformers
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows, run_together

pytestmark = pytest.mark.long

ENGINES_HERE = ("autoregressive", "token-recycling", "tokenswift", "griffin")
OTHERS = [name for name in ENGINES_HERE if name != "token-recycling"]

NUM_SLOTS, MAX_TOKENS = 2, 16
PROMPT = "The lighthouse keeper counted the ships each evening, and on the ninth of November there was one too many. "


class SlottedTarget(TargetModel):
    """Takes caches from an arena full of NaN."""

    def use_slots(self, max_length: int) -> KVArena:
        self.arena = KVArena(self.cache_shape, NUM_SLOTS, max_length)
        self.arena.buffer.fill_(torch.nan)
        return self.arena

    def new_cache(
        self, max_length: int, num_held: int = 0, forgets: bool = False, lora: str | None = None
    ) -> FullKVCache:
        return self.arena.new_cache(max_length)


def prompt_ids(target: TargetModel, number: int) -> list[int]:
    return TextCodec(target.files).encode(PROMPT * (1 + number))


def let_helpers_end(target: TargetModel) -> None:
    if isinstance(target.forwards, NativeForwards):
        team = target.forwards.team
        while team.library.team_is_busy(team.handle):
            time.sleep(0.001)
        team.hold([])


def generate(target: TargetModel, engine_name: str) -> list[list[int]]:
    """Run two of four jobs at a time, so that the last two reuse slots."""
    engine, outputs = Engine(target, create_drafter(engine_name, target, free_rows)), []
    for first in (0, NUM_SLOTS):
        sequences = []
        for number in range(first, first + NUM_SLOTS):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=number, ignore_eos=True, min_p=0.1)
            sequences.append(Sequence(f"s{number}", prompt_ids(target, number), sampling, target.vocab_size))
        run_together(engine, sequences)
        let_helpers_end(target)
        outputs += [sequence.output_ids.tolist() for sequence in sequences]
    return outputs


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("engine_name", "loads"),
    [
        *((name, "kernels") for name in ENGINES_HERE),
        ("token-recycling", "transformers"),
        *(
            pytest.param(name, "transformers", marks=pytest.mark.slow)
            for name in ENGINES_HERE
            if "recycling" not in name
        ),
    ],
)
def test_every_engine_gives_the_same_tokens(target: TargetModel, engine_name: str, loads: str) -> None:
    forwards = target.forwards
    if loads == "transformers":
        forwards = load_transformers(target.files, target.dtype, target.device)
    plain, slotted = TargetModel(forwards, target.files), SlottedTarget(forwards, target.files)
    arena = slotted.use_slots(len(prompt_ids(target, 2 * NUM_SLOTS - 1)) + MAX_TOKENS)
    assert generate(slotted, engine_name) == generate(plain, engine_name)
    assert len(arena.leases.free) == NUM_SLOTS, "nobody holds on to a cache"
