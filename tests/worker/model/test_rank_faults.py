"""Models that several GPUs cannot share are refused with the reason, before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from swiftbatch.worker.kernels.rank_shares import RANK_CHOICES, Rank, columns_of, kv_heads_of
from swiftbatch.worker.model.decoder_config import read_decoder_config
from swiftbatch.worker.model.rank_faults import ranks_fault
from tests.worker.model.latent_configs import WITH_LATENTS
from tests.worker.model.routed_expert_configs import ROUTED

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
EXPERTS = ROUTED["Qwen3 30B A3B"] | {"num_attention_heads": 64, "num_key_value_heads": 4}


def fault_of(config: dict[str, Any], num_ranks: int) -> str | None:
    return ranks_fault(read_decoder_config(config), num_ranks)


@pytest.mark.parametrize("num_ranks", RANK_CHOICES)
def test_models_of_published_sizes_are_shared_by_up_to_8_gpus(num_ranks: int) -> None:
    assert fault_of(LLAMA, num_ranks) is None
    assert fault_of(EXPERTS, num_ranks) is None
    latent = {"num_attention_heads": 128, "num_key_value_heads": 128, "v_head_dim": 128, "intermediate_size": 18432}
    assert fault_of(WITH_LATENTS["DeepSeek R1"] | latent, num_ranks) is None


@pytest.mark.parametrize(
    ("changes", "num_ranks", "fault"),
    [
        ({}, 3, "found 3 GPUs, expected 1, 2, 4, 8"),
        ({"num_attention_heads": 66, "num_key_value_heads": 6, "head_dim": 128}, 4, "it has 66 heads"),
        ({"num_attention_heads": 48, "num_key_value_heads": 6, "head_dim": 128}, 4, "it has 6 heads of keys"),
        ({"num_attention_heads": 8, "head_dim": 64}, 8, "its heads have 512 numbers"),
        ({"intermediate_size": 512}, 8, "its layer 0 has 512 columns"),
        ({"intermediate_size": 1152}, 8, "its layer 0 has 1,152 columns"),
    ],
)
def test_a_model_that_gpus_cannot_share_is_refused_with_the_reason(
    changes: dict[str, Any], num_ranks: int, fault: str
) -> None:
    found = fault_of(LLAMA | changes, num_ranks)
    assert found is not None
    assert fault in found


def test_every_column_and_every_head_is_on_one_gpu_and_fewer_heads_than_gpus_on_several() -> None:
    for num_ranks in RANK_CHOICES[1:]:
        ranks = [Rank(number, num_ranks) for number in range(num_ranks)]
        for depth in (1024, 9728, 28672, 29568):
            columns = [each for rank in ranks for each in range(depth)[columns_of(depth, rank)]]
            assert columns == list(range(depth))
        assert [each for rank in ranks for each in range(8)[kv_heads_of(8, rank)]] == list(range(8))
    assert [kv_heads_of(2, Rank(number, 4)).start for number in range(4)] == [0, 0, 1, 1]
