from __future__ import annotations

import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.training.feature_files import TextFeatures
from swiftbatch.worker.training.training_texts import Text, hidden_states


def featured(target: TargetModel, texts: list[Text]) -> list[TextFeatures]:
    """Return texts with the target's features, as from a file."""
    return [
        TextFeatures("books", text.first_row, torch.tensor(text.token_ids, dtype=torch.uint32), _features(target, text))
        for text in texts
    ]


def _features(target: TargetModel, text: Text) -> torch.Tensor:
    return hidden_states(target, text.token_ids).to(torch.bfloat16).clone()
