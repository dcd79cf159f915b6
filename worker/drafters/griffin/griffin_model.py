"""GRIFFIN's draft model (Hu et al. 2025, section 4.2): one decoder layer over fused features and tokens.

A row's inputs are a token's embedding and the target's hidden state that the token was drawn from. The row's outputs
are two features: one for the target's language model head, one for the draft's next row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from swiftbatch.worker.drafters.catalogue import FINGERPRINT, GRIFFIN, ORIGIN, ReadPart, read_part
from swiftbatch.worker.drafters.griffin.block_model import BlockConfig, BlockModel
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES, NUM_PLACES
from swiftbatch.worker.drafters.griffin.published_layers import (
    FeatureProjection,
    LayerConfig,
    NormedHead,
    Pair,
    PairLayer,
    PublishedFusion,
    TwoOutputs,
)
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, LayerWeights
from swiftbatch.worker.kernels.kernel_sizes import HEAD_BLOCKS, NUM_ROWS, num_splits
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.kernels.rope_scaling import Rotary, default_frequencies
from swiftbatch.worker.kernels.transformers_weights import layer_weights, linear_of
from swiftbatch.worker.kv.gpu_memory_plan import NO_DRAFTS, DraftMemory, slot_capacity, slot_sampling_bytes
from swiftbatch.worker.kv.model_sizes import ModelSizes, num_parameters
from swiftbatch.worker.model.model_files import ModelFiles, let_others_read
from swiftbatch.worker.sampling.cuda.sampling_rows import BLOCK, NUM_MASKED

Source = Literal["feature", "token", "fused"]
Fusion = Literal["token", "feature", "fused", "without-token", "without-fused", "none"]

SECOND_FUSIONS: dict[Fusion, tuple[Source, ...]] = {
    "token": ("fused", "token"),  # equation 7
    "feature": ("fused", "feature"),  # table 5
    "fused": ("fused", "fused"),  # table 5
    "without-token": ("fused",),  # table 6, ablation 2
    "without-fused": ("token",),  # table 6, ablation 3
    "none": (),  # no token-guided fusion: equation 6 alone, as in EAGLE
}
"""Sources that are fused once more with the first fusion; all but the first are the paper's ablations."""


@dataclass(frozen=True)
class GriffinConfig(LayerConfig):
    """Sizes of a draft model, and its ablation."""

    expansion_size: int  # width of the second fusion; 0: neither up-projector nor SiLU (table 6, ablation 1)
    fusion: Fusion = "token"
    has_token_enhanced_head: bool = True
    has_input_norm: bool = True  # published layers attend to fused rows that are not normed
    is_published: bool = False  # has GRIFFIN's published layers
    vocab_size: int = 0  # EAGLE-3: the target's tokens
    draft_vocab_size: int = 0  # EAGLE-3: the tokens of its own head

    @classmethod
    def for_target(cls, target: PreTrainedConfig) -> GriffinConfig:
        """Return the target's own sizes; the second fusion expands to the target's feed-forward size (A.3)."""
        num_heads = target.num_attention_heads
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=getattr(target, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // num_heads,
            expansion_size=target.intermediate_size,
        )


class TokenGuidedFusion(nn.Module):
    """Fuses features and token embeddings `[..., hidden]`, then guides the result by the tokens."""

    def __init__(self, config: GriffinConfig) -> None:
        super().__init__()
        size, self._sources = config.hidden_size, SECOND_FUSIONS[config.fusion]
        self.fuse = nn.Linear(2 * size, size)  # W_m, b_m
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in self._sources)
        width = len(self._sources) * size
        self.up = nn.Linear(width, config.expansion_size) if width and config.expansion_size else None  # W_u, b_u
        self.down = nn.Linear(config.expansion_size or width, size) if width else None  # W_d, b_d

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        fused = self.fuse(torch.cat([features, embeddings], dim=-1))  # h, equation 6
        if self.down is None:
            return fused  # type: ignore[no-any-return]
        known = {"feature": features, "token": embeddings, "fused": fused}
        parts = [norm(known[source]) for norm, source in zip(self.norms, self._sources, strict=True)]
        expanded = torch.cat(parts, dim=-1)
        if self.up is not None:
            expanded = silu(self.up(expanded))  # z, equation 7
        return self.down(expanded) + fused  # type: ignore[no-any-return]  # o, equation 8


class TokenEnhancedHead(nn.Module):
    """Two linear layers, so that token prediction and feature regression have separate output vectors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.predict = nn.Linear(size, size, bias=False)
        self.regress = nn.Linear(size, size, bias=False)
        nn.init.eye_(self.predict.weight)
        nn.init.eye_(self.regress.weight)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.predict(hidden), self.regress(hidden)


class GriffinModel(nn.Module):
    """Fusion, one decoder layer, head. `set_attention` chooses the attention."""

    def __init__(self, config: GriffinConfig) -> None:
        super().__init__()
        layer_config = config.layer_config()
        self.config = config
        self.fusion = _fusion_of(config)
        self.rotary = LlamaRotaryEmbedding(layer_config)
        self.projection: FeatureProjection | None = None
        self.head: TokenEnhancedHead | NormedHead | None = None
        if config.feature_layers:
            self.projection = FeatureProjection(config.hidden_size, config.feature_layers)
            self.layer = PairLayer(layer_config)
            self.head = NormedHead(config.hidden_size, config.draft_vocab_size, config.vocab_size, config.epsilon)
            return
        self.layer = LlamaDecoderLayer(layer_config, layer_idx=0)
        if not config.has_input_norm:
            self.layer.input_layernorm = nn.Identity()
        if config.is_published:
            self.layer.mlp = TwoOutputs(layer_config)
        if config.has_token_enhanced_head:
            self.head = TokenEnhancedHead(config.hidden_size)

    def set_attention(self, name: str) -> None:
        self.layer.self_attn.config._attn_implementation = name

    def forward(
        self, features: torch.Tensor, embeddings: torch.Tensor, positions: torch.Tensor, **attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict features and regress features, in the inputs' shape `[batch, num_rows, hidden]`.

        `positions [batch, num_rows]`; `attention` goes to the attention function.
        """
        fused = self.fusion(features, embeddings)
        hidden = self.layer(fused, position_embeddings=self.rotary(fused, positions), **attention)
        if self.config.is_published:
            return hidden[0], hidden[1]
        return (hidden, hidden) if self.head is None else self.head(hidden)

    def logits(self, predicted: torch.Tensor, target: TargetModel) -> torch.Tensor:
        """Return `[num_rows, vocab] float32` of predicted features, by the target's head or the model's own."""
        return self.head.logits(predicted) if isinstance(self.head, NormedHead) else target.logits(predicted)


def _fusion_of(config: GriffinConfig) -> TokenGuidedFusion | PublishedFusion | Pair:
    if config.feature_layers:
        return Pair()
    if config.is_published:
        return PublishedFusion(config.hidden_size, config.expansion_size, config.epsilon)
    return TokenGuidedFusion(config)


CONFIG, BLOCK_CONFIG = "griffin_config", "block_config"  # either is a JSON object in the file's header


def save_griffin(
    folder: Path, model: GriffinModel | BlockModel, model_fingerprint: str, origin: str | None = None
) -> None:
    """Write a draft model in bf16, with its config, the target's fingerprint, and an imported model's origin."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    key = CONFIG if isinstance(model, GriffinModel) else BLOCK_CONFIG
    header = {FINGERPRINT: model_fingerprint, key: json.dumps(asdict(model.config))}
    header |= {} if origin is None else {ORIGIN: origin}
    save_file(tensors, folder / GRIFFIN.name, metadata=header)
    let_others_read(folder / GRIFFIN.name)


def load_griffin(parts_folder: Path | None, target: TargetModel) -> GriffinModel:
    """Read the draft model in `parts_folder`, or in the target's own folder if it is None.

    Raises ModelError if there is no draft model, or if it belongs to another target.
    """
    part = read_part(GRIFFIN, target, parts_folder)
    model = _loaded(part, CONFIG, GriffinConfig, GriffinModel, target)
    if isinstance(model.head, NormedHead):
        found, expected = int((model.head.is_drafted > 0).sum()), model.config.draft_vocab_size
        if found != expected or len(model.head.is_drafted) != target.vocab_size:
            raise part.fault(f"`head.is_drafted` has {found} of {len(model.head.is_drafted)} tokens")
    return model


def load_block(parts_folder: Path | None, target: TargetModel) -> BlockModel | None:
    """Read a block drafter, or return None if the part is another draft model. Raises ModelError as `load_griffin`."""
    files = target.files
    with safe_open(GRIFFIN.find(files.name, files.path, files.fingerprint, parts_folder), framework="pt") as file:
        if BLOCK_CONFIG not in file.metadata():
            return None
    part = read_part(GRIFFIN, target, parts_folder)
    model = _loaded(part, BLOCK_CONFIG, BlockConfig, BlockModel, target)
    if not 0 <= model.config.mask_token_id < target.vocab_size or model.config.vocab_size not in (0, target.vocab_size):
        raise part.fault(f"header `{BLOCK_CONFIG}`: other tokens than those of {files.name}")
    return model


Model = TypeVar("Model", GriffinModel, BlockModel)


def _loaded(
    part: ReadPart, key: str, config_type: type[LayerConfig], make: Callable[[Any], Model], target: TargetModel
) -> Model:
    """Make a model of the config in a part's header and its tensors. Raises ModelError as `load_griffin` does."""
    try:
        config = config_type(**json.loads(part.header.get(key, "")))
        model = make(config)
    except (ValueError, TypeError, KeyError) as error:
        raise part.fault(f"header `{key}`: {error}") from error
    if config.hidden_size != target.hidden_size:
        raise part.fault(f"features of {config.hidden_size} numbers, but {target.files.name} has {target.hidden_size}")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(part.checked(shapes))
    model.to(target.device, target.dtype).eval().requires_grad_(False)
    model.rotary = LlamaRotaryEmbedding(config.layer_config()).to(target.device)  # its angles stay float32
    return model


@dataclass(frozen=True)
class GriffinWeights:
    """Linear layers by role; each of `parts` is one of `SOURCES` with its norm, weight and bias `[hidden]`."""

    sizes: DecoderSizes  # one layer's; `vocab` is the target's
    layer: LayerWeights
    rotary: Rotary
    fuse: Linear  # [hidden, 2 * hidden]
    parts: list[tuple[str, Linear]]
    expand: Linear | None  # [expansion, num_parts * hidden]
    contract: Linear | None  # [hidden, expansion], or without an expansion [hidden, num_parts * hidden]
    predict: Linear | None  # [hidden, hidden], as `regress`; both or none
    regress: Linear | None

    def expansion(self) -> int:
        return 0 if self.expand is None else len(self.expand.weight)

    def linears(self) -> Iterator[tuple[str, Linear, tuple[int, ...]]]:
        """Yield role, layer and expected weight shape of each layer outside the decoder layer."""
        hidden, width = self.sizes.hidden, len(self.parts) * self.sizes.hidden
        expected = {
            "fuse": (hidden, 2 * hidden),
            "expand": (self.expansion(), width),
            "contract": (hidden, self.expansion() or width),
            "predict": (hidden, hidden),
            "regress": (hidden, hidden),
        }
        for role, shape in expected.items():
            if (linear := getattr(self, role)) is not None:
                yield role, linear, shape
        for number, (_, norm) in enumerate(self.parts):
            yield f"norm {number}", norm, (hidden,)


def packed_weights(model: GriffinModel, vocab_size: int) -> GriffinWeights:
    """Pack a draft model for the kernels. Raises ValueError for sizes that they do not take."""
    config, fusion, head = model.config, model.fusion, model.head
    if not isinstance(fusion, TokenGuidedFusion) or isinstance(head, NormedHead):
        raise ValueError("found the published form of GRIFFIN or EAGLE-3, which only torch computes")
    layer_config = config.layer_config()
    sizes = DecoderSizes(
        num_layers=1,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=vocab_size,
        epsilon=layer_config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        dtype=fusion.fuse.weight.dtype,
    )
    return GriffinWeights(
        sizes,
        layer_weights(model.layer),
        Rotary(default_frequencies(layer_config.rope_parameters["rope_theta"], config.head_dim)),
        fuse=linear_of(fusion.fuse),
        parts=list(zip(SECOND_FUSIONS[config.fusion], [linear_of(norm) for norm in fusion.norms], strict=True)),
        expand=None if fusion.up is None else linear_of(fusion.up),
        contract=None if fusion.down is None else linear_of(fusion.down),
        predict=None if head is None else linear_of(head.predict),
        regress=None if head is None else linear_of(head.regress),
    )


MOST_CANDIDATES = 16  # candidates kept per row, 8 bytes each in every block of tokens
CAPACITY = slot_capacity(NUM_ENTRIES)


def griffin_memory(part: Path, _files: ModelFiles, sizes: ModelSizes) -> DraftMemory:
    try:
        with safe_open(part, framework="numpy") as file:
            config = GriffinConfig(**json.loads(file.metadata()[CONFIG]))
    except (ValueError, TypeError, KeyError):
        return NO_DRAFTS  # the loader reports the fault
    numbers = num_parameters([part]) + _stacked_numbers(config) + NUM_ROWS * _row_numbers(config)
    numbers += CAPACITY * config.head_dim  # angles
    logits = NUM_ROWS * sizes.vocab * 4 + ranking_bytes(sizes.vocab) + _scratch_bytes(config)
    return DraftMemory(part_bytes=numbers * sizes.item_size + logits, slot_bytes=_slot_bytes(config, sizes))


def _stacked_numbers(config: GriffinConfig) -> int:
    """Count the elements of the matrices that exist twice while they are stacked."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (heads + 2 * config.intermediate_size) * config.hidden_size


def _row_numbers(config: GriffinConfig) -> int:
    """Count a row's activations: pairs, parts, expanded; state, normed, change, predicted, regressed; heads; gates."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fusion = (2 + len(SECOND_FUSIONS[config.fusion])) * config.hidden_size + config.expansion_size
    return fusion + 5 * config.hidden_size + 3 * query + 2 * key + 3 * config.intermediate_size


def ranking_bytes(vocab: int) -> int:
    """Count the ranking's bytes: each block's logits and token ids, and each row's input and output."""
    told = 1024 + 4 * NUM_MASKED + vocab // 8 + 4
    return NUM_ROWS * (-(-vocab // BLOCK) * (MOST_CANDIDATES * 8 + 16) + MOST_CANDIDATES * 8 + told)


def _scratch_bytes(config: GriffinConfig) -> int:
    return num_splits(CAPACITY, HEAD_BLOCKS) * NUM_ROWS * config.num_heads * (config.head_dim + 1) * 4


def _slot_bytes(config: GriffinConfig, sizes: ModelSizes) -> int:
    """Count a slot's bytes: keys and values, features, token counts with their tables, bias."""
    numbers = 2 * CAPACITY * config.num_kv_heads * config.head_dim + NUM_PLACES * config.hidden_size
    return numbers * sizes.item_size + slot_sampling_bytes(sizes.vocab)
