"""GRIFFIN's draft model in the compiled kernels; it refuses inputs that would crash them."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, LayerWeights
from swiftbatch.worker.kernels.kernel_sizes import LANES
from swiftbatch.worker.kernels.native_decoder import NativeLayers
from swiftbatch.worker.kernels.native_library import Team
from swiftbatch.worker.kernels.native_weights import ELEMENTS, check_weights, checked, load_weight
from swiftbatch.worker.kernels.quantized_weights import Linear
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.kernels.row_tables import Rows

SOURCES = ("feature", "token", "fused")  # in the order of `fusion_source` in source/api.h
ROLES = {  # in the order of `griffin_role` in source/api.h
    name: number for number, name in enumerate(("fuse", "expand", "contract", "predict", "regress", "norm 0", "norm 1"))
}
MOST_PARTS = 2


class CGriffinSizes(ctypes.Structure):
    """`griffin_sizes` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", "hidden", "num_parts")),
        ("parts", ctypes.c_int32 * MOST_PARTS),
        ("expansion", ctypes.c_int32),
    )


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


class NativeGriffin:
    def __init__(self, weights: GriffinWeights, team: Team) -> None:
        """Raise ValueError for weights that do not fit together."""
        _check(weights)
        self._sizes = weights.sizes
        self._layer = NativeLayers(weights.sizes, [weights.layer], weights.rotary, team)
        self._team, self._library = team, team.library
        self._has_head = weights.predict is not None
        sizes = CGriffinSizes(
            element=ELEMENTS[weights.sizes.dtype],
            hidden=weights.sizes.hidden,
            num_parts=len(weights.parts),
            parts=(ctypes.c_int32 * MOST_PARTS)(*(SOURCES.index(source) for source, _ in weights.parts)),
            expansion=weights.expansion(),
        )
        self._handle: int = self._library.griffin_new(ctypes.byref(sizes))
        weakref.finalize(self, team.retire, self._library.griffin_free, self._handle)
        for role, linear, _ in weights.linears():
            load = functools.partial(self._library.griffin_load, self._handle, ROLES[role])
            load_weight(load, linear.weight, linear.bias)

    def forward(self, groups: Sequence[Rows], features: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and regressed features of all rows, `[num_rows, hidden]` like all inputs.

        Keys and values go to their slots. Raises ValueError for inputs of another shape or dtype.
        """
        shape = (sum(len(group) for group in groups), self._sizes.hidden)
        features = checked("features", features, shape, self._sizes.dtype)
        embeddings = checked("embeddings", embeddings, shape, self._sizes.dtype)
        state = torch.empty(shape)
        with self._team.lock:
            inputs = features.data_ptr(), embeddings.data_ptr()
            self._library.griffin_fuse(self._handle, self._team.handle, shape[0], *inputs, state.data_ptr())
        self._layer.run(groups, range(1), state)
        return self._head(state)

    def _head(self, state: Tensor) -> tuple[Tensor, Tensor]:
        if not self._has_head:
            return state.to(self._sizes.dtype), state.to(self._sizes.dtype)
        predicted, regressed = (torch.empty(state.shape, dtype=self._sizes.dtype) for _ in range(2))
        with self._team.lock:
            outputs = predicted.data_ptr(), regressed.data_ptr()
            self._library.griffin_head(self._handle, self._team.handle, len(state), state.data_ptr(), *outputs)
        return predicted, regressed


def _check(weights: GriffinWeights) -> None:
    if len(weights.parts) > MOST_PARTS or any(source not in SOURCES for source, _ in weights.parts):
        raise ValueError(f"found a fusion of {[source for source, _ in weights.parts]}, expected up to {MOST_PARTS}")
    if weights.expansion() % LANES:
        raise ValueError(f"found an expansion to {weights.expansion()}, expected a multiple of {LANES}")
    if (weights.predict is None) != (weights.regress is None) or bool(weights.parts) != (weights.contract is not None):
        raise ValueError("found a part of a head or of a fusion without the rest of it")
    for role, linear, shape in weights.linears():
        check_weights([(role, linear.weight, shape), (f"bias of {role}", linear.bias, shape[:1])], weights.sizes.dtype)
        if role.startswith("norm") and linear.bias is None:
            raise ValueError(f"found no bias of {role}")
