"""fewbit doctor: what it shows of the installation, and what it advises."""

import builtins
import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from fewbit.cli import app, doctor  # noqa: E402
from fewbit.compiler import self_check  # noqa: E402
from fewbit.runtime import backends  # noqa: E402
from fewbit.runtime.backends import reference  # noqa: E402


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setattr(self_check, "failure", lambda: None)


def parts():
    return {part: (found, advice) for part, found, advice in doctor._parts()}


def test_the_command():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0
    assert [row["part"] for row in json.loads(done.stdout)][:3] == [
        "fewbit",
        "torch",
        "CPU kernels",
    ]


def gpu(monkeypatch, reason, driver=13000, build="13.0"):
    """Let torch have a GPU whose kernels are unusable for a reason, or usable if it is ""."""
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(doctor, "_driver", lambda: (1, driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: build is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(build is not None))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    usable = reference if reason else type("Kernels", (), {"name": "cuda"})
    choose = lambda device: backends._fall_back(device, reason) if reason else usable  # noqa: E731
    _chosen_by(monkeypatch, choose)


def _chosen_by(monkeypatch, choose):
    monkeypatch.setattr(backends, "on", type(backends.on)())
    monkeypatch.setattr(backends, "_choose", choose)


@pytest.mark.parametrize(
    ("reason", "driver", "found", "advice"),
    [
        ("", 13000, "NVIDIA H100 (9.0): compiled kernels", ""),
        ("fewbit was built without CUDA", 13000, "no kernels (fewbit was built without CUDA)", "install fewbit again on this"),
        ("fewbit was built without CUDA", 12080, "in plain torch", "update NVIDIA's driver to 580 or newer"),
    ],
)  # fmt: skip
def test_a_gpu(monkeypatch, reason, driver, found, advice):
    gpu(monkeypatch, reason, driver)
    shown = parts()["GPU 0"]
    assert found in shown[0]
    assert shown[1].startswith(advice) and bool(shown[1]) == bool(advice)


def test_the_driver_and_the_compilers(monkeypatch):
    gpu(monkeypatch, "", 12080)
    monkeypatch.setenv("CXX", "ccache g++")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "nvcc" else name)
    found = parts()
    assert found["NVIDIA driver"] == ("for CUDA 12.8", "")
    assert found["compilers"] == ("g++, no nvcc (pip gets it for a build)", "")


@pytest.mark.parametrize("cuda", [None, object()], ids=["CPU only", "with CUDA"])
def test_kernels_for_gpus(monkeypatch, cuda):
    kernels = pytest.importorskip("fewbit._kernels")
    monkeypatch.setattr(kernels, "cuda", cuda, raising=False)
    assert doctor._has_cuda_kernels() is (cuda is not None)


def test_kernels_that_wait_for_a_driver_need_no_new_installation(monkeypatch):
    gpu(monkeypatch, "the driver supports CUDA 12.8, these kernels need 13.0", 12080)
    monkeypatch.setattr(doctor, "_has_cuda_kernels", lambda: True)
    assert parts()["GPU 0"][1] == "update NVIDIA's driver to 580 or newer, for CUDA 13"


def test_a_gpu_that_torch_does_not_find(monkeypatch):
    gpu(monkeypatch, "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found, advice = parts()["GPU"]
    assert found == "torch finds none, but the driver finds 1"
    assert advice == "CUDA_VISIBLE_DEVICES may hide them, or the driver is too old for CUDA 13.0"


def test_a_gpu_that_torch_was_not_built_for(monkeypatch):
    gpu(monkeypatch, "", build=None)
    found = parts()
    assert "GPU 0" not in found
    assert (
        found["torch"][0].endswith("without CUDA")
        and "build of torch with CUDA" in found["torch"][1]
    )


def test_a_machine_without_a_compiler(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "ccache g++")
    _chosen_by(monkeypatch, lambda device: reference)
    found = parts()
    assert found["CPU kernels"][1].startswith("install a C++ compiler")
    assert 'backend="aot_eager" only' in found["fewbit.compile"][0]
    text = str(doctor.Installation(tuple(doctor._parts())))
    assert "CPU kernels: install a C++ compiler" in text and "nothing is missing" not in text


def test_a_gpu_whose_driver_is_too_old(monkeypatch):
    gpu(monkeypatch, "")

    def refuse(device):
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    found, advice = parts()["GPU 0"]
    assert "driver on your system is too old" in found and advice.startswith("update")


@pytest.mark.parametrize(
    ("error", "found", "advice"),
    [
        (ModuleNotFoundError("no torch", name="torch"), "not installed", "pip install torch"),
        (ImportError("fewbit needs torch 2.11 or newer"), "needs torch 2.11", "install a version"),
        (OSError("libcublas.so.13: cannot open"), "libcublas.so.13", "install a version"),
    ],
)
def test_a_torch_that_cannot_be_imported(monkeypatch, error, found, advice):
    def refuse(name, *others):
        if name == "torch":
            raise error
        return importing(name, *others)

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    shown = parts()
    assert [*shown] == ["fewbit", "torch"]
    assert found in shown["torch"][0] and shown["torch"][1].startswith(advice)


def test_torch_compile_is_disabled():
    with torch._dynamo.config.patch(disable=True):
        found = parts()
    assert found["fewbit.compile"] == ("torch.compile is disabled", "unset TORCH_COMPILE_DISABLE")


def test_a_torch_that_fails_the_check(monkeypatch):
    monkeypatch.setattr(self_check, "failure", lambda: "no such argument")
    assert parts()["fewbit.compile"][0].endswith(": no such argument")
