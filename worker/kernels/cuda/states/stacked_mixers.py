"""The weights of a layer's mixer as its CUDA kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.states.ready import wide_roles
from swiftbatch.worker.kernels.decoder_weights import AnyLinear
from swiftbatch.worker.kernels.mixer_sizes import MixerForm, MixerSizes
from swiftbatch.worker.kernels.mixer_weights import MixerWeights, mixer_float_shapes

Stack = Callable[[Sequence[AnyLinear], torch.device], AnyLinear]


@dataclass(frozen=True)
class StackedMixer:
    """The products in front by what their rows share a form in: those of channels, and those of heads; that behind."""

    sizes: MixerSizes
    wide: AnyLinear  # inputs, gates, in a convolution alone the gates of inputs behind them
    narrow: AnyLinear | None  # a number or two of each head
    output: AnyLinear
    floats: dict[str, Tensor]  # on the device; `rates` are what decays are powers of

    @property
    def products(self) -> list[AnyLinear]:
        """All of them."""
        return [self.wide, self.output, *([] if self.narrow is None else [self.narrow])]


def stacked_mixer(mixer: MixerWeights, device: torch.device, stack: Stack) -> StackedMixer:
    """Copies of what is stacked. Raises ValueError for what does not fit, or what our kernels for GPUs do not have."""
    sizes, linears = mixer.sizes, mixer.linears
    if "scales" in mixer.floats or (sizes.in_scale, sizes.out_scale) != (1.0, 1.0):
        raise ValueError("found scales of a mixer's parts, which our kernels for GPUs do not have")
    for role, numbers, shape in mixer_float_shapes(mixer):
        if numbers is not None and tuple(numbers.shape) != shape:
            raise ValueError(f"found {role} as {list(numbers.shape)}, expected {list(shape)}")
    floats = {role: numbers.detach().float().to(device).contiguous() for role, numbers in mixer.floats.items()}
    if "rates" in floats:
        floats["rates"] = floats["rates"].exp()
    heads = ("betas", "steps") if sizes.form == MixerForm.DELTA_NET else ("steps",)
    return StackedMixer(
        sizes,
        stack([linears[role] for role in wide_roles(sizes)], device),
        None if sizes.form == MixerForm.CONVOLUTION else stack([linears[role] for role in heads], device),
        stack([linears["output"]], device),
        floats,
    )
