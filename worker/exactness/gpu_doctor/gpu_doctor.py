"""First run on a GPU: all checks in order, up to the first failure. `swiftbatch doctor --device cuda`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.run_records import AttentionName, Exactness, LinearName
from swiftbatch.worker.config import Computation
from swiftbatch.worker.exactness.doctor_verdicts import keep_verdict, verdict_key
from swiftbatch.worker.exactness.gpu_doctor.attention_check import check_attention, check_attention_speed
from swiftbatch.worker.exactness.gpu_doctor.findings import Check, Result
from swiftbatch.worker.exactness.gpu_doctor.forward_checks import (
    check_replay,
    check_rows,
    check_second_process,
    check_transformers,
)
from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import check_gemms, check_packed_gemms
from swiftbatch.worker.exactness.gpu_doctor.machine_checks import check_machine, check_noise, device_facts
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.hardware import hardware_of, resolve_device
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.native_library import chosen_numerics
from swiftbatch.worker.model.model_files import locate_model

CHECKS = (
    Check("machine", "what everything below was found on", check_machine),
    Check("products", "a row's products do not depend on its place or its neighbours", check_gemms),
    Check("packed products", "weights in 8 or 4 bits give the bits of the dequantized ones", check_packed_gemms),
    Check("attention", "a row's attention is its own, and right, at every length", check_attention),
    Check("attention speed", "the cache is read at the speed of the memory", check_attention_speed),
    Check("noise", "a draw takes the noise that every other device takes", check_noise),
    Check("rows", "speculative decoding gives the bits of plain decoding", check_rows),
    Check("replay", "a captured graph computes what its kernels do", check_replay),
    Check("transformers", "the forward is that of transformers", check_transformers),
    Check("second process", "a resumed job computes what it would have computed", check_second_process),
)
NEVER_PROVED = (
    "that two GPUs of one product agree: run this on each",
    "a worker that is killed under load: `swiftbatch chaos` does that",
    "speed, of a step and of all engines: `python -m bench gpu` measures it",
    "copies of checkpoints beside a step, rounds, caches on the host: `python -m bench gpu --everything` tries them",
    "a model over several GPUs",
)


class FirstRun(Frozen):
    """Result of the checks; `exact` means that all passed with the requested kernels."""

    verdict: Exactness
    model: str
    model_fingerprint: str
    dtype: str
    num_rows: int
    attention: AttentionName
    linear: LinearName  # the checks passed with this kernel
    asked_linear: LinearName
    machine: dict[str, str]
    results: list[Result]
    unproved: list[str]

    @property
    def failed(self) -> Result | None:
        last = self.results[-1]
        return None if last.finding.passed else last

    def page(self) -> str:
        """Return the end of the page; the results are printed before it."""
        if self.failed is None:
            checks = f"all {len(self.results)} checks passed, with prefixes by {self.attention}"
            head = f"{self.verdict}: {checks} and products by {self.linear}"
            if self.linear != self.asked_linear:
                head += f"; those by {self.asked_linear} failed: use --linear {self.linear}, which is exact"
        else:
            head = f"STOPPED at {self.failed.name}: {self.failed.finding.words}"
        model = f"model {self.model} ({self.model_fingerprint[:12]}), {self.dtype}, {self.num_rows} rows"
        return "\n".join([head, model, "still unproved:", *(f"  - {each}" for each in self.unproved)])


def run_checks(
    parts: Parts, report: Callable[[str], None] = lambda page: None, checks: Sequence[Check] = CHECKS
) -> FirstRun:
    """Run checks until one fails; `report` gets each one's page."""
    results, asked = list[Result](), parts.kernels
    for check in checks:
        started = time.perf_counter()
        finding = check.run(parts)
        results.append(
            Result(name=check.name, proves=check.proves, seconds=time.perf_counter() - started, finding=finding)
        )
        report(results[-1].page())
        if not finding.passed:
            break
        parts.kernels = dataclasses.replace(parts.kernels, linear=finding.linear or parts.kernels.linear)
        parts.forget_unused()
    return _first_run(parts, asked, results, checks)


def _first_run(parts: Parts, asked: CudaKernels, results: list[Result], checks: Sequence[Check]) -> FirstRun:
    not_run = [f"{check.proves} (not reached)" for check in checks[len(results) :]]
    failed = [] if results[-1].finding.passed else [results[-1].proves]
    untried = [each for result in results if (each := result.finding.unproved)]
    return FirstRun(
        verdict="exact up to ties" if failed or parts.kernels != asked else "exact",
        model=parts.files.name,
        model_fingerprint=parts.files.fingerprint,
        dtype=str(parts.dtype).removeprefix("torch."),
        num_rows=parts.kernels.num_rows,
        attention=parts.kernels.attention,
        linear=parts.kernels.linear,
        asked_linear=asked.linear,
        machine=device_facts(parts.device),
        results=results,
        unproved=[*failed, *not_run, *untried, *NEVER_PROVED],
    )


def first_run(config: Computation, report: Callable[[str], None]) -> FirstRun | None:
    """Check this machine's GPU with a model, and store the verdict; None if the kernels do not support the model.

    Raises ModelError and UserError.
    """
    files, device = locate_model(config.model), resolve_device(config.device)
    parts = Parts.of(files, config.dtype, device, config.cuda_kernels)
    if parts.loaded is None:
        return None
    parts.kernels = parts.kernels.for_weights(parts.weights.is_packed)
    found = run_checks(parts, report)
    hardware, threads = hardware_of(device.type), config.num_threads
    for kernels, verdict in [(config.cuda_kernels, found.verdict), *verdicts(found)]:
        key = verdict_key(
            files.fingerprint, config.dtype, device.type, threads, hardware, torch.__version__,
            chosen_numerics(device.type, config.dtype, kernels),
        )  # fmt: skip
        keep_verdict(key, verdict)
    return found


def verdicts(found: FirstRun) -> list[tuple[CudaKernels, Exactness]]:
    linears = found.asked_linear, found.linear
    asked, taken = (CudaKernels(found.attention, linear, found.num_rows) for linear in linears)
    passed: Exactness = "exact" if found.failed is None else "exact up to ties"
    return [(asked, found.verdict), (taken, passed)]
