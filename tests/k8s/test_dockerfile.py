from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from tests.k8s.kubernetes_parts import ROOT, pods, render

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def stages() -> dict[str, str]:
    found = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert len(found) == len(re.findall(r"^FROM ", DOCKERFILE, re.MULTILINE))
    return {name: base for base, name in found}


def test_without_a_target_the_image_is_the_one_for_cpus() -> None:
    assert list(stages())[-1] == "cpu"
    assert stages()["cpu"] == "python"


def test_every_stage_comes_from_one_before_it_or_from_a_pinned_image() -> None:
    known: list[str] = []
    for name, base in stages().items():
        assert base in known or re.fullmatch(r"[\w/-]+:[\w.-]*\d\.\d[\w.-]*", base), base
        known.append(name)
    mounted = re.findall(r"--mount=from=([\w-]+),", DOCKERFILE)
    assert set(mounted) == {"wheel", "toolkit", "flash-attention"} <= set(known)


def test_a_change_of_the_code_compiles_no_flash_attention_again() -> None:
    """The stage that takes an hour only has the dependencies below it."""
    assert stages()["flash-attention"] == stages()["cuda"] == "cuda-dependencies"
    assert (stages()["cuda-dependencies"], stages()["cuda12"]) == ("gpu", "cuda12-dependencies")
    dependencies = DOCKERFILE[DOCKERFILE.index("AS gpu") : DOCKERFILE.index("AS cuda\n")]
    flash = DOCKERFILE[DOCKERFILE.index("AS flash-attention") : DOCKERFILE.index("AS cuda-flash")]
    assert "from=wheel" not in dependencies + flash
    assert stages()["cuda-flash"] == "cuda"


def test_pip_can_read_the_requirements_that_the_image_takes_from_the_project() -> None:
    programs = re.findall(r'^RUN python -c "(import tomllib.*)" \\$', DOCKERFILE, re.MULTILINE)
    assert len(programs) == 2
    for program in programs:
        command = [sys.executable, "-c", program]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert all(Requirement(line) for line in printed.splitlines())
    assert {Requirement(line).name for line in printed.splitlines()} == {"einops", "flash-attn"}


def test_the_folder_of_nvcc_is_that_of_the_image_it_comes_from() -> None:
    found = re.search(r"source=/usr/local/cuda-(\d+\.\d+),", DOCKERFILE)
    assert stages()["toolkit"].startswith(f"nvidia/cuda:{found[1]}.")


def test_the_image_for_gpus_has_the_compiler_that_triton_asks_for() -> None:
    assert "gcc libc6-dev" in commands_of("gpu")


def commands_of(stage: str) -> str:
    return DOCKERFILE[DOCKERFILE.index(f" AS {stage}\n") + 1 :].split("\nFROM ")[0]


@pytest.mark.parametrize(
    ("stage", "index"), [("cuda12-dependencies", "cu126"), ("cpu", "cpu"), ("cuda-dependencies", None)]
)
def test_an_image_with_a_torch_for_another_device_is_not_built(stage: str, index: str | None) -> None:
    """Runs the stage's own check against torches."""
    found = re.findall(
        r"^ARG PIP_EXTRA_INDEX_URL=https://download\.pytorch\.org/whl/(\S+)$", commands_of(stage), re.MULTILINE
    )
    assert found == ([index] if index else [])
    [check] = re.findall(r'&& python -c "import torch; (.*)"$', commands_of(stage), re.MULTILINE)
    wanted = {"cpu": None, "cu126": "12.6", None: "13.0"}[index]
    for version in (None, "12.6", "13.0"):
        torch = SimpleNamespace(version=SimpleNamespace(cuda=version))
        if version == wanted:
            exec(check, {"torch": torch})
        else:
            with pytest.raises(AssertionError, match="expected"):
                exec(check, {"torch": torch})


SHELL_STEP = re.compile(r"^test .*?; (?=ulimit|exec)")


def test_compiled_kernels_of_the_image_are_copied_to_where_more_can_be_written(tmp_path: Path) -> None:
    found = pods(render("gpu-spot"))
    scripts = [pod["spec"]["containers"][0]["args"][0] for where, pod in found.items() if "RayCluster" in where]
    assert scripts
    for number, script in enumerate(scripts):
        copied = tmp_path / str(number)
        step = SHELL_STEP.search(script)
        command = step[0].replace("/tmp/triton", str(copied)) + 'echo "$TRITON_CACHE_DIR"'
        (tmp_path / "image" / "key").mkdir(parents=True, exist_ok=True)
        (tmp_path / "image" / "key" / "kernel.cubin").write_text("")
        for folder in (tmp_path / "image", tmp_path / "image", None):  # anew in the same pod; an image without kernels
            environment = {"PATH": os.environ["PATH"], **({"TRITON_CACHE_DIR": str(folder)} if folder else {})}
            process = subprocess.run(
                ["bash", "-c", command], env=environment, capture_output=True, text=True, check=True
            )
            assert (process.stdout, process.stderr) == (f"{copied}\n", "")
        assert [path.name for path in copied.rglob("*.*")] == ["kernel.cubin"]
    assert "TRITON_CACHE_DIR=/opt/" in commands_of("gpu")


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_image_has_a_target_for_each_kind_of_worker(stage: str) -> None:
    assert re.search(rf"^FROM \S+ AS {stage}$", DOCKERFILE, re.MULTILINE)
    overlay = {"cpu": "cpu-demo", "cuda": "s3"}[stage]
    for where, pod in pods(render(overlay)).items():
        for container in pod["spec"]["containers"]:
            assert container["image"].endswith(f"-{stage}"), where


@pytest.mark.parametrize("stage", ["cpu", "cuda", "cuda12", "cuda-flash"])
def test_the_image_s_user_and_home_are_those_of_the_pods(stage: str) -> None:
    assert re.findall(r"^USER (\S+)$", commands_of(stage), re.MULTILINE)[-1] == "1000:1000"
    assert re.search(r"\bHOME=/home/swiftbatch$", DOCKERFILE, re.MULTILINE)


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert ignored[0] == "*"  # an allow list keeps secrets and runs out
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    sources = [word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    names = {source.rstrip("/") for source in sources if not source.startswith("--")}
    assert names == let_in
    assert all((ROOT / name).exists() for name in names)
    left_out = [line for line in ignored if line and not line.startswith(("!", "#", "*"))]
    assert not any(fnmatch.fnmatch("worker/embedded/model.safetensors", pattern) for pattern in left_out)
