"""One of two processes that train models together, for test_parallel.py.

worker.py FILE RANK RENDEZVOUS RESULTS runs the cases of FILE one after the other. After each case it appends a line of JSON
to RESULTS: [name of the case, traceback or ""].
"""

import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path += str(root / "tests" / "helpers"), str(root / "benchmarks")
    file, rank, rendezvous, results = sys.argv[1:]
    torch.set_num_threads(1)
    rank, cases = int(rank), importlib.import_module(file).CASES
    options = {"init_method": f"file://{rendezvous}", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **options)
    for case in cases:
        error = ""
        try:
            case(rank)
        except Exception:
            error = traceback.format_exc()
        with Path(results).open("a") as lines:
            lines.write(json.dumps([case.__name__, error]) + "\n")
        both = [None, None]
        dist.all_gather_object(both, error)
        if any(both):
            break  # collectives of the failed case may be in flight
    dist.destroy_process_group()
