"""A driver without GPUs: fakes of `libcuda.so.1` and `libnvidia-ml.so.1`, for a program of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

UUIDS = tuple(f"GPU-{number}0000000-aaaa-bbbb-cccc-000000000000" for number in range(9))
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc compiles the fake driver")

CUDA = """
#include <stdio.h>
#include <stdlib.h>
int cuDriverGetVersion(int *version) { *version = atoi(getenv("FAKE_CUDA")); return 0; }
int cuInit(unsigned flags) { fprintf(stderr, "cuInit was called\\n"); return 100; }
"""
NVML = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
static u64 number(const char *name) { return getenv(name) ? strtoull(getenv(name), 0, 0) : 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int result) { return "fake"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = number("FAKE_CUDA"); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strcpy(text, getenv("FAKE_DRIVER")); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("FAKE_NUM_GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(u64)(index + 1); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { *handle = (void *)9; return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    if ((u64)handle == 9) strcpy(text, "MIG-slice");
    else sprintf(text, "GPU-%llu0000000-aaaa-bbbb-cccc-000000000000", (u64)handle - 1);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { strcpy(text, "NVIDIA H100 PCIe"); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetNumGpuCores(void *handle, unsigned *count) { *count = 114 * 128; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, u64 *memory) {
    memory[0] = 85000000000; memory[1] = 80000000000; memory[2] = 5000000000; /* total, free, used */
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, u64 *count) {
    *count = number("FAKE_ECC");
    return type == 1 && counter == 0 ? 0 : 2; /* uncorrected, volatile; else an invalid argument */
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *bits) { *bits = number("FAKE_REASONS"); return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { *degrees = 61; return 0; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *percents) {
    if (getenv("FAKE_LACKS_RATES")) return 3; /* not supported */
    percents[0] = 75; percents[1] = 20; /* of the GPU, of its memory */
    return 0;
}
"""


def run_with_gpus(folder: Path, program: str, *arguments: str, num_gpus: int = 1, **variables: str) -> str:
    """Run a Python program on a machine with fake GPUs; return its output. Fails if it fails or calls `cuInit`."""
    process = process_with_gpus(folder, program, *arguments, num_gpus=num_gpus, **variables)
    assert process.returncode == 0, process.stderr
    assert "cuInit was called" not in process.stderr
    return process.stdout


def process_with_gpus(
    folder: Path, program: str, *arguments: str, num_gpus: int = 1, **variables: str
) -> subprocess.CompletedProcess[str]:
    for name, source in (("libcuda.so.1", CUDA), ("libnvidia-ml.so.1", NVML)):
        if not (folder / name).exists():
            command = ["gcc", "-shared", "-fPIC", "-o", str(folder / name), "-x", "c", "-"]
            subprocess.run(command, input=source, text=True, check=True)
    fake = {"FAKE_NUM_GPUS": str(num_gpus), "FAKE_DRIVER": "580.65.06", "FAKE_CUDA": "13000"}
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"LD_LIBRARY_PATH": str(folder), **fake, **variables}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
