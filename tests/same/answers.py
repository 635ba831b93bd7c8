"""Ask a version of fewbit all questions, and print the answers as JSON: {key: {name of a value: value}}.

    python tests/same/answers.py GLOB HELPERS...

GLOB matches the keys of the questions. HELPERS are the folders of the helpers of tests, whose tables have the samples. The
first folder is used whose helpers this version of fewbit can import. Keys name questions, and not places in fewbit.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

SUBJECTS = "layers", "models", "tables", "commands"
HELPERS = "layers", "compiled_models", "odd_models", "probed_models", "tiny_models"
LONGEST = 8
"""A list with more numbers than this is compared by its hash."""
WORDS = 200
"""The number of characters of an exception that an answer keeps."""
UNSTEADY = "seconds", "time_", "machine", "version"
"""Parts of the names of fields that differ from run to run, or between versions."""


def main(only: str, *helpers: str) -> None:
    """Print the answers, and their number and processor time to standard error."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of the folder of this script
    with tempfile.TemporaryDirectory() as tables:
        _prepare(tables)
        _import_helpers(helpers)
        started = time.process_time()
        found = {}
        for key, ask in _questions():
            if fnmatchcase(key, only):
                if key in found:
                    raise ValueError(f"expected each key once, got {key!r} again")
                found[key] = _answer(ask)
    seconds = time.process_time() - started
    print(f"{len(found)} answers, {seconds:.0f} s of one processor", file=sys.stderr)
    json.dump(found, sys.stdout)


def _prepare(tables: str) -> None:
    """Make answers independent of threads, the contents of new memory, the terminal and tables cached elsewhere.

    Args:
        tables: an empty folder for the tables that will be solved.
    """
    os.environ |= {"COLUMNS": "80", "FEWBIT_CACHE": tables, "OPENBLAS_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # also fills new memory
    warnings.simplefilter("ignore")


def _import_helpers(folders: Iterable[str]) -> None:
    """Import the helpers of the first folder that fits, or of none: then the questions that need them have no answer."""
    for folder in folders:
        sys.path.insert(0, folder)
        try:
            for name in HELPERS:
                importlib.import_module(name)
            return
        except ImportError as error:
            print(f"the helpers in {folder} do not fit: {error}", file=sys.stderr)
            sys.path.remove(folder)
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", "")).startswith(folder):
                    del sys.modules[name]


def _questions():
    """Yield (key, function that returns the answer as a dict) for all questions."""
    for subject in SUBJECTS:
        try:
            yield from importlib.import_module(f"same.{subject}").questions()
        except Exception as error:
            yield subject, lambda error=error: _raise(error)


def _raise(error):
    raise error


def _answer(ask) -> dict:
    import torch

    torch.manual_seed(0)
    try:
        return {str(name): leaf(value) for name, value in ask().items()}
    except Exception as error:
        return {"raised": " ".join(f"{type(error).__name__}: {error}".split())[:WORDS]}


def leaf(value):
    """Return a value as JSON that is equal if and only if the value is equal to the bit.

    Tensors and arrays become a line with dtype, shape, strides if they are unusual, norm and hash. Results of fewbit
    become their records. Fields of UNSTEADY are left out.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _tensor(value.detach())
    if isinstance(value, np.ndarray):
        return _tensor(torch.from_numpy(np.ascontiguousarray(value)))
    if hasattr(value, "records"):
        value = value.records()
    if isinstance(value, Mapping):
        steady = {str(name): part for name, part in value.items() if not _is_unsteady(str(name))}
        return {name: leaf(part) for name, part in steady.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        parts = [leaf(part) for part in value]
        if len(parts) > LONGEST and all(isinstance(part, int | float) for part in parts):
            return f"{len(parts)} numbers, {_hash(json.dumps(parts).encode())}"
        return parts
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _is_unsteady(name: str) -> bool:
    return any(part in name for part in UNSTEADY)


def _tensor(x) -> str:
    import torch

    strides = "" if x.is_contiguous() else f" strides {list(x.stride())}"
    norm = float(x.double().norm()) if x.numel() else 0.0
    content = x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{x.dtype}{list(x.shape)}{strides}, norm {norm:.9g}, {_hash(content)}"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
