import pytest
import torch

from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, SIGNIFICANT_BITS, TABLES, Code, PackedMatrix, stacked

CODES = sorted(TABLES)
COLUMNS, DEPTH, GROUP = 5, 64, 16


def packed(code: Code, offsets: bool = False, dtype: torch.dtype = torch.bfloat16) -> PackedMatrix:
    generator = torch.Generator().manual_seed(3)
    width = DEPTH * CODE_BITS[code] // 8
    codes = torch.randint(0, 256, (COLUMNS, width), generator=generator, dtype=torch.uint8)
    if code == "e4m3":
        codes[(codes & 127) == 127] = 1  # which are no numbers
    scales = torch.rand(COLUMNS, DEPTH // GROUP, generator=generator).half().float()
    return PackedMatrix(code, codes, scales, dtype, -scales * 7 if offsets else None)


def one_by_one(matrix: PackedMatrix) -> list[list[float]]:
    values = []
    for column in range(COLUMNS):
        values.append([])
        for k in range(DEPTH):
            byte = int(matrix.codes[column, k // 2 if CODE_BITS[matrix.code] == 4 else k])
            code = (byte >> 4 * (k % 2)) & 15 if CODE_BITS[matrix.code] == 4 else byte
            value = TABLES[matrix.code][code] * matrix.scales[column, k // GROUP]
            if matrix.offsets is not None:
                value = value + matrix.offsets[column, k // GROUP]
            values[-1].append(float(value.to(matrix.dtype)))
    return values


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("offsets", [False, True], ids=["scaled", "shifted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_each_number_is_its_code_s_scaled_and_rounded_once(code: Code, offsets: bool, dtype: torch.dtype) -> None:
    matrix = packed(code, offsets, dtype)
    assert matrix.dequantized().dtype == dtype
    assert matrix.dequantized().tolist() == one_by_one(matrix)


@pytest.mark.parametrize("code", CODES)
def test_rows_that_are_chosen_or_split_are_those_of_the_matrix(code: Code) -> None:
    matrix = packed(code, offsets=True)
    whole = matrix.dequantized()
    chosen = torch.tensor([4, 0, 3])
    assert torch.equal(matrix.rows(chosen).dequantized(), whole[chosen])
    assert [each.dequantized().tolist() for each in matrix.split([2, 3])] == [whole[:2].tolist(), whole[2:].tolist()]
    with pytest.raises(ValueError, match="found 5 rows, expected 6"):
        matrix.split([2, 4])


def test_matrices_that_are_stacked_lie_one_below_the_other_without_gaps() -> None:
    first = packed("uint4", offsets=True)
    second = PackedMatrix("uint4", first.codes[:2], first.scales[:1].expand(2, -1), first.dtype, first.scales[:2])
    whole = stacked([first, second])
    assert whole.form == first.form
    assert torch.equal(whole.dequantized(), torch.cat([first.dequantized(), second.dequantized()]))
    assert not second.scales.is_contiguous()
    assert stacked([second]).scales.is_contiguous()
    assert stacked([first]).codes is first.codes


def test_parts_that_do_not_fit_together_are_refused() -> None:
    matrix = packed("int8")
    with pytest.raises(ValueError, match="found scales"):
        PackedMatrix("int8", matrix.codes, matrix.scales[:, :3], torch.bfloat16)
    with pytest.raises(ValueError, match=r"found codes of torch\.int8"):
        PackedMatrix("int8", matrix.codes.view(torch.int8), matrix.scales, torch.bfloat16)
    with pytest.raises(ValueError, match="whose products round in front of their offsets"):
        PackedMatrix("int8", matrix.codes, matrix.scales / 3, torch.bfloat16, matrix.scales)
    rounded = (matrix.scales.view(torch.int32) | 16).view(torch.float32)  # times 127, which takes seven bits
    with pytest.raises(ValueError, match="whose products round in front of their offsets"):
        PackedMatrix("iq4_nl", matrix.codes[:, ::2], rounded, torch.bfloat16, rounded)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_and_offsets_that_are_no_numbers_are_refused(value: float) -> None:
    matrix = packed("int8")
    spoiled = matrix.scales.clone()
    spoiled[2, 1] = value
    for scales, offsets in ((spoiled, None), (matrix.scales, spoiled)):
        with pytest.raises(ValueError, match="found scales or offsets that are no finite numbers"):
            PackedMatrix("int8", matrix.codes, scales, torch.bfloat16, offsets)


@pytest.mark.parametrize("code", CODES)
def test_the_significant_bits_of_codes_are_what_their_numbers_take(code: Code) -> None:
    fractions = TABLES[code].nan_to_num().view(torch.int32).tolist()
    lowest = min((each & -each).bit_length() - 1 for each in ((bits & 0x7FFFFF) | 0x800000 for bits in fractions))
    assert SIGNIFICANT_BITS[code] == 24 - lowest
