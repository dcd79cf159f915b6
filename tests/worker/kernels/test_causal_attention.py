"""Causal attention for training is right up to bf16 rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from swiftbatch.worker.kernels.causal_attention import FAST_VARIANTS, causal_attention, is_fast
from swiftbatch.worker.kernels.native_library import NO_KERNELS, OVERRIDE, chosen_variant

BF16 = torch.bfloat16
SCALING = 0.125
HEADS = ((4, 2), (4, 4), (6, 2), (3, 1))  # query heads, key-value heads
CASES = (
    *((length, HEADS) for length in (1, 2, 63, 64, 65, 129, 300)),
    pytest.param(1025, HEADS[:1], marks=pytest.mark.slow),
)
MOST_OF_TORCH = 1.5
NOTHING = 1e-5  # rounding's rest of zero gradients
needs_causal = pytest.mark.skipif(chosen_variant() not in FAST_VARIANTS, reason="torch serves on this processor")

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def random_heads(batch_size: int, num_heads: int, num_kv_heads: int, length: int, size: float = 1.0) -> list[Tensor]:
    """Make views of `[batch, length, heads, 64]`."""
    generator = torch.Generator().manual_seed(length + num_heads)
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    drawn = [torch.randn(batch_size, length, count, 64, generator=generator) for count in counts]
    sizes = (size, size, 1.0, 1.0)
    return [(each * size).to(BF16).transpose(1, 2) for each, size in zip(drawn, sizes, strict=True)]


def gradients_of(attend: Attend, heads: list[Tensor], scaling: float = SCALING) -> list[Tensor]:
    inputs = [each.detach().requires_grad_() for each in heads[:3]]
    output = attend(*inputs, scaling)
    return [output.detach(), *torch.autograd.grad(output, inputs, heads[3])]


def by_definition(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ value


def by_torch(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)


def exact(heads: list[Tensor]) -> list[Tensor]:
    return gradients_of(by_definition, [each.double() for each in heads])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm())


def assert_as_good_as_torch(heads: list[Tensor]) -> None:
    expected, found, torch_found = exact(heads), gradients_of(causal_attention, heads), gradients_of(by_torch, heads)
    for mine, other, right in zip(found, torch_found, expected, strict=True):
        assert mine.dtype == BF16
        assert mine.shape == right.shape
        assert error(mine, right) <= MOST_OF_TORCH * error(other, right) + NOTHING
        largest = float(right.abs().max())
        assert float((mine.double() - right).abs().max()) <= 0.02 * largest + NOTHING


@needs_causal
@pytest.mark.parametrize(("length", "heads"), CASES)
def test_output_and_gradients_are_right_to_the_rounding_of_bf16(
    length: int, heads: tuple[tuple[int, int], ...]
) -> None:
    for num_heads, num_kv_heads in heads:
        assert_as_good_as_torch(random_heads(2, num_heads, num_kv_heads, length))


@needs_causal
def test_many_sequences_at_once_are_right() -> None:
    assert_as_good_as_torch(random_heads(20, 4, 2, 70))


@needs_causal
def test_what_lies_otherwise_in_memory_gives_the_same_bits() -> None:
    heads = random_heads(2, 4, 2, 130)
    expected = gradients_of(causal_attention, heads)
    wide = [torch.zeros(2, each.shape[1], 130, 128, dtype=BF16) for each in heads]
    for room, each in zip(wide, heads, strict=True):
        room[..., 3:67] = each  # unaligned rows
    lying = (
        [each.contiguous() for each in heads],
        [each.transpose(2, 3).contiguous().transpose(2, 3) for each in heads],
        [room[..., 3:67] for room in wide],
    )
    for views in lying:
        assert all(map(torch.equal, gradients_of(causal_attention, views), expected))


@needs_causal
@pytest.mark.parametrize(("length", "num_before"), [(65, 0), (513, 0), (129, 640)])
def test_every_call_and_every_number_of_threads_gives_the_same_bits(length: int, num_before: int) -> None:
    heads, before = split_heads(random_heads(2, 4, 2, num_before + length), num_before)
    attend = functools.partial(causal_attention, before=before) if num_before else causal_attention
    torch.set_num_threads(1)
    expected = gradients_of(attend, heads)
    for num_threads in (2, 3, 2, 1):
        torch.set_num_threads(num_threads)
        for _ in range(4):
            assert all(map(torch.equal, gradients_of(attend, heads), expected))


@needs_causal
@pytest.mark.parametrize("size", [1e3, 1e9])
def test_extreme_scores_give_numbers(size: float) -> None:
    """Each softmax has one key: outputs are rows of values without NaN."""
    heads = random_heads(1, 4, 2, 200, size)
    output, *gradients = gradients_of(causal_attention, heads)
    assert all(torch.isfinite(each).all() for each in (output, *gradients))
    assert error(output, exact(heads)[0]) <= 0.02 * float(output.double().norm())


@needs_causal
def test_nothing_that_comes_later_changes_a_bit() -> None:
    heads = random_heads(1, 4, 2, 200)
    before = gradients_of(causal_attention, heads)[0]
    for each in heads[:3]:
        each[:, :, 101:] = 3e38
    assert torch.equal(causal_attention(*heads[:3], SCALING)[:, :, :101], before[:, :, :101])


def split_heads(heads: list[Tensor], num_before: int) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Split off the later positions, and keys and values before them."""
    return [each[:, :, num_before:] for each in heads], (heads[1][:, :, :num_before], heads[2][:, :, :num_before])


@needs_causal
@pytest.mark.parametrize(("num_before", "length"), [(64, 70), (640, 300), (1024, 64), (64, 513)])
def test_the_end_of_a_text_attends_as_in_the_whole_to_the_bit(num_before: int, length: int) -> None:
    heads = random_heads(2, 4, 2, num_before + length)
    own, before = split_heads(heads, num_before)
    whole = causal_attention(*heads[:3], SCALING)
    assert torch.equal(causal_attention(*own[:3], SCALING, before), whole[:, :, num_before:])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_gradients_stop_at_what_is_before(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of the later positions equal the whole text's, where nothing else has one."""
    if not is_compiled:
        monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    heads, num_before = random_heads(2, 4, 2, 192 + 100), 192
    own, before = split_heads(heads, num_before)
    heads[3][:, :, :num_before] = 0
    expected = [each[:, :, num_before:] for each in exact(heads)[1:]]
    inputs = [each.detach().requires_grad_() for each in own[:3]]
    for each in before:
        each.requires_grad_()
    output = causal_attention(*inputs, SCALING, before)
    found = torch.autograd.grad(output, [*inputs, *before], own[3], allow_unused=True)
    assert found[3:] == (None, None)
    for mine, right in zip(found[:3], expected, strict=True):
        assert error(mine, right) <= 0.005 * float(right.norm())


@pytest.mark.parametrize("spoilt", ["query", "key"])
def test_scores_that_are_no_numbers_are_seen_in_the_output(spoilt: str) -> None:
    """Otherwise a training would continue with damaged weights, because its loss is finite."""
    heads = {name: torch.randn(1, 2, 70, 64, dtype=torch.bfloat16) for name in ("query", "key", "value")}
    heads[spoilt][0, 0, 66, 3] = torch.nan
    output = causal_attention(**heads, scaling=0.125)
    assert output[0, 0, 66].isnan().all()
    assert output[0, 0, :66].isfinite().all()
    assert output[0, 1].isfinite().all()


def test_torch_serves_where_no_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [each.float() for each in random_heads(1, 4, 2, 70)]
    others = [each[..., :32] for each in random_heads(1, 4, 2, 70)]
    for views in (heads, others):
        assert not is_fast(views[0])
        assert all(map(torch.equal, gradients_of(causal_attention, views), gradients_of(by_torch, views)))
    monkeypatch.setenv(OVERRIDE, NO_KERNELS)
    assert not is_fast(random_heads(1, 4, 2, 70)[0])


def test_what_does_not_fit_together_is_refused() -> None:
    query, key, value, _ = random_heads(2, 4, 2, 10)
    wrong = (
        (query[0], key, value),
        (query, key, value[:, :1]),
        (query[:, :3], key, value),
        (query, key[:, :, :9], value[:, :, :9]),
        (query[:1], key, value),
        (query, key[..., :32], value[..., :32]),
        (query, key[:, :0], value[:, :0]),
        (query.float(), key, value),
    )
    for each in wrong:
        with pytest.raises(ValueError, match="found query"):
            causal_attention(*each, SCALING)


@pytest.mark.parametrize("shape", [(2, 2, 63, 64), (2, 1, 64, 64), (1, 2, 64, 64), (2, 2, 64, 32)])
def test_what_is_before_is_refused_where_it_does_not_fit(shape: tuple[int, ...]) -> None:
    query, key, value, _ = random_heads(2, 4, 2, 10)
    before = torch.zeros(shape, dtype=BF16)
    with pytest.raises(ValueError, match="before them, expected the same but for a length that 64 divides"):
        causal_attention(query, key, value, SCALING, (before, before))
