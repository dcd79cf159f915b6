"""Kernels compiled for A100 and H100, in the sizes of Llama 3.1 8B."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from swiftbatch.worker.kernels.kernel_sizes import FEW_ROWS
from tests import ROOT
from tests.worker.kernels.cuda.kernel_constants import (
    OTHER_WIDTHS,
    block_choice_kernels,
    coded_kernels,
    kernels,
    kernels_besides_attention,
    latent_kernels,
    narrow_kernels,
    state_kernels,
    striped_kernels,
    wide_kernels,
)
from tests.worker.kernels.cuda.product_constants import DTYPES, expert_kernels, linear_kernels, packed_kernels
from tests.worker.sampling.cuda.compile_parts import MOST_SHARED, drawing_launches

pytestmark = pytest.mark.long

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes per program
H100, BOTH = (90,), (80, 90)
KINDS = pytest.mark.parametrize(
    ("dtype", "capabilities"),
    [
        pytest.param("bf16", H100, id="bf16 on H100"),
        pytest.param("bf16", BOTH, id="bf16", marks=pytest.mark.slow),
        pytest.param("fp32", BOTH, id="fp32", marks=pytest.mark.slow),
    ],
)
ATTENTION = (
    *("prefix", "prefix in pages", "prefix with biases", "prefix with a window"),
    *("tail", "packed tail", "tail with a window"),
)
# Instructions per weight and thread in the loop over the depth, with 32 and 64 rows; before, int4 took 9.1, FP8 9.9.
LIMITS = {"packed uint4": 3.2, "packed uint4 with offsets": 6.5, "packed e4m3": 6.5, "packed e2m1": 3.8}
LIMITS |= {"packed uint4 in parts": 3.2, "packed e4m3 in parts": 6.5}
LIMITS |= {f"{name} of {FEW_ROWS} rows": limit for name, limit in LIMITS.items()}
# Of the other forms, as reached: with fewer columns or more rows a product has more to do per weight.
REACHED = {
    "packed uint4 without offsets": 3.2,
    "packed e4m3 of another depth": 6.5,
    "packed e2m1 in blocks of 16": 6.5,
    "packed iq4_nl": 8.7,
    "packed int8": 6.5,
    "packed uint8": 7.2,
    "packed uint4 of few columns": 4.2,
    "packed e4m3 of few columns": 7.1,
}
REACHED |= {f"{name} of {FEW_ROWS} rows": limit for name, limit in REACHED.items()}
IN_OTHER_FORMS = (  # their own form is compiled daily
    *("tail", "rope with norms", "rope, then norms", "embed, scaled", "norm", "add, scaled, and norm"),
    *("norm of one more", "norm of distances from the mean", "gelu", "relu2", "linear with bias", "head"),
    *(name for name in packed_kernels() if name not in LIMITS),
    *(f"linear of {FEW_ROWS} rows", "linear of few columns"),
    *("prefix in int8", "tail in int8", "rope in e4m3"),
    "prefix with biases",
    *("joined rows, 1,024 wide", "joined rows, 4,096 wide", "norm and add", "xielu", "values of heads"),
    *(name for name in drawing_launches() if "form" in name),
    *("choice of Qwen3", "choice of Phi-3.5", "sort of choices", "experts' downs", "sum of choices"),
    "experts' ups alone",
    *(f"states: {name} of Nemotron-H 8B" for name in ("heads", "weights", "walk", "norm", "moves")),
    *("FP8 experts", "NVFP4 experts", "int4 experts", "choice of gpt-oss", "choice of Qwen2, with a share"),
    *(
        "prefix with a window",
        "tail in e4m3",
        "rope with norms of its own for each head",
    ),
    "norm, add and norm",
    *("latent prefix of many heads", "latent prefix with biases"),
    *("striped prefix in e4m3", "striped tail in e4m3", "rope of striped heads", "norm, add, scale and norm"),
    "rope of queries alone",
    *(name for name in narrow_kernels("bf16") if "window" not in name),
    "choice of Gemma 4",
    *("kept latents beside index keys", "index scores of GLM 5"),
    *("prefix of chosen blocks", "tail behind chosen blocks", "rope of index heads", "limited silu"),
    *("prefix", "sort of choices among 512 experts", "rope, packed", "rope with scales", "norm with biases"),
    *(name for name in wide_kernels("bf16") if not name.startswith(("linear", "sort of choices"))),
)
WIDE = [f"{name} of heads of {width}" for name in ("prefix", "tail", "packed tail") for width in OTHER_WIDTHS]
Report = dict[str, Any]


@pytest.fixture(scope="module")
def compiled() -> Callable[..., list[Report]]:
    """Reports from another process without an interpreter; some kernels are only compiled for H100."""
    known = dict[tuple[str, tuple[int, ...], str], list[Report]]()

    def reports(dtype: str, capabilities: tuple[int, ...], *names: str) -> list[Report]:
        asked = asked_for(capabilities, names)
        if any((dtype, capabilities, name) not in known for name in asked):
            group = WIDE if set(asked) <= set(WIDE) else [name for name in kernels(dtype) if name not in WIDE]
            group += drawing_launches() if dtype == "bf16" and group is not WIDE else ()
            for report in compile_elsewhere(dtype, capabilities, asked_for(capabilities, group)):
                known.setdefault((dtype, capabilities, report["kernel"]), []).append(report)
        return [report for name in asked for report in known[dtype, capabilities, name]]

    return reports


def asked_for(capabilities: tuple[int, ...], names: Iterable[str]) -> list[str]:
    return [name for name in names if capabilities != H100 or name not in IN_OTHER_FORMS]


def compile_elsewhere(dtype: str, capabilities: tuple[int, ...], names: list[str]) -> list[Report]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(ROOT / "build" / "triton"), "PYTHONPATH": str(ROOT)}
    asked = ",".join(map(str, capabilities))
    command = [sys.executable, "-m", "tests.worker.kernels.cuda.compiling", dtype, asked, *names]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


FEW_BYTES = 32  # of the stack, outside of loops over keys: some loads for each split
FEW_BYTES_OF_CODES = 72  # of wide heads in 8 bits


def fits(report: Report) -> bool:
    most = FEW_BYTES if "prefix" in report["kernel"] else 0
    most = FEW_BYTES_OF_CODES if report["kernel"].startswith("striped prefix in") else most
    spills = report["stack"] > most or report["spilled"] > 0
    return not spills and report["shared"] <= SHARED[report["capability"]]


@KINDS
def test_attention_spills_nothing_and_fits_into_shared_memory(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    reports = compiled(dtype, capabilities, *ATTENTION)
    assert len(reports) == len(asked_for(capabilities, ATTENTION)) * len(capabilities)
    assert all(fits(report) for report in reports), reports


@pytest.mark.parametrize("capabilities", [H100, pytest.param(BOTH, marks=pytest.mark.slow)])
def test_warps_of_the_prefix_lie_along_its_rows_and_two_programs_share_a_processor(
    compiled: Callable[..., list[Report]], capabilities: tuple[int, ...]
) -> None:
    for report in compiled("bf16", capabilities, "prefix", "prefix in pages", "prefix with biases"):
        assert report["layouts"] == [[4, 1]]  # otherwise every block's probabilities pass through shared memory
        assert 2 * report["shared"] <= SHARED[report["capability"]]
        assert 2 * 4 * 32 * report["registers"] <= 2**16
        uses = "wgmma.mma_async" if report["capability"] == 90 else "mma.sync"
        assert [op for op in ("wgmma.mma_async", "mma.sync") if report["ops"][op]] == [uses]


@KINDS
def test_latent_attention_spills_nothing_and_fits_into_shared_memory(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    reports = compiled(dtype, capabilities, *latent_kernels(dtype))
    assert len(reports) == len(asked_for(capabilities, latent_kernels(dtype))) * len(capabilities)
    assert all(fits(report) for report in reports), reports
    if dtype == "bf16":
        for report in (each for each in reports if each["kernel"].startswith("latent prefix")):
            assert report["ops"]["cp.async"] > 16, report
            assert report["ops"]["wgmma.mma_async" if report["capability"] == 90 else "mma.sync"], report


@KINDS
def test_attention_of_wide_heads_and_to_blocks_spills_nothing_and_fits_into_shared_memory(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    names = striped_kernels(dtype) | block_choice_kernels(dtype)
    reports = compiled(dtype, capabilities, *names)
    assert len(reports) == len(asked_for(capabilities, names)) * len(capabilities)
    assert all(fits(report) for report in reports), reports
    if dtype == "bf16":
        for report in (each for each in reports if each["kernel"] == "striped prefix"):
            assert report["ops"]["cp.async"] > 16, report
            assert report["ops"]["wgmma.mma_async" if report["capability"] == 90 else "mma.sync"], report


@KINDS
def test_attention_of_narrow_values_spills_nothing_and_fits_into_shared_memory(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    names = narrow_kernels(dtype)
    reports = compiled(dtype, capabilities, *names)
    assert len(reports) == len(asked_for(capabilities, names)) * len(capabilities)
    assert all(fits(report) or (dtype == "fp32" and "tail" in report["kernel"]) for report in reports), reports
    if dtype == "bf16":
        for report in (each for each in reports if each["kernel"].startswith("narrow prefix")):
            assert report["layouts"] == [[4, 1]], report
            assert report["ops"]["wgmma.mma_async" if report["capability"] == 90 else "mma.sync"], report


@KINDS
def test_all_other_kernels_spill_nothing_and_fit_into_shared_memory(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    names = [*kernels_besides_attention(), *linear_kernels(dtype)]
    reports = compiled(dtype, capabilities, *names)
    assert len(reports) == len(capabilities) * len(asked_for(capabilities, names))
    assert all(fits(report) for report in reports), reports


@KINDS
def test_experts_spill_nothing_and_share_a_processor(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    """One of two programs, or four with packed weights, loads weights while others multiply."""
    reports = compiled(dtype, capabilities, *expert_kernels(dtype))
    assert len(reports) == len(capabilities) * len(asked_for(capabilities, expert_kernels(dtype)))
    for report in reports:
        assert fits(report), report
        if report["layouts"]:
            num_programs = 2 if report["kernel"].startswith("experts") else 3 if report["capability"] == 80 else 4
            assert report["layouts"] == [[4, 1]], report  # no weight is unpacked twice
            assert num_programs * report["shared"] <= SHARED[report["capability"]], report
            assert num_programs * 128 * report["registers"] <= 2**16, report


@KINDS
def test_states_spill_nothing_and_several_programs_share_a_processor(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    reports = compiled(dtype, capabilities, *state_kernels(dtype))
    assert len(reports) == len(capabilities) * len(asked_for(capabilities, state_kernels(dtype)))
    for report in reports:
        assert fits(report), report
        if "walk of" in report["kernel"]:
            assert 3 * 32 * report["warps"] * report["registers"] <= 2**16, report


@KINDS
def test_kernels_for_the_most_rows_spill_nothing_and_fit_into_shared_memory(
    compiled: Callable[..., list[Report]], dtype: str, capabilities: tuple[int, ...]
) -> None:
    reports = compiled(dtype, capabilities, *wide_kernels(dtype))
    assert len(reports) == len(capabilities) * len(asked_for(capabilities, wide_kernels(dtype)))
    for report in reports:
        assert fits(report), report
        if report["kernel"].startswith("linear") and dtype == "bf16" and report["capability"] == 90:
            assert report["layouts"] == [[8, 1]], report  # warps lie along the columns: no weight is read twice


EITHER = pytest.mark.parametrize("capabilities", [H100, pytest.param(BOTH, marks=pytest.mark.slow)])


def per_weight(report: Report) -> float:
    """Return the instructions per weight of a thread in the loop over the depth."""
    constants = kernels(report["dtype"])[report["kernel"]][1]
    return float(report["loop"] * report["warps"] * 32 / constants["TILE_COLUMNS"] / constants["BLOCK_DEPTH"])


@EITHER
def test_packed_weights_become_operands_in_registers_by_few_instructions(
    compiled: Callable[..., list[Report]], capabilities: tuple[int, ...]
) -> None:
    """On an A100 the weights pass through shared memory once more."""
    reports = compiled("bf16", capabilities, *packed_kernels())
    assert len(reports) == len(asked_for(capabilities, packed_kernels())) * len(capabilities)
    for report in reports:
        ops = report["loop ops"]
        assert fits(report), report
        assert "LDG" not in ops, report  # all reads are copies ahead of their use
        if report["capability"] == 90:
            assert ops["HGMMA"] == (16 if report["warps"] == 4 and "few" not in report["kernel"] else 8), report
            assert "STS" not in ops, report
            assert report["layouts"] == [[report["warps"], 1]], report  # no warp decodes what another one does
            assert per_weight(report) <= (LIMITS | REACHED).get(report["kernel"], 9.6), report
        else:
            assert per_weight(report) <= 12.2, report


@EITHER
def test_packed_products_multiply_as_the_plain_one_with_as_many_rows(
    compiled: Callable[..., list[Report]], capabilities: tuple[int, ...]
) -> None:
    """An A100's instructions must have the same parts of the depth, though one operand is in registers."""
    twins = {"packed uint4": "linear", f"packed uint4 of {FEW_ROWS} rows": f"linear of {FEW_ROWS} rows"}
    plain = {(each["kernel"], each["capability"]): each for each in compiled("bf16", capabilities, *twins.values())}
    for report in compiled("bf16", capabilities, *twins):
        its = plain.get((twins[report["kernel"]], report["capability"]))
        for what in ("products", "layouts", "warps", *["k widths"] * (report["capability"] == 80)) if its else ():
            assert report[what] == its[what], (what, report)


@pytest.mark.parametrize("capabilities", [H100, pytest.param(BOTH, marks=pytest.mark.slow)])
def test_keys_and_values_in_8_bits_become_numbers_once_and_are_read_sixteen_bytes_at_a_time(
    compiled: Callable[..., list[Report]], capabilities: tuple[int, ...]
) -> None:
    for report in compiled("bf16", capabilities, *coded_kernels("bf16")):
        # two registers of one of them
        assert fits(report) or (report["kernel"].startswith("attend") and report["stack"] == 8), report
        if report["kernel"].startswith("prefix"):
            assert report["layouts"] == [[4, 1]]
            assert 2 * 4 * 32 * report["registers"] <= 2**16
            assert report["copied"]["0x10"] == 16, report  # half of bfloat16's
            assert report["ops"]["cvt.rn.bf16x2.f32"] == 16, report  # probabilities
            assert report["ops"]["fma.rn.bf16x2"] == 2 * 64 * 128 // 128 // 2, report  # two numbers at a time


@pytest.mark.parametrize("capabilities", [H100, pytest.param(BOTH, marks=pytest.mark.slow)])
def test_what_draws_and_moves_rows_spills_nothing_and_fits_into_any_gpu(
    compiled: Callable[..., list[Report]], capabilities: tuple[int, ...]
) -> None:
    reports = compiled("bf16", capabilities, *drawing_launches())
    assert len(reports) == len(asked_for(capabilities, drawing_launches())) * len(capabilities)
    for report in reports:
        assert report["stack"] == report["local"] == 0, report
        assert report["shared"] <= MOST_SHARED, report


def test_prefixes_of_wide_heads_fit_into_shared_memory(compiled: Callable[..., list[Report]]) -> None:
    """Blocks of heads of 256 have room for two stages."""
    assert all(fits(report) for report in compiled("bf16", BOTH, "prefix of heads of 256"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_other_widths_fit_into_shared_memory(compiled: Callable[..., list[Report]], dtype: str) -> None:
    for report in compiled(dtype, BOTH, *WIDE):
        assert report["shared"] <= SHARED[report["capability"]]
        assert fits(report) or (dtype == "fp32" and "tail" in report["kernel"]), report


def test_every_kernel_that_is_launched_is_among_them() -> None:
    moving = "kv_kernels.py"  # `compile_parts.py` has their launches
    sources = [path for path in (ROOT / "worker/kernels/cuda").glob("*.py") if path.name != moving]
    griffin = (f"drafters/griffin/{name}" for name in ("cuda_griffin", "draft_layer_kernels"))
    apart = ("exactness/gpu_doctor/machine_checks", *griffin)
    sources += [ROOT / "worker" / f"{name}.py" for name in apart]
    launch = re.compile(r"^(?: {4}| {8})(\w+)\[.*\]\(", re.MULTILINE)
    launched = {name for path in sources for name in launch.findall(path.read_text())}
    assert launched == {kernel.__name__ for kernel, _ in kernels("bf16").values()}
    others = {*kernels_besides_attention(), *linear_kernels("bf16"), *packed_kernels(), *expert_kernels("bf16")}
    others |= {*coded_kernels("bf16"), *wide_kernels("bf16"), *latent_kernels("bf16"), *state_kernels("bf16")}
    others |= {*striped_kernels("bf16"), *narrow_kernels("bf16"), *block_choice_kernels("bf16")}
    assert set(kernels("bf16")) == {*ATTENTION, *WIDE, *others}
    of_every_day = {kernel.__name__ for name, (kernel, _) in kernels("bf16").items() if name not in IN_OTHER_FORMS}
    assert launched == of_every_day
