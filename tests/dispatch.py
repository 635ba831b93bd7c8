"""Run numerical tests with other kernels of BLAS, NumPy, torch and fewbit, other numbers of threads and in other orders.

`make dispatch` runs the fast tests in FOLDERS. Arguments go to pytest, such as ``-m "slow or not slow"``, or ``tests`` for
the tests of all folders. The environment variable FEWBIT_DISPATCH_RUNS is the number of settings to run, the first ones of
RUNS; by default all. The script prints one line for each run, with the failures below it, and exits with 1 if a run failed.
It reports and skips settings that this processor cannot run. A run fails if a library does not follow its setting.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """The settings of a run. Every value that matters occurs in at least one of RUNS.

    Attributes:
        blas: the kernels of OpenBLAS.
        needs: the instruction set, as fewbit names it, that a processor must have for `blas`.
        numpy: beginnings of the names of the instruction sets that NumPy must not use.
        aten: the instruction set of torch; empty for torch's own choice.
        fewbit: the instruction set of fewbit's kernels.
        threads: the number of threads.
        order: the seed of the order of the tests.
    """

    blas: str
    needs: str
    numpy: tuple[str, ...]
    aten: str
    fewbit: str
    threads: int
    order: int

    def environment(self) -> dict[str, str]:
        variables = {
            "OPENBLAS_CORETYPE": self.blas,
            "NPY_DISABLE_CPU_FEATURES": " ".join(self.disabled()),
            "ATEN_CPU_CAPABILITY": self.aten,
            "FEWBIT_CPU_ISA": self.fewbit,
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "passive",  # several processes share the cores
        }
        return {**os.environ, **{name: value for name, value in variables.items() if value}}

    def disabled(self) -> list[str]:
        from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

        there = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
        return [name for name in there if name.startswith(self.numpy)]

    def __str__(self):
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        numpy = f"NumPy without {' '.join(self.disabled()) or 'nothing'}"
        aten = f"torch {self.aten or 'as it is'}"
        return f"BLAS {self.blas}, {numpy}, {aten}, fewbit {self.fewbit}, {threads}, order {self.order}"


FOLDERS = "backends", "functions", "layers", "runtime", "solver"
"""The folders whose tests compute by the kernels that a Setting selects."""
ALL = ("X86_V3", "X86_V4", "AVX", "FMA3", "F16C")  # and all names that begin with these
RUNS = (
    Setting("Prescott", "baseline", ALL, "default", "baseline", 1, 5),
    Setting("Haswell", "avx2", ("X86_V4", "AVX512"), "avx2", "avx2", 1, 1),
    Setting("SkylakeX", "avx512", (), "", "avx512", 4, 2),
    Setting("Zen", "avx2", (), "avx2", "avx512", 1, 3),
    Setting("Sandybridge", "avx2", ALL, "default", "avx2", 4, 4),
)
# OpenBLAS's names for the kernels that it uses instead if its build lacks those of the key.
SAME_KERNELS = {"Zen": {"Zen", "Haswell"}, "Prescott": {"Prescott", "Katmai", "Nehalem"}}


def in_effect() -> dict:
    """Return the instruction sets that the libraries of this process use. Call it in the environment of a Setting."""
    import numpy  # noqa: F401  has a BLAS of its own, as has scipy
    import scipy.linalg  # noqa: F401
    import torch
    from numpy._core._multiarray_umath import __cpu_features__
    from threadpoolctl import threadpool_info

    from fewbit.runtime.backends import native

    return {
        "blas": sorted({lib["architecture"] for lib in threadpool_info() if "architecture" in lib}),
        "numpy": [name for name, there in __cpu_features__.items() if there],
        "aten": torch.backends.cpu.get_cpu_capability().lower(),
        "fewbit": native.cpu().name,
    }


def not_followed(setting: Setting, found: dict) -> list[str]:
    """Return a description of every part of the setting that a library does not follow."""
    same = SAME_KERNELS.get(setting.blas, {setting.blas})
    checks = {
        f"BLAS is {', '.join(found['blas'])}": set(found["blas"]) <= same,
        "NumPy keeps what is taken from it": not set(setting.disabled()) & set(found["numpy"]),
        f"torch is at {found['aten']}": setting.aten in ("", found["aten"]),
        f"fewbit is at {found['fewbit']}": found["fewbit"] == setting.fewbit,
    }
    return [words for words, holds in checks.items() if not holds]


def cannot_run(setting: Setting) -> str:
    """Return why this processor cannot run the setting; empty if it can."""
    try:
        from fewbit import _kernels
    except ImportError:
        return "fewbit is built without kernels"
    there = _kernels.cpu_isas()
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "for x86-64"
    missing = sorted({setting.needs, setting.fewbit} - set(there))
    return f"this processor has no {missing[0]}" if missing else ""


def run(setting: Setting, arguments: list[str]) -> bool:
    """Run the tests under the setting and print its line. Return whether they passed."""
    reason = cannot_run(setting)
    if reason:
        print(f"{setting}: left out, {reason}", flush=True)
        return True
    environment, start = setting.environment(), time.monotonic()
    probe = [sys.executable, __file__, "--in-effect"]
    probed = subprocess.run(probe, env=environment, capture_output=True, text=True)
    wrong = (
        not_followed(setting, json.loads(probed.stdout)) if probed.returncode == 0 else ["no probe"]
    )
    if wrong:
        print(f"{setting}: failed, {'; '.join(wrong)}\n{probed.stderr}", flush=True)
        return False
    tests = [sys.executable, "-m", "pytest", "--color=no"]
    tests += ["--numprocesses=logical", "--maxprocesses=8", "--dist=worksteal"]
    tests += [f"--threads={setting.threads}", f"--shuffle={setting.order}"]
    tests += [*(f"tests/{folder}" for folder in FOLDERS), *arguments]
    # Inductor's usual cache may have code for other instruction sets, which does not compile here.
    with tempfile.TemporaryDirectory() as cache:
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        done = subprocess.run(
            tests, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    counts = ", ".join(re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout[-2000:]))
    word = "passed" if done.returncode == 0 else "failed"
    print(f"{setting}: {word}, {counts} in {time.monotonic() - start:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout, flush=True)
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    if arguments == ["--in-effect"]:
        print(json.dumps(in_effect()))
        return 0
    count = int(os.environ.get("FEWBIT_DISPATCH_RUNS", len(RUNS)))
    return 0 if all([run(setting, arguments) for setting in RUNS[:count]]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
