"""`swiftbatch doctor`: whether this machine and model keep the exactness contract."""

from __future__ import annotations

import platform

import torch
import transformers

from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.run_records import Exactness, KVDtype
from swiftbatch.worker.config import Computation
from swiftbatch.worker.exactness.doctor_verdicts import keep_verdict, verdict_key
from swiftbatch.worker.exactness.forward_comparisons import MAX_LENGTH, Agreement, compare, num_caches, probe_rows
from swiftbatch.worker.forward.hardware import cpu_capability, hardware_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.gpu_kernel_choice import DEFAULT_KERNELS, with_kv
from swiftbatch.worker.kernels.native_library import chosen_variant, numerics_of, runnable_variants, why_none
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import locate_model

NUM_PROBED_ROWS = 2000


class Diagnosis(Frozen):
    """Result of a probe; `exact` means that no row differed in any bit from plain decoding."""

    verdict: Exactness
    num_rows: int
    num_differing: int
    agreement: Agreement
    model: str
    model_fingerprint: str
    dtype: str
    kv_dtype: KVDtype | None
    device: str
    cpu_capability: str
    num_threads: int
    hardware: str
    numerics: str
    instruction_set: str | None  # names the compiled kernels in use; None without any
    versions: dict[str, str]

    def key(self) -> str:
        kernels = DEFAULT_KERNELS.words if self.device == "cuda" else ""
        if self.instruction_set:
            kernels = numerics_of(self.instruction_set, self.dtype)
        return verdict_key(
            self.model_fingerprint,
            self.dtype,
            self.device,
            self.num_threads,
            self.hardware,
            self.versions["torch"],
            with_kv(kernels, self.kv_dtype),
        )

    def summary(self) -> str:
        meaning = (
            "every engine, batch and resume gives the same tokens as plain decoding"
            if self.verdict == "exact"
            else "rounding differs between row counts here: tokens can change where two candidates nearly tie"
        )
        return (
            f"{self.verdict}: {meaning}\n"
            f"{self.num_differing} of {self.num_rows} random tree rows differ from plain decoding\n"
            f"{self.agreement.summary()}\n"
            f"model {self.model} ({self.model_fingerprint[:12]}), {self.dtype} on {self.device} "
            f"({self.hardware}), {self.num_threads} threads, torch {self.versions['torch']}\n"
            f"numerics: {self.numerics}\n"
            f"{self._kernels()}"
        )

    def _kernels(self) -> str:
        if self.device != "cpu":
            return "kernels: torch's, on a GPU"
        if self.instruction_set is None:
            return f"kernels: torch's, since {why_none()}"
        if "native" not in self.numerics:
            return f"kernels: torch's, since those for {self.instruction_set} do not know this kind of model"
        what = "compiled" if self.numerics.startswith("cpu native") else "torch's, with attention compiled"
        return f"kernels: {what} at install, for {self.instruction_set}; here run {', '.join(runnable_variants())}"


def diagnose(config: Computation, num_rows: int = NUM_PROBED_ROWS) -> Diagnosis:
    """Compare `num_rows` tree rows with plain decoding, and some with transformers; store the verdict."""
    torch.set_num_threads(config.num_threads)
    files = locate_model(config.model)
    slots = SlotsWanted(MAX_LENGTH, num_slots=num_caches(config.num_rows))
    computed = (config.dtype, config.device, None, slots, config.cuda_kernels, config.kv_dtype)
    target = TargetModel.load(files, *computed)
    result = probe_rows(target, num_rows)
    diagnosis = Diagnosis(
        verdict="exact" if result.num_differing == 0 else "exact up to ties",
        num_rows=result.num_rows,
        num_differing=result.num_differing,
        agreement=compare(target, has_integer_rows=config.cuda_kernels.has_integer_rows),
        model=config.model,
        model_fingerprint=files.fingerprint,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=target.device.type,
        cpu_capability=cpu_capability(),
        num_threads=config.num_threads,
        hardware=hardware_of(target.device.type),
        numerics=target.numerics,
        instruction_set=chosen_variant() if target.device.type == "cpu" else None,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )
    keep_verdict(diagnosis.key(), diagnosis.verdict)
    return diagnosis
