"""One of two processes that train with `FewbitCallback`. trainer_worker.py CASE RANK FOLDER runs a case of CASES."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from harness import most_bytes
from torch.nn.parallel import DistributedDataParallel
from trainer_runs import USUAL, llama, texts, weights
from transformers import Trainer, TrainingArguments

import fewbit
from fewbit.integrations.transformers import FewbitCallback
from fewbit.planning import costs, examination

SAVES = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}
ARGUMENTS = {**USUAL, **SAVES, "ddp_backend": "gloo"}


def gathered(value):
    """Return the values of both processes."""
    both = [None, None]
    dist.all_gather_object(both, value)
    return both


# -- Bits ------------------------------------------------------------------------------------------------------


def _train(folder, seed, resume_from_checkpoint=None):
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


def bits(rank, folder):
    """Both end with the same weights and bits, also in a resumed training."""
    found = [_train(folder, 0), _train(folder, 5, str(folder / "checkpoint-3"))]
    both = gathered(found)
    assert both[0] == both[1]
    assert found[0][0] != weights(llama())


# -- A memory --------------------------------------------------------------------------------------------------


def _check(fit, memory, replica, loss, optimizer):
    """Both have one choice, and a step of the replica takes what was predicted."""
    settings, peaks = gathered(fit.settings), gathered(fit.peak)
    assert settings[0] == settings[1] and peaks[0] == peaks[1] <= memory < fit.exact_peak
    assert any(option.name != "exact" for option in fit.settings.blocks.values())
    assert isinstance(replica, DistributedDataParallel)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    parameters = list(replica.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    existing = sum(
        x.nbytes for x in [*parameters, *parameters, *replica.buffers(), *states]
    )  # and buckets
    most = max(gathered(existing + most_bytes(step)))
    assert most <= 1.005 * memory, (most, memory)  # the batch and the loss of the trainer are small
    assert abs(most - fit.peak) < 0.05 * fit.peak, (most, fit.peak)


def _quick(folder):
    examination.ROUNDS, examination.PROBES, costs.SHORTEST = 1, 1, 0.0
    os.environ["FEWBIT_CACHE"] = str(folder / "cache")


def memory_of_transformers(rank, folder):
    """The Trainer's processes read different batches, and take one choice."""
    _quick(folder)
    memory = 14 * 2**20
    callback = FewbitCallback(memory=memory, progress=False)
    model = llama(hidden_size=128, intermediate_size=256, num_hidden_layers=3)
    arguments = {
        **ARGUMENTS,
        "max_steps": 2,
        "save_strategy": "no",
        "per_device_train_batch_size": 16,
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **arguments),
        train_dataset=texts(64),
        callbacks=[callback],
    )
    trainer.train()
    both = gathered(weights(model))
    assert both[0] == both[1]
    batch = {
        name: torch.stack([text[name] for text in texts(16)]) for name in ("input_ids", "labels")
    }
    replica = trainer.model_wrapped
    _check(
        callback.fit, memory, replica, lambda: replica(**batch).loss, trainer.optimizer.optimizer
    )


def memory_of_lightning(rank, folder):
    """The same with Lightning; `training_step` runs in the replica's forward."""
    import lightning.pytorch as lightning
    from torch import nn
    from torch.nn import functional as F

    from fewbit.integrations.lightning import FewbitCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            blocks = [
                nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
            ]
            self.net = nn.Sequential(nn.Sequential(*blocks), nn.Linear(64, 8))

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("own", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    class AtEnd(lightning.Callback):
        """Measures while the strategy still has the replica."""

        def on_train_end(self, trainer, module):
            replica, (optimizer,) = trainer.strategy.model, trainer.optimizers
            batch = next(iter(trainer.train_dataloader))
            module.log = lambda *args, **kwargs: None

            def loss():
                return trainer.strategy._forward_redirection(
                    replica, module, "training_step", batch, 0
                )

            _check(callback.fit, memory, replica, loss, optimizer)
            measured.append(True)

    _quick(folder)
    memory, measured = 9 * 2**20, []
    callback = FewbitCallback(memory=memory, progress=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=generator), torch.randint(8, (4096,), generator=generator)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", strategy="ddp", devices=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[callback, AtEnd()],
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(*x)
    module = Model()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=1024))
    both = gathered(weights(module))
    assert both[0] == both[1] and measured
    assert callback.fit.batch == 1024


CASES = {case.__name__: case for case in (bits, memory_of_transformers, memory_of_lightning)}


def main(case, rank, folder):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    CASES[case](rank, folder)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter's end, and abort it


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
