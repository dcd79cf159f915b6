"""The types in which GGUF files store tensors: their names, and how many bytes hold how many numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorType:
    """A type by its name in ggml. A row is so many blocks, each of the same bytes and numbers."""

    name: str
    block: int  # numbers
    num_bytes: int  # of a block


READABLE = {  # by their numbers in files
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
BITS = {each.name: each.num_bytes * 8 / each.block for each in READABLE.values()}  # of a number, by its type


@dataclass(frozen=True)
class PackedKind:
    """A form that matrices of a type are packed in: a code, its bits, neighbours that share a scale, offsets."""

    code: str
    bits: int
    group: int
    has_offsets: bool


_INT4, _INT8, _UINT8 = (
    PackedKind("uint4", 4, 32, True),
    PackedKind("int8", 8, 32, False),
    PackedKind("uint8", 8, 32, True),
)
_IQ4 = PackedKind("iq4_nl", 4, 32, False)
PACKED = {  # as `blocks` unpacks them
    "Q4_0": _INT4,
    "Q4_1": _INT4,
    "Q5_0": _INT8,
    "Q5_1": _UINT8,
    "Q8_0": _INT8,
    "Q2_K": PackedKind("uint4", 4, 16, True),
    "Q3_K": PackedKind("int8", 8, 16, False),
    "Q4_K": _INT4,
    "Q5_K": _UINT8,
    "Q6_K": PackedKind("int8", 8, 16, False),
    "IQ4_NL": _IQ4,
    "IQ4_XS": _IQ4,
}
OTHERS = {  # that are refused by their names
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


def type_of(number: int, tensor: str) -> TensorType:
    """The type that a file gives a tensor. Raises ValueError for one that is not read here."""
    if number in READABLE:
        return READABLE[number]
    name = OTHERS.get(number, f"type {number}")
    known = ", ".join(each.name for each in READABLE.values())
    raise ValueError(f"its tensor {tensor} is stored as {name}; expected one of {known}")
