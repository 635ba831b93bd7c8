"""Build the sdist and the wheel, and use each in a new environment in which there is no compiler.

`make package-test` runs this file. Only the wheel's environment gets the packages that fewbit requires. What else is needed,
such as torch, the environments find in this Python, by a .pth file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

README = """
import torch
from torch import nn
import fewbit

layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
x = torch.randn(4, 16, 32)
controller = fewbit.compress_(model, bits=4, sample=x)
model(x).square().mean().backward()
assert all(parameter.grad is not None for parameter in model.parameters())
assert "fewbit.ReLU" in str(controller.report)
from fewbit.runtime import backends
found = backends.on[x.device].name
assert (found == "reference") is {reference}, found
assert fewbit.__file__.startswith({prefix!r}), fewbit.__file__
"""

TRAINER = """
import warnings, torch, transformers, fewbit
warnings.simplefilter("ignore")
config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
torch.manual_seed(0)
model = transformers.GPT2LMHeadModel(config)
fewbit.compress_(model, bits=2, verbose=False)
tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in tokens]
settings = transformers.TrainingArguments(
    output_dir="out", max_steps=20, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
    report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
)
trainer = transformers.Trainer(model, settings, train_dataset=rows)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.1, losses
"""


def main():
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sdist, wheel = build(work)
        check_contents(sdist, wheel)
        use_wheel(wheel, work / "of-wheel")
        use_sdist(sdist, work / "of-sdist")


def build(work):
    """Build both files in isolated environments, the wheel from the sdist. Return their paths."""
    # Optimization takes most of the time of a compilation; the build of this checkout has it.
    compiler, target = work / "c++", work / "dist"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O1\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--outdir", target, ROOT]
    run("build", command, FEWBIT_CUDA="0", FEWBIT_KERNELS="1", CXX=str(compiler))
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    run("twine check", [sys.executable, "-m", "twine", "check", "--strict", sdist, wheel])
    return sdist, wheel


def check_contents(sdist, wheel):
    """Check that each file has what belongs in it, and nothing else."""
    inside = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in inside}
    assert all(top == "fewbit" or top.endswith(".dist-info") for top in tops), tops
    checkout = {f"fewbit/tables/{path.name}" for path in (ROOT / "tables").glob("*.json")}
    for folder in ("fewbit/schema", "fewbit"):
        paths = [*(ROOT / folder).glob("*.json"), *(ROOT / folder).glob("*.pyi")]
        checkout |= {f"{folder}/{path.name}" for path in paths}
    checkout |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "fewbit").rglob("*.py")}
    kernels = {name for name in inside if name.startswith("fewbit/_kernels.")}
    assert kernels == {"fewbit/_kernels.abi3.so"} and "-cp311-abi3-" in wheel.name, wheel
    packed = {name for name in inside if name.startswith("fewbit/")} - kernels
    assert packed == checkout | {"fewbit/py.typed"}, packed ^ (checkout | {"fewbit/py.typed"})
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder, ending in (("csrc", "*.cpp"), ("csrc", "*.cu"), ("csrc", "*.h"), ("tests", "*.py")):
        sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(ending)}
        assert sources and sources <= names, sources - names
    if (ROOT / "LICENSE").exists():
        assert "LICENSE" in names and any(name.endswith("/licenses/LICENSE") for name in inside)
    needed = {"CHANGELOG.md", "CITATION.cff", "pyproject.toml", "setup.py", "Makefile"}
    assert needed <= names, needed - names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(inside)} files")
    print(f"{sdist.name}: {sdist.stat().st_size:,} bytes, {len(names)} files", flush=True)


def use_wheel(wheel, place):
    """Install the wheel into a new environment, and use fewbit without torch, then with torch and transformers."""
    python, alone, output = installed("wheel", wheel, place)
    assert "fewbit is installed without compiled kernels" not in output, output
    fewbit = place / "bin" / "fewbit"
    solved = run("solve", [fewbit, "solve", "gelu", "--bits", "3"], **alone)
    assert "gelu, 3 bits: 8 levels" in solved, solved
    # A command whose extra is not installed says so in one line.
    done = subprocess.run(
        [fewbit, "plot", "gelu", "--bits", "3", "-o", "gelu.png"],
        capture_output=True, text=True, env=os.environ | alone, cwd=place,
    )  # fmt: skip
    expected = "fewbit: error: fewbit plot needs matplotlib: pip install 'fewbit[plot]'\n"
    assert (done.returncode, done.stderr) == (2, expected), done.stderr
    share_packages(place)
    output = run("README, wheel", readme(python, place, "False"), **alone)
    assert "modules converted" in output and "slower reference backend" not in output, output
    run("Trainer, wheel", [python, "-c", TRAINER], **alone)


def use_sdist(sdist, place):
    """Install the sdist into a new environment, where nothing can compile its kernels, and use the reference backend."""
    python, alone, output = installed("sdist", sdist, place, "--no-deps")
    assert "fewbit is installed without compiled kernels (no C++ compiler was found" in output
    share_packages(place)
    output = run("README, sdist", readme(python, place, "True"), **alone)
    assert "modules converted" in output and "slower reference backend" in output, output


def installed(what, package, place, *options):
    """Install a file into a new environment. Return its Python, the variables of the environment and pip's output."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    alone = {"PATH": str(place / "bin"), "PYTHONPATH": "", "HOME": str(place)}
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]
    return (
        python,
        alone,
        run(f"install the {what}", [*command, "--verbose", *options, package], **alone),
    )


def readme(python, place, reference):
    """Return the command that runs README."""
    code = README.format(reference=reference, prefix=str(place.resolve()))
    return [python, "-W", "default", "-c", code]


def share_packages(place):
    """Make the packages of this Python importable in the environment, after the environment's own."""
    (site,) = place.glob("lib/python*/site-packages")
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")


def run(what, command, **environment):
    """Run a command, print how long it took, and return its output. Exit if the command fails."""
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
        | environment,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stdout}")
    print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
