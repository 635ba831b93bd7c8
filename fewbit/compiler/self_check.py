"""A check that the installed torch works with fewbit's partitioner, which uses private interfaces of torch."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch
from torch import nn

from fewbit.config import FixedBits
from fewbit.convert.module_settings import resolve
from fewbit.files import cache_folder
from fewbit.printable import one_line

WORKS = "works"
_BITS = 8
_LARGEST_ERROR = 0.05
"""The largest relative error of a gradient with 8 bits. It is about .01."""
_TIMEOUT = 300
"""The most seconds that the check may take."""
_LARGEST_SHARE = 0.4
"""The largest share of the exact bytes that may be saved with 8 bits. It is about .25."""
_answers = []  # of this process: at most one
_lock = threading.Lock()


def failure() -> str | None:
    """Return what does not work with the installed torch, or None.

    Another process compiles and runs a small network, once for each version of torch and of this code.
    """
    if torch._dynamo.config.disable:
        return None
    with _lock:
        if not _answers:
            _answers.append(_answer())
        return _answers[0]


def _answer() -> str | None:
    mark = _mark()
    if mark is not None and os.path.exists(mark):
        return None
    found = _of_process()
    if found == WORKS and mark is not None:
        with contextlib.suppress(OSError):  # the next process checks again
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return None if found == WORKS else found


def _of_process() -> str | None:
    code = f"from {__name__} import run; print(); print(run())"
    # A GPU would have to be initialized, and takes no part.
    changes = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    environment = {**os.environ, **changes, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if done.returncode:
        return f"a check of it ended with exit status {done.returncode}"
    return done.stdout.strip().splitlines()[-1]


def run() -> str:
    """Run the check in this process. Return WORKS, or in a few words what does not work."""
    try:
        return _compared() or WORKS
    except Exception as error:
        return one_line(error)


def _compared() -> str | None:
    from fewbit.compiler.compiling import _aot_eager
    from fewbit.compiler.partitioner import Partitioner

    if not hasattr(torch._inductor.config, "custom_partitioner_fn"):
        return "torch._inductor.config has no custom_partitioner_fn"
    torch.manual_seed(0)
    exact, x = _Network().to(torch.float32), torch.randn(8, 32, 64, dtype=torch.float32)
    network = copy.deepcopy(exact)
    backend = _aot_eager(Partitioner(resolve(FixedBits(_BITS), None)))
    # AOTAutograd's cache on disk might have the code of another version of fewbit.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(network, backend=backend)
        compiled(x).sum().backward()
        network.zero_grad()
        y, saved = _forward(compiled, x)
        y.square().sum().backward()
    expected, all_bytes = _forward(exact, x)
    expected.square().sum().backward()
    if not torch.allclose(y, expected, rtol=1e-3, atol=1e-4):
        return "the results of a compiled network differ from those of the network"
    if saved > _LARGEST_SHARE * all_bytes:
        return f"a compiled network saves {saved} bytes with {_BITS} bits, and {all_bytes} in exact training"
    found, true = (
        torch.cat([parameter.grad.flatten() for parameter in of.parameters()])
        for of in (network, exact)
    )
    error = float((found - true).norm() / true.norm())
    if not error < _LARGEST_ERROR:
        return f"the gradient of a compiled network has an error of {error:.2g} with {_BITS} bits"
    return None


class _Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(64), nn.Linear(64, 192)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return self.down(nn.functional.gelu(self.up(x)))


def _forward(network, x) -> tuple[torch.Tensor, int]:
    sizes = {}

    def pack(saved):
        storage = saved.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = network(x)
    existed = {tensor.untyped_storage().data_ptr() for tensor in (x, *network.parameters())}
    return y, sum(size for address, size in sizes.items() if address not in existed)


def _mark() -> Path | None:
    folder = cache_folder("compile")
    if folder is None:
        return None
    code = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    return folder / f"works-with-torch-{torch.__version__}-{code.hexdigest()}"
