"""A compressed model in a training loop with Accelerate: checkpoints, mixed precision, gradient accumulation."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

import accelerate
from layers import relative
from trainer_runs import llama

import fewbit
from fewbit.analysis.step_meter import StepMeter

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
CONFIGS = [
    fewbit.FixedBits(2),
    fewbit.AdaptiveBits(2, interval=3),
    fewbit.ErrorBound(interval=3),
]


class Classifier(nn.Module):
    """Layers, a function and dropout; the loss is part of the forward."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 128), nn.LayerNorm(128), nn.Linear(128, 5)

    def forward(self, x, labels):
        y = nn.functional.gelu(self.norm(self.up(x)))
        return nn.functional.cross_entropy(self.down(nn.functional.dropout(y, 0.1)), labels)


def made(bits, precision="no", seed=0, accumulation=1):
    """Return the parts of a training, prepared by a new Accelerator."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation
    )
    torch.manual_seed(seed)
    model = Classifier()
    controller = fewbit.compress_(model, bits, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(32, generator=generator), torch.randint(5, (), generator=generator))
        for _ in range(96)
    ]
    batches = DataLoader(data, batch_size=16)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    accelerator.register_for_checkpointing(controller)
    return accelerator, model, optimizer, batches, controller


def train(accelerator, model, optimizer, batches, meter=None):
    for x, labels in batches:
        with accelerator.accumulate(model):
            if meter is not None:
                meter.begin(model)
            accelerator.backward(model(x, labels))
            if meter is not None:
                meter.end()
            optimizer.step()
            optimizer.zero_grad()


def weights(model):
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)
@pytest.mark.parametrize("call", ["compile_regions", "Module.compile", "torch.compile"])
def test_ways_to_compile_a_compressed_model(call):
    """The copies of layers stay. What functions save is exact, as docs/guides/compile.md says."""

    def compiled(model):
        if call == "compile_regions":
            return accelerate.utils.compile_regions(model, backend="aot_eager")
        if call == "torch.compile":
            return torch.compile(model, backend="aot_eager")
        model.compile(backend="aot_eager")
        return model

    def measured(model):
        def loss(ids):
            return model(input_ids=ids, labels=ids).loss

        loss(ids).backward()  # compiles the model
        model.zero_grad()
        saved = fewbit.saved_bytes(loss, ids).total
        loss(ids).backward()
        return saved, torch.cat([weight.grad.flatten() for weight in model.parameters()])

    ids = torch.randint(3, 90, (4, 64), generator=torch.Generator().manual_seed(0))
    usual, exact = measured(compiled(llama(dropout=0.0)))
    torch._dynamo.reset()
    model = llama(dropout=0.0)
    fewbit.compress_(model, 8, layers={"activation_bits": 8}, verbose=False)
    saved, gradient = measured(compiled(model))
    assert saved < 0.5 * usual
    assert 0 < relative(gradient, exact) < 0.03


@pytest.mark.parametrize(
    "bits, precision", [*((bits, "no") for bits in CONFIGS), (CONFIGS[1], "bf16")], ids=repr
)
def test_resumed_training_ends_with_the_same_weights(bits, precision, tmp_path):
    """The state of the controller and torch's random state are in the checkpoint of `save_state`."""
    accelerator, model, optimizer, batches, controller = made(bits, precision, accumulation=2)
    meter = StepMeter()
    train(accelerator, model, optimizer, batches, meter)
    assert fewbit.saved_bytes(Classifier(), *next(iter(batches))).total > 4 * meter.total
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, batches)
    accelerator, resumed, optimizer, batches, other = made(bits, precision, 5, accumulation=2)
    accelerator.load_state(str(tmp_path / "state"))
    train(accelerator, resumed, optimizer, batches)
    assert weights(resumed) == weights(model)
    assert other.state_dict() == controller.state_dict()
    assert other.allocation == controller.allocation and other.bounds == controller.bounds
    assert bool(controller.state_dict()) == (bits != CONFIGS[0])
