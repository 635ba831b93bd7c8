"""The allocator's expandable segments: they are set if possible, and the report agrees with PyTorch."""

import os
import re
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from fewbit.compress import allocator  # noqa: E402
from fewbit.compress.allocator import AllocatorReport, PeakMemory, peak_memory  # noqa: E402
from fewbit.compress.allocator import use_expandable_segments as use  # noqa: E402
from fewbit.errors import InputError  # noqa: E402


class Allocator:
    """A stand-in for PyTorch's allocator settings. Each call of `set` resets the settings that it does not name."""

    def __init__(self, settings="", segments=(), supported=True, backend="native"):
        self.calls, self.supported, self.backend = [], supported, backend
        self.segments = [{"total_size": size, "is_expandable": grows} for size, grows in segments]
        self.parse(settings)

    def parse(self, settings):
        self.text = settings
        self.settings = dict(re.findall(r"([a-z_0-9]+):([^,\[]+|\[[^\]]*\])", settings))

    def set(self, settings):
        self.calls.append(settings)
        self.parse(settings)

    def snapshot(self):
        asked = self.settings.get("expandable_segments") == "True"
        settings = {
            "PYTORCH_CUDA_ALLOC_CONF": self.text,
            "max_split_size": self.settings.get("max_split_size_mb"),
            "expandable_segments": asked and self.supported,
        }
        return {"segments": self.segments, "allocator_settings": settings}


@pytest.fixture(params=["newer", "older"])
def install(request, monkeypatch):
    """Return install(allocator), which makes a CUDA device with the allocator of newer or older PyTorch."""
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def deprecated(settings):
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        fake.set(settings)

    def install(allocator):
        nonlocal fake
        fake = allocator
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: fake.backend)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: fake.snapshot())
        name = "_accelerator_setAllocatorSettings"
        if request.param == "newer":
            monkeypatch.setattr(torch._C, name, fake.set, raising=False)
        else:
            monkeypatch.delattr(torch._C, name, raising=False)
            monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", deprecated)
        return fake

    fake = None
    return install


ON = "expandable_segments:True"


@pytest.mark.parametrize(
    ("given", "report", "text", "calls"),
    [
        ({}, (True, 0, ""), "in force for all memory", [ON]),
        (
            {"segments": [(2 << 20, False), (20 << 20, True), (1 << 20, False)]},
            (True, 3 << 20, ""),
            "in force from now on; set too late for 3.00 MiB that were reserved before",
            [ON],
        ),
        ({"settings": ON, "segments": [(20 << 20, True)]}, (True, 0, ""), "in force for all", []),
        (
            {"supported": False},
            (False, 0, "PyTorch has none on this platform"),
            "not in force, PyTorch has none on this platform",
            [ON],
        ),
        (
            {"backend": "cudaMallocAsync"},
            (False, 0, "the allocator is cudaMallocAsync, which has no segments"),
            "not in force, the allocator is cudaMallocAsync",
            [],
        ),
    ],
    ids=["at first", "too late", "set before", "unsupported", "another allocator"],
)
def test_expandable_segments_are_set_if_they_can_be(install, given, report, text, calls):
    fake = install(Allocator(**given))
    found = use()
    assert found == AllocatorReport(*report) and fake.calls == calls
    assert str(found) == repr(found) and str(found).startswith(f"expandable segments: {text}")
    assert not found.in_force or (use().in_force and fake.calls == calls)  # nothing left to do


def test_other_settings_are_kept(install):
    fake = install(Allocator("max_split_size_mb:128,roundup_power2_divisions:[256:1,>:8]"))
    assert use().in_force
    assert fake.settings == {
        "max_split_size_mb": "128",
        "roundup_power2_divisions": "[256:1,>:8]",
        "expandable_segments": "True",
    }


@pytest.mark.parametrize("name", allocator.VARIABLES)
def test_the_environment_may_forbid_it(install, monkeypatch, name):
    settings = "max_split_size_mb:128,expandable_segments:False"
    monkeypatch.setenv(name, settings)
    fake = install(Allocator(settings))
    report = use()
    assert repr(report) == (
        f"expandable segments: not in force, {name} says expandable_segments:False"
    )
    assert fake.calls == []


def test_a_refusal_is_passed_on(install):
    fake = Allocator()

    def refuse(_):
        raise RuntimeError("no such setting\nand a trace")

    fake.set = refuse
    install(fake)
    assert use() == AllocatorReport(False, 0, "PyTorch refused to set them: no such setting")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert repr(use()) == "expandable segments: not in force, there is no CUDA device"
    with pytest.raises(
        InputError, match="^expected a CUDA device, got 'cuda', and torch finds no CUDA device$"
    ):
        peak_memory()


# -- Peaks -------------------------------------------------------------------------------------------------


def test_peaks(monkeypatch):
    stats = {
        "allocated_bytes.all.peak": 3 << 30,
        "reserved_bytes.all.peak": 4 << 30,
        "allocated_bytes.all.current": 1,
        "active_bytes.all.peak": 2,
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats if device.index else {})
    peak = peak_memory("cuda:1")
    assert peak == PeakMemory("cuda:1", 3 << 30, 4 << 30)
    assert peak.ratio == pytest.approx(4 / 3)
    assert repr(peak) == (
        "peak memory on cuda:1: 3.00 GiB allocated, 4.00 GiB reserved (1.33 times as much)"
    )
    assert peak_memory() == PeakMemory("cuda", 0, 0)
    assert peak_memory().ratio == 1.0


@pytest.mark.parametrize("device", ["cpu", "nonsense", 1.5, "meta"])
def test_a_device_that_is_none(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match=f"^expected a CUDA device, got {device!r}"):
        peak_memory(device)


# -- On a GPU ----------------------------------------------------------------------------------------------

FRESH = """
import torch
from fewbit.compress.allocator import peak_memory, use_expandable_segments
{before}
report = use_expandable_segments()
x = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
found = [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]
print(report.in_force, report.fixed > 0, any(found), all(found), peak_memory().allocated >= 64 << 20)
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("before", "forbids", "expected"),
    [
        ("", False, "True False True True True"),
        ("y = torch.zeros(1 << 20, device='cuda')", False, "True True True False True"),
        ("", True, "False False False False True"),
    ],
)
def test_segments_of_a_new_process(before, forbids, expected):
    environment = {k: v for k, v in os.environ.items() if k not in allocator.VARIABLES}
    if forbids:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    code = FRESH.format(before=before)
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert out.stdout.strip() == expected
