"""`fewbit.fit_` in two processes: one choice for all, and the peak of a process under DDP and FSDP2."""

import gc
import tempfile
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fitting import Language, loss
from harness import most_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fewbit
from fewbit.errors import GradientError, InputError
from fewbit.functional import losses
from fewbit.planning import costs, examination
from fewbit.planning.all_ranks import Processes
from fewbit.planning.block_settings import EXACT, RECOMPUTED, Option, everywhere
from fewbit.planning.block_steps import OptimizerBytes, RealBlockSteps

WORDS, WIDTH, LAYERS = 100, 128, 3


def start(rank, rows=8, words=WORDS):
    torch.manual_seed(0)
    model = Language(LAYERS, 0.0, words, WIDTH).train()
    torch.manual_seed(rank)
    return model, torch.randint(words, (rows, 64))


class Uneven(nn.Module):
    """The first block is the largest, and its input has no gradient."""

    def __init__(self):
        super().__init__()
        sizes = (512, 1024), (256, 512), (256, 512)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, 256))
            for width, inner in sizes
        )
        self.head = nn.Linear(256, 256)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean_square(model, batch):
    return model(batch).square().mean()


def fit(model, batch, memory, loss=loss, **options):
    examination.ROUNDS, examination.PROBES, costs.SHORTEST = 1, 1, 0.0
    examination.OPTIONS = EXACT, Option(4), RECOMPUTED, Option(4, True, 8)
    return fewbit.fit_(
        model, batch, memory, loss=loss, verbose=False, progress=False, optimizer=torch.optim.SGD, **options
    )  # fmt: skip


def gathered(value):
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measured(model, batch, buckets=0, loss=loss):
    """Return the most bytes of a process in a step after the second."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    existing = [*map(local, model.parameters()), *model.buffers(), batch]
    gc.collect()  # models of earlier calls that are freed within a step would count
    # gloo's threads may free a buffer late.
    most = min(most_bytes(step) for _ in range(8))
    return sum(tensor.nbytes for tensor in existing) + buckets + most


def sharded(model, **options):
    for layer in model.encoder.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _one_choice(rank, kind, mebibytes, words=WORDS, **options):
    """The processes have other memory and other batches, and take one choice, which fits in the smaller memory."""
    model, batch = start(rank, 8 - 2 * rank, words)
    before = [(p, p.data_ptr(), p.dtype) for p in model.parameters()]
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    memory = int(mebibytes * 2**20)
    found = fit(model, batch, memory + rank * 2**20, parallel=kind)
    assert [(p, p.data_ptr(), p.dtype) for p in model.parameters()] == before
    settings, peaks = gathered(found.settings), gathered(found.peak)
    assert settings[0] == settings[1] and peaks[0] == peaks[1] <= memory < found.exact_peak
    if kind == "ddp":
        peak = measured(DistributedDataParallel(model), batch, gradients)
    else:
        peak = measured(sharded(model, **options), batch)
    most = max(gathered(peak))
    assert most <= 1.01 * memory, (most, found.peak, memory)
    assert abs(most - found.peak) < 0.05 * found.peak, (most, found.peak)
    return found


def one_choice_with_ddp(rank):
    _one_choice(rank, "ddp", 13)


def one_choice_with_fully_shard(rank):
    _one_choice(rank, "fsdp", 10)


def one_choice_for_unequal_blocks(rank):
    """Peaks of the choice, of exact training and of a model on the meta device are within 1 % of the real ones."""
    torch.manual_seed(0)
    model, exact = Uneven().train(), Uneven().train()
    batch, memory = torch.randn(512, 512), 19 * 2**20
    options = {"loss": mean_square, "parallel": "fsdp", "blocks": "blocks.*"}
    found = fit(model, batch, memory, **options)
    on_meta = fit(Uneven().to("meta"), batch.to("meta"), memory, **options)
    for trained, *predicted in (model, found.peak), (exact, found.exact_peak, on_meta.exact_peak):
        for block in trained.blocks:
            fully_shard(block)
        most = measured(fully_shard(trained), batch, loss=mean_square)
        assert all(abs(most - peak) < 0.01 * peak for peak in predicted), (most, predicted)
        assert (most <= memory) == (trained is model), (most, memory)


def one_choice_in_mixed_precision(rank):
    """Blocks compute in bfloat16, and gradients are reduced in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    _one_choice(rank, policy, 6.5, mp_policy=policy)


def a_loss_in_chunks_outside_of_shards(rank):
    """The loss of the training loop reads the head's weights after the forward pass of the model."""
    losses.CHUNK = 2**17
    assert _one_choice(rank, "fsdp", 20, words=4000).settings.head == "head"
    gradients = []
    for head in None, "head":
        model, batch = start(rank)
        if head:
            fewbit.chunk_loss_(model, head)
        loss(sharded(model), batch).backward()
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def a_loss_in_chunks_that_is_refused(rank):
    """A head that is a unit of its own computes its logits. DDP may need a graph of the model's outputs."""
    model, batch = start(rank)
    fewbit.chunk_loss_(model, "head")
    fully_shard(model.head)
    assert type(sharded(model)(batch)) is torch.Tensor
    for option in "find_unused_parameters", "static_graph":
        model, batch = start(rank)
        fewbit.chunk_loss_(model, "head")
        replica = DistributedDataParallel(model, **{option: True})
        with pytest.raises(GradientError, match="expected a loss that the model computes") as error:
            loss(replica, batch)
        assert "\n" not in str(error.value)


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


def a_process_alone_has_no_buffers_of_collectives(rank):
    """In a group of one, weights are copied, and the predicted peaks are within 0.2 % of the real ones."""
    own = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "own"))["own"]
    alone = Processes("fsdp", 1)
    paths = [f"encoder.layers.{number}" for number in range(LAYERS)]
    for option in EXACT, RECOMPUTED, Option(4, True, 8):
        for rows, words in ((2, WORDS), (8, WORDS), (2, 4000)):
            model, batch = start(rank, rows, words)
            blocks = [model.get_submodule(path) for path in paths]
            memory = OptimizerBytes(model, torch.optim.SGD, on_gpu=False)
            steps = RealBlockSteps(model, blocks, batch, loss, memory, False, alone)
            peak = steps.timeline_of(everywhere(paths, option)).peak().size
            predicted = max(peak, memory.update(batch, alone))
            most = measured(sharded(model, mesh=own), batch)
            assert abs(most - predicted) < 0.002 * most, (option, rows, words, most, predicted)


def one_process_with_too_little_memory(rank):
    """Its real steps raise an error, so both examine on fake tensors, and take one choice, which fits."""
    model, batch = start(rank)
    real, left = RealBlockSteps.timeline_of, [3]

    def timeline_of(self, *args, **options):
        left[0] -= rank
        if left[0] == 0:
            raise MemoryError
        return real(self, *args, **options)

    memory = 12 * 2**20
    with patch.object(RealBlockSteps, "timeline_of", timeline_of):
        found = fit(model, batch, memory, parallel="ddp")
    assert left == [3 - 3 * rank]
    assert any("nothing was run" in note for note in found.notes) and found.code
    settings, peaks = gathered(found.settings), gathered(found.peak)
    assert settings[0] == settings[1] and peaks[0] == peaks[1] <= memory
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    peak = measured(DistributedDataParallel(model), batch, gradients)
    assert max(gathered(peak)) <= 1.01 * memory


CASES = (
    one_choice_with_ddp,
    one_choice_with_fully_shard,
    one_choice_for_unequal_blocks,
    one_choice_in_mixed_precision,
    a_loss_in_chunks_outside_of_shards,
    a_loss_in_chunks_that_is_refused,
    an_error_in_one_process_is_raised_in_all,
    one_process_with_too_little_memory,
    a_process_alone_has_no_buffers_of_collectives,
    a_saved_choice_is_applied_in_all,
)
