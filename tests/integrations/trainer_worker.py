"""One of two processes that train with a Trainer and `FewbitCallback`. test_transformers_trainer.py runs it."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import USUAL, llama, texts, weights
from transformers import Trainer, TrainingArguments

import fewbit
from fewbit.integrations.transformers import FewbitCallback

SAVES = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
ARGUMENTS = {**USUAL, **SAVES, "ddp_backend": "gloo"}


def train(folder, seed, resume_from_checkpoint=None):
    """Train, and return what must be the same in both processes."""
    callback = FewbitCallback(fewbit.AdaptiveBits(2, interval=2))
    trainer = Trainer(
        llama(seed=seed),
        TrainingArguments(str(folder), **ARGUMENTS),
        train_dataset=texts(64),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    allocation = callback.controller.allocation
    assert callback.controller.state_dict()["schedule"]["step"] == 5 and len(allocation) > 0
    return weights(trainer.model), allocation.records()


def main(rank, folder):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    found = [train(folder, 0), train(folder, 5, str(folder / "checkpoint-3"))]
    both = [None, None]
    dist.all_gather_object(both, found)
    assert both[0] == both[1]
    assert found[0][0] != weights(llama())
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end, and abort it


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
