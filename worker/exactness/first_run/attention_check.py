"""The next checks: attention gives a row its own bits, the right ones, and reads as fast as it should."""

from __future__ import annotations

import random

import torch

from swiftbatch.worker.exactness.first_run.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.first_run.one_layer import OneLayer, Placed
from swiftbatch.worker.exactness.first_run.parts import Parts

MOST_ERROR = {torch.bfloat16: 0.02, torch.float32: 1e-5}  # of the greatest number of a row
TIMED_ROWS = (1, 4, 16)  # of each slot


def check_attention(parts: Parts) -> Finding:
    """Trees behind prefixes of all lengths, over one slot and over several, against each row alone."""
    lengths = attended_lengths(parts)
    layer = OneLayer(parts, max(parts.extent.slot_counts), lengths[-1])
    rng = random.Random(0)
    rows = [_compared(parts, layer, rng, length) for length in lengths]
    differing, tried = (sum(int(row[name]) for row in rows) for name in ("differing", "tried"))
    error = max(float(row["error"]) for row in rows)
    bound = MOST_ERROR[parts.dtype]
    words = f"{differing_bits(differing, tried, 'rows')} from the row alone; error {error:.2g}, {bound:g} is allowed"
    return Finding(passed=differing == 0 and error <= bound, words=words, rows=rows)


def check_attention_speed(parts: Parts) -> Finding:
    """Reading of keys and values at the greatest length; slow is no fault."""
    length, rng = attended_lengths(parts)[-1], random.Random(1)
    layer = OneLayer(parts, max(parts.extent.slot_counts), length)
    rows: list[Row] = []
    for num_slots in parts.extent.slot_counts:
        for num_rows in TIMED_ROWS:
            placed = layer.placed(rng, length, num_slots, num_slots * num_rows)
            layer.attended(layer.random_query(1), placed)
            seconds = parts.seconds(layer.attend)
            num_bytes = sum(_prefix_bytes(parts, each) for each in placed)
            row: Row = {"length": length, "slots": num_slots, "rows": sum(len(each) for each, _ in placed)}
            rows.append(row | {"ms": 1000 * seconds, "GB/s": num_bytes / seconds / 1e9})
    best = max(float(row["GB/s"]) for row in rows)
    return Finding(passed=True, words=f"keys and values are read at up to {best:,.1f} GB/s", rows=rows)


def attended_lengths(parts: Parts) -> list[int]:
    """List the lengths that the model has positions for."""
    longest = parts.files.max_positions
    return sorted({min(length, longest) for length in parts.extent.lengths})


def _compared(parts: Parts, layer: OneLayer, rng: random.Random, length: int) -> Row:
    """Compare all row and slot counts at one length."""
    differing, tried, error = 0, 0, 0.0
    for num_slots in parts.extent.slot_counts:
        for num_rows in parts.extent.row_counts:
            if num_rows < num_slots:
                continue
            placed = layer.placed(rng, length, num_slots, num_rows)
            found, among, worst = _against_alone(layer, placed, rng.randrange(2**31))
            differing, tried, error = differing + found, tried + among, max(error, worst)
    return {"length": length, "tried": tried, "differing": differing, "error": error}


def _against_alone(layer: OneLayer, placed: list[Placed], seed: int) -> tuple[int, int, float]:
    """Count rows that differ and all rows; find the greatest error of last rows, over their greatest number."""
    num_rows = sum(len(rows) for rows, _ in placed)
    query = layer.random_query(seed)[:num_rows]
    together = layer.attended(query, placed)
    differing, error, start = 0, 0.0, 0
    for rows, slot in placed:
        for row in range(len(rows)):
            alone = layer.attended(query[start + row : start + row + 1], [(rows.part(row, row + 1), slot)])
            differing += not torch.equal(alone[0], together[start + row])  # NaN differs from itself
        exact = layer.exact(query[start + row], rows, slot, row)
        distance = (together[start + row].double() - exact).abs().max() / exact.abs().max()
        error = max(error, float(distance.nan_to_num(torch.inf)))
        start += len(rows)
    return differing, num_rows, error


def _prefix_bytes(parts: Parts, placed: Placed) -> int:
    """Read once for all rows of a sequence."""
    rows, _ = placed
    return rows.boundary * parts.cache_shape(num_layers=1).bytes_per_position()
