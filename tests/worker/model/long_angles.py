"""Phi models with longrope angles, cut down."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

SHORT_LENGTH = 128  # published: 4096; both lengths are cut by the same factor
MOST_POSITIONS = 4096


def _factors(seed: int, most: float, number: int) -> list[float]:
    """Grow with the dimension, as published factors do."""
    numbers = random.Random(seed)
    return sorted(round(numbers.uniform(1.0, most), 3) for _ in range(number))


PHI = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "architectures": ["Phi3ForCausalLM"],
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.3,
    "intermediate_size": 96,
    "max_position_embeddings": MOST_POSITIONS,
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "original_max_position_embeddings": SHORT_LENGTH,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 97,
}
PHI4_MINI: dict[str, Any] = PHI | {
    "full_attn_mod": 1,
    "hidden_size": 256,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"long_factor": _factors(1, 48.0, 48), "short_factor": [1.0] * 48, "type": "longrope"},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0",
}
PHI35_MINI: dict[str, Any] = PHI | {
    "hidden_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rope_scaling": {
        "long_factor": _factors(2, 64.0, 48),
        "short_factor": _factors(3, 3.0, 48),
        "type": "longrope",
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.43.3",
}
LONG_ANGLES = {
    "Phi-4-mini-instruct": PHI4_MINI,
    "Phi-3.5-mini-instruct": PHI35_MINI,
    "Phi-4-mini as newer versions save it": {
        k: v for k, v in PHI4_MINI.items() if k not in ("rope_scaling", "rope_theta")
    }
    | {
        "rope_parameters": PHI4_MINI["rope_scaling"]
        | {
            "original_max_position_embeddings": SHORT_LENGTH,
            "partial_rotary_factor": 0.75,
            "rope_theta": 10000.0,
            "rope_type": "longrope",
        }
    },
}


def text(num_tokens: int, seed: int = 0) -> Sequence[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 97) for _ in range(num_tokens)]
