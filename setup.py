"""Compiles the kernels where that can be done: `pyproject.toml` cannot say so."""

import sys
from pathlib import Path
from shutil import rmtree

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))

from swiftbatch.worker.kernels.build import compile_all, stale_variants


class BuildKernels(build_py):
    """Compiles into the package itself: an editable install finds the libraries there, a wheel takes them along."""

    def run(self) -> None:
        rmtree(self.build_lib, ignore_errors=True)  # modules that are gone by now lie there since an earlier build
        for problem in compile_all(stale) if (stale := stale_variants()) else ():
            print(f"swiftbatch: kernels were not built, torch serves instead: {problem}", file=sys.stderr)
        super().run()


class WheelForOneMachine(bdist_wheel):
    """A wheel with libraries: for any Python, on machines like this one."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": WheelForOneMachine})
