"""Times of a training step that cannot run here, from cached costs of the device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from fewbit._version import __version__
from fewbit.config import ROTATED
from fewbit.errors import FewbitError
from fewbit.files import cache_folder, write_atomic
from fewbit.runtime.quantizers import copies
from fewbit.schema.documents import parse_json, read_text

SCHEMA = "fewbit.costs/1"
BITS = (8, 4, 3, 2)
SIZE, WIDTH = 2**20, 1024
"""The elements of the tensors of the calibration, and the width of its matrices."""
SHORTEST = 0.05
"""The seconds for which each operation is repeated at least."""


@dataclass(frozen=True)
class Costs:
    """The measured costs of a device, in seconds.

    Attributes:
        device: the name of the device, with the number of threads of a CPU.
        per_flop: of one multiplication or addition in a matrix product in float32.
        per_byte: of one byte that is read or written by an elementwise operation.
        per_element: {bits: of one element that is quantized and dequantized}.
        per_transferred_byte: of one byte that is copied from the device to pinned memory of the host, or back; 0 on a CPU.
    """

    device: str
    per_flop: float
    per_byte: float
    per_element: dict[int, float]
    per_transferred_byte: float


def costs_of(device: torch.device) -> Costs:
    """Return the costs of a device of this machine, from the cache if possible."""
    name, folder = _name_of(device), cache_folder("costs")
    path = None if folder is None else folder / f"costs-{_file_name(name)}.json"
    if path is not None and path.exists():
        found = _read(path, name)
        if found is not None:
            return found
    found = calibrate(device)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"schema": SCHEMA, "version": __version__, **asdict(found)}, indent=1)
            write_atomic(path, text, force=True, follow_links=False)
        except (FewbitError, OSError):  # a cache that cannot be written is no cache
            pass
    return found


def calibrate(device: torch.device) -> Costs:
    """Measure the costs of a device."""
    with torch.random.fork_rng([]):
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(SIZE // WIDTH, WIDTH, device=device, generator=generator)
        weight = torch.randn(WIDTH, WIDTH, device=device, generator=generator)
    product = _seconds(lambda: x @ weight, device) / (2 * SIZE * WIDTH)
    sums = _seconds(lambda: x + x, device) / (3 * x.nbytes)
    elements = {}
    for bits in BITS:

        def there_and_back(bits=bits):
            copy = copies.quantized(x, 0, bits, 256, ROTATED)
            return copy.spec.dequantize(copy.tensors)

        elements[bits] = _seconds(there_and_back, device) / SIZE
    transfer = 0.0
    if device.type == "cuda":
        host = torch.empty(x.shape, pin_memory=True)
        transfer = _seconds(lambda: host.copy_(x, non_blocking=True), device) / x.nbytes
    return Costs(_name_of(device), product, sums, elements, transfer)


def _seconds(function: Callable, device: torch.device) -> float:
    """Return the least time of a call, to which other programs only add."""
    clock = clock_of(device)
    function()
    times, start = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - start < SHORTEST:
        begin = clock()
        function()
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        times.append(clock() - begin)
    return min(times)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock for a device, for a single thread that of the processor's time."""
    is_single = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if is_single else time.perf_counter


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return str(torch.get_device_module(device).get_device_name(device))


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _read(path, name: str) -> Costs | None:
    try:
        values = parse_json(read_text(path))
        if values.pop("schema") != SCHEMA or values.pop("version") != __version__:
            return None
        values["per_element"] = {int(bits): float(v) for bits, v in values["per_element"].items()}
        found = Costs(**values)
        is_usable = found.device == name and set(found.per_element) == set(BITS)
        return found if is_usable and found.per_flop > 0 else None
    except (FewbitError, AttributeError, KeyError, TypeError, ValueError):
        return None
