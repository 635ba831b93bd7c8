"""`fewbit.fit_` in two processes: one choice for all, and the peak of a process under DDP and FSDP2."""

import tempfile

import torch
import torch.distributed as dist
from measured import most_bytes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fewbit
from fewbit.errors import InputError
from fewbit.planning import costs, examination

WORDS, WIDTH, LAYERS = 100, 128, 3


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)))


def loss(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def start(rank, rows=8):
    torch.manual_seed(0)
    model = Language().train()
    torch.manual_seed(rank)
    return model, torch.randint(WORDS, (rows, 64))


def fit(model, batch, memory, **options):
    examination.ROUNDS, examination.PROBES, costs.SHORTEST = 1, 1, 0.0
    return fewbit.fit_(
        model, batch, memory, loss=loss, verbose=False, progress=False, optimizer=torch.optim.SGD, **options
    )  # fmt: skip


def gathered(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measured(model, batch, buckets=0):
    """Return the most bytes of a process in the third of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    existing = [*map(local, model.parameters()), *model.buffers(), batch]
    return sum(tensor.nbytes for tensor in existing) + buckets + most_bytes(step)


def _one_choice(rank, kind):
    """The processes have other memory and other batches, and take one choice, which fits in the smaller memory."""
    model, batch = start(rank, rows=8 - 2 * rank)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    memory = 9 * 2**20 if kind == "fsdp" else 13 * 2**20
    found = fit(model, batch, memory + rank * 2**20, parallel=kind)
    settings, peaks = gathered(found.settings), gathered(found.peak)
    assert settings[0] == settings[1] and peaks[0] == peaks[1] <= memory < found.exact_peak
    if kind == "fsdp":
        for layer in model.encoder.layers:
            fully_shard(layer)
        fully_shard(model)
        peak = measured(model, batch)
    else:
        peak = measured(DistributedDataParallel(model), batch, gradients)
    most = max(gathered(peak))
    assert most <= 1.02 * memory, (most, found.peak, memory)
    assert abs(most - found.peak) < 0.1 * found.peak, (most, found.peak)


def one_choice_with_ddp(rank):
    _one_choice(rank, "ddp")


def one_choice_with_fully_shard(rank):
    _one_choice(rank, "fsdp")


def an_error_in_one_process_is_raised_in_all(rank):
    model, batch = start(rank)
    if rank:
        batch = batch.float()  # no indices of an embedding
    try:
        fit(model, batch, 32 * 2**20, parallel="ddp")
    except InputError as error:
        text = str(error)
    assert "\n" not in text
    assert text.startswith("batch: expected" if rank else "process 1: batch: expected"), text
    assert type(model.head) is nn.Linear and "forward" not in vars(model.encoder.layers[0])


def a_saved_choice_is_applied_in_all(rank):
    """The documented way without `parallel`: one process chooses, all apply."""
    model, batch = start(rank)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    if rank == 0:
        fit(model, batch, 12 * 2**20).save(f"{folder[0]}/fit.json")
    dist.barrier()
    if rank == 1:
        fewbit.FastestFit.load(f"{folder[0]}/fit.json").apply(model)
    saved = gathered(fewbit.saved_bytes(lambda: loss(model, batch)).total)
    assert saved[0] == saved[1]


CASES = (
    one_choice_with_ddp,
    one_choice_with_fully_shard,
    an_error_in_one_process_is_raised_in_all,
    a_saved_choice_is_applied_in_all,
)
