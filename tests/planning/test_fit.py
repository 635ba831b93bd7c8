"""fewbit.fit_: steps that fit by an independent measurement, the error that was promised, refusals, interrupts."""

import copy
import sys
from collections import UserDict
from functools import partial

import numpy as np
import pytest
import tiny_models
import torch
from fitting import MIB, WIDTH, Language, fit, language, loss, mean_loss
from harness import most_bytes
from measured import measured_peak
from quick_fit import quick_fit
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM

import fewbit
from fewbit.errors import InputError
from fewbit.functional import losses
from fewbit.planning import costs, examination
from fewbit.planning.all_ranks import Processes
from fewbit.planning.block_settings import RECOMPUTED, Option, Settings
from fewbit.planning.block_steps import FakeBlockSteps, OptimizerBytes, RealBlockSteps
from fewbit.planning.fake_steps import loss_of_output


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Measure little, and leave the user's cache alone."""
    quick_fit(monkeypatch, tmp_path, probes=2)


def gradient(model, batch, seed):
    model.zero_grad()
    torch.manual_seed(seed)
    loss(model, batch).backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def drawn_times(monkeypatch, seed):
    """Draw the times of steps, so that a choice does not depend on other programs."""
    generator = np.random.default_rng(seed)

    def timed(self):
        return 1 + generator.random(), generator.random(len(self.blocks))

    monkeypatch.setattr(RealBlockSteps, "timed", timed)
    given = costs.Costs("drawn", 1e-12, 1e-10, dict.fromkeys(costs.BITS, 1e-9), 0.0)
    monkeypatch.setattr(examination, "costs_of", lambda device: given)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_steps_fit_and_keep_the_error(monkeypatch, seed):
    """At three targets the real step takes what was promised, and less than the target; values come back unchanged."""
    drawn_times(monkeypatch, seed)
    model, batch = language(dropout=0.0)
    before = copy.deepcopy(model.state_dict())
    exact_peak = measured_peak(copy.deepcopy(model), batch, loss)
    for part in (0.8, 0.6, 0.5):
        memory, bound = int(part * exact_peak), 0.02
        state = torch.get_rng_state()
        found = fit(model, batch, memory, error=bound)
        assert found.notes == ()
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert found.exact_peak == pytest.approx(exact_peak, rel=0.01)
        real = measured_peak(copy.deepcopy(model), batch, loss)
        assert real <= memory
        assert found.peak == pytest.approx(real, rel=0.02)
        assert found.bound <= found.seconds
        twin = language(dropout=0.0)[0]
        exact = gradient(twin, batch, 0)
        errors = [
            ((gradient(model, batch, seed) - exact).norm() / exact.norm()).item() ** 2
            for seed in range(3)
        ]
        assert sum(errors) / 3 <= bound
        assert sum(errors) / 3 == pytest.approx(found.error, rel=0.4, abs=1e-5)
        twin.load_state_dict(model.state_dict())
        exec(found.code, {"fewbit": fewbit, "model": twin})
        assert fewbit.saved_bytes(twin, batch).total == fewbit.saved_bytes(model, batch).total
    assert fit(model, batch, 2 * exact_peak).code == ""  # all exact
    fewbit.restore_(model)
    assert type(model) is Language


@pytest.mark.slow
def test_a_measured_error_above_the_bound_is_not_taken(monkeypatch):
    """Errors of single blocks need not explain that of a mixture; here they are predicted 50 times too small."""
    predicted = examination.Examination._error
    monkeypatch.setattr(
        examination.Examination, "_error", lambda self, *args: predicted(self, *args) / 50
    )
    options = tuple(Option(bits) for bits in (None, 8, 4, 2))
    monkeypatch.setattr(examination, "OPTIONS", options)
    model, batch = language(dropout=0.0)
    memory, bound = int(0.6 * measured_peak(copy.deepcopy(model), batch, loss)), 0.002
    found = fit(model, batch, memory, error=bound)
    assert found.peak <= memory and 0 < found.error <= bound
    exact = gradient(language(dropout=0.0)[0], batch, 0)
    errors = [
        ((gradient(model, batch, seed) - exact).norm() / exact.norm()) ** 2 for seed in range(3)
    ]
    assert sum(errors) / 3 < 1.5 * bound


@pytest.mark.slow
@pytest.mark.parametrize("make", ["meta", "real"])
def test_what_is_missing_is_said(make):
    model, batch = language(dropout=0.0)
    if make == "meta":
        with torch.device("meta"):
            model, batch = Language().train(), torch.empty(8, 64, dtype=torch.long)
    with pytest.raises(InputError) as error:
        fit(model, batch, 4 * MIB)
    message = str(error.value)
    assert message.startswith("memory: expected at least about ") and "got 4.00 MiB" in message
    assert " in place of 8" in message and "\n" not in message
    fitting = float(message.split("about ")[1].split(" MiB")[0]) * 1.02
    found = fit(model, batch, int(fitting * MIB))
    assert found.peak <= fitting * MIB
    assert (make == "meta") == any("nothing was run" in note for note in found.notes)


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_examined_once(monkeypatch):
    """One step for each option, and one that shows in which order blocks are called."""
    steps = FakeBlockSteps.timeline_of
    settings = []

    def timeline_of(self, one, *args):
        settings.append(one)
        return steps(self, one, *args)

    monkeypatch.setattr(FakeBlockSteps, "timeline_of", timeline_of)
    monkeypatch.setattr(examination, "OPTIONS", (Option(), Option(4), RECOMPUTED))
    with torch.device("meta"):
        model, batch = Language(layers=2).train(), torch.empty(8, 64, dtype=torch.long)
    fit(model, batch, 2**30)
    rests = len(examination.BITS_OF_REST[1:])
    chunks = sum(one.head is not None for one in settings)
    assert len(settings) == 1 + 3 + rests + chunks + 1  # the last measures the choice


@pytest.mark.slow
def test_the_smallest_choice_remains_if_no_other_is_found(monkeypatch):
    """The measured peaks of other choices may exceed their predictions; the message that nothing fits would be wrong."""
    monkeypatch.setattr(sys.modules["fewbit.planning.fit"], "ATTEMPTS", 0)
    model, batch = language(dropout=0.0)
    found = fit(model, batch, 7 * MIB)
    assert found.peak <= 6 * MIB
    assert found.peak == pytest.approx(measured_peak(model, batch, loss), rel=0.05)


@pytest.mark.slow
def test_experts():
    """Values decide shapes in this model."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(tiny_models.mixtral()).train()
    ids = torch.randint(100, (8, 64))
    found = fit(model, {"input_ids": ids, "labels": ids}, 9 * MIB, loss=None)
    assert found.peak <= 9 * MIB < found.exact_peak
    assert [path for path in found.settings.blocks] == ["model.layers.0", "model.layers.1"]
    model(ids, labels=ids).loss.backward()


@pytest.mark.slow
def test_options_that_raise_errors_are_left_out():
    """`fewbit.checkpoint` refuses random slopes, so no block gets rounded inputs; the result says so."""
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(), nn.Linear(WIDTH, WIDTH))
        for _ in range(4)
    ]
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), *parts).train(), torch.randn(1024, WIDTH)
    found = fit(model, x, 3 * MIB, loss=mean_loss)
    assert found.peak <= 3 * MIB < found.exact_peak
    assert all(option.input_bits is None for option in found.settings.blocks.values())
    notes = [note for note in found.notes if "not considered" in note]
    assert "recompute, input 8 bits: not considered, because a step raises Grad" in notes[0]
    assert all("rrelu" in note.lower() for note in notes), notes


class Shared(nn.Module):
    """A model that calls blocks in the order of `calls`, some of them several times."""

    def __init__(self, *calls):
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), calls
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(max(calls) + 1)
            ]
        )

    def forward(self, x):
        x = self.first(x)
        for number in self.calls:
            x = x + self.blocks[number](x)
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls, once", [((0, 1, 0, 0), [1]), ((0, 0, 0, 0), []), ((0, 1, 2, 1, 3), [0, 2, 3])]
)
@pytest.mark.parametrize("share", [0.8, 0.55])
def test_shared_blocks_belong_to_the_rest(calls, once, share):
    """The real step takes what was predicted, also if a block runs in a loop."""
    torch.manual_seed(0)
    model, x = Shared(*calls).train(), torch.randn(1024, WIDTH)
    exact_peak = measured_peak(copy.deepcopy(model), x, mean_loss)
    memory = int(share * exact_peak)
    found = fit(model, x, memory, loss=mean_loss, blocks="blocks.*")
    assert found.exact_peak == pytest.approx(exact_peak, rel=0.01)
    assert list(found.settings.blocks) == [f"blocks.{number}" for number in once]
    repeated = next(number for number in calls if number not in once)
    assert any(note.startswith(f"blocks.{repeated}: called several times") for note in found.notes)
    real = measured_peak(copy.deepcopy(model), x, mean_loss)
    assert real <= memory and found.peak == pytest.approx(real, rel=0.01)


@pytest.mark.slow
def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    """Ctrl-C in the fifth step: classes, hooks, attributes and gradients are those of before."""
    model, batch = language(layers=2)
    fewbit.compress_(model, 8, verbose=False)
    loss(model, batch).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    original, count = RealBlockSteps.timeline_of, []

    def interrupted(self, *args, **options):
        count.append(None)
        if len(count) == 5:
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(RealBlockSteps, "timeline_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model, batch, 6 * MIB)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert [parameter.grad for parameter in model.parameters()] == gradients


REFUSED = [  # (arguments, message)
    ({"memory": "much"}, "memory: expected a size such as"),
    ({"memory": None}, "memory: expected a size such as '24 GiB', got None"),
    ({"memory": 3}, "memory: expected a size such as '24 GiB', or at least"),
    ({"error": "small"}, "error: expected a number of at least 0, got 'small'"),
    ({"error": -1}, "error: expected a number of at least 0, got -1"),
    ({"accumulates": 2}, "accumulates: expected True or False, got 2"),
    ({"blocks": "layers.*"}, "blocks: expected a glob that matches a module"),
    ({"loss": 3}, "loss: expected a function"),
    ({"loss": None}, r"loss: expected a function loss\(model, batch\), because the model returns neither a scalar nor"),
    ({"batch": "text"}, "sample: expected a tensor with samples in dimension 0, or a tuple or mapping with one, got str"),
    ({"optimizer": 3}, "optimizer: expected a class, a function or an optimizer"),
    ({"optimizer": lambda p: 3}, "optimizer: expected it to make a torch optimizer"),
    ({"verbose": 3}, "verbose"),
    ({"batch": torch.zeros(0, 64, dtype=torch.long)}, "sample: expected at least one sample, got none"),
    ({"batch": torch.zeros(8, 64)}, "batch: expected one that loss"),
    ({"model": nn.Linear}, "model: expected a torch.nn.Module"),
    ({"memory": MIB}, "memory: expected at least .* for weights, gradients and AdamW alone, got 1.00 MiB; an optimizer"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refusals(changes, message):
    model, batch = language(layers=1)
    arguments = {"model": model, "batch": batch, "memory": 64 * MIB} | changes
    with pytest.raises(InputError, match=message) as error:
        fit(**arguments)
    assert "\n" not in str(error.value)
    assert type(model.head) is nn.Linear and "forward" not in vars(model.encoder)


@pytest.mark.slow
def test_accumulated_gradients_count():
    """With gradients of an earlier batch, the second batch's passes fit; without them, the same target needs less."""
    model, batch = language(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    memory = int(8.5 * MIB)
    found = fit(model, batch, memory, accumulates=True, optimizer=optimizer)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    loss(model, batch).backward()
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    before = sum(x.nbytes for x in [*model.parameters(), *states, *gradients, batch])
    most = before + most_bytes(lambda: loss(model, batch).backward())
    assert most <= memory
    assert most == pytest.approx(found.peak, rel=0.01)
    twin = language(dropout=0.0)[0]
    bytes_ = OptimizerBytes(twin, partial(torch.optim.SGD, momentum=0.9), on_gpu=False)
    fake = FakeBlockSteps(twin, [], batch, loss, bytes_, True, Processes(), on_gpu=False)
    peak = fake.timeline_of(Settings({})).peak().size
    assert peak == pytest.approx(found.exact_peak, rel=0.02)


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_choice_can_be_compiled():
    """torch.compile traces the model after the choice; its regions are torch's, so the gradients are close to exact ones."""
    model, batch = language(layers=3, dropout=0.0)
    exact = gradient(model, batch, 0)
    paths = [f"encoder.layers.{number}" for number in range(3)]
    Settings({paths[0]: RECOMPUTED, paths[1]: Option(8), paths[2]: Option(8, True, 8)}).apply(model)
    compiled = torch.compile(model, backend="aot_eager")
    found = gradient(compiled, batch, 0)
    assert 0 < (found - exact).norm() < 0.05 * exact.norm()


def wrapped(model):
    return torch.compile(model, backend="aot_eager")


def in_place(model):
    model.compile(backend="aot_eager")
    return model


def blocks_in_place(model):
    for layer in model.encoder.layers:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compiled", [wrapped, in_place, blocks_in_place])
@pytest.mark.parametrize("memory", [8 * MIB, 6 * MIB])
def test_a_compiled_model_is_compiled_anew(monkeypatch, compiled, memory):
    """The choice, the bytes and the gradients are those of a model that is compiled afterwards."""
    torch._dynamo.reset()
    model, batch = language(layers=3, dropout=0.0)
    before = compiled(model)
    gradient(before, batch, 0)
    exact = most_bytes(lambda: loss(before, batch).backward())
    codes = [module._compiled_call_impl for module in model.modules()]
    drawn_times(monkeypatch, 0)
    found = fit(before, batch, memory)
    assert [module._compiled_call_impl for module in model.modules()] == codes
    assert found.model == "Language" and found.code
    assert found.notes[-1].startswith("the model is compiled: bytes and times are those of eager")
    twin = language(layers=3, dropout=0.0)[0]
    found.apply(twin)
    after = compiled(twin)
    assert torch.equal(gradient(before, batch, 0), gradient(after, batch, 0))
    peaks = [most_bytes(lambda one=one: loss(one, batch).backward()) for one in (before, after)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01) and peaks[0] < 0.97 * exact
    with pytest.raises(InputError, match="for weights, gradients and AdamW alone"):
        fit(before, batch, MIB)
    assert [module._compiled_call_impl for module in model.modules()] == codes


def test_a_model_of_the_compiler_mode_is_refused():
    model, batch = language(layers=1)
    with pytest.raises(InputError, match="model: expected one that is not compiled"):
        fit(fewbit.compile(model, 4, backend="aot_eager"), batch, 64 * MIB)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_of_transformers_is_refused():
    """`fit_` would undo it silently. Regions of an earlier `checkpoint_` are undone, as the documentation says."""
    model = LlamaForCausalLM(tiny_models.llama()).train()
    ids = torch.randint(100, (2, 8))
    model.gradient_checkpointing_enable()
    with pytest.raises(
        InputError,
        match="model: expected one without gradient checkpointing, .* call model.gradient",
    ):
        fit(model, {"input_ids": ids, "labels": ids}, 64 * MIB, loss=None)
    assert model.model.layers[0].gradient_checkpointing
    model.gradient_checkpointing_disable()
    fewbit.checkpoint_(model, include="model.layers.*")
    with pytest.raises(InputError, match="for weights, gradients and AdamW alone"):
        fit(model, {"input_ids": ids, "labels": ids}, MIB, loss=None)
    assert model.model.layers[0].gradient_checkpointing  # as before the call


@pytest.mark.slow
@pytest.mark.parametrize("own_loss", [True, False])
def test_a_loss_in_chunks_is_chosen_if_the_logits_dominate(monkeypatch, own_loss):
    """Below the bytes of two matrices of logits nothing else fits; the pasted code and the real step agree."""
    monkeypatch.setattr(losses, "CHUNK", 2**17)
    torch.manual_seed(0)
    ids = torch.randint(4000, (4, 128))
    if own_loss:
        model, batch, function = Language(layers=2, dropout=0.0), ids, loss
        model.embedding, model.head = nn.Embedding(4000, WIDTH), nn.Linear(WIDTH, 4000)
    else:
        config = tiny_models.llama()
        config.vocab_size = 4000
        model, function = LlamaForCausalLM(config), None
        batch = {"input_ids": ids, "labels": ids}
    model.train()
    logits = 4 * ids.numel() * 4000
    exact_peak = measured_peak(copy.deepcopy(model), batch, function or loss_of_output)
    memory = exact_peak - 2 * logits
    found = fit(model, batch, memory, loss=function)
    assert found.settings.head in ("head", "lm_head")
    assert f"chunk_loss_(model, {found.settings.head!r})" in found.code
    assert "loss in chunks" in str(found)
    real = measured_peak(copy.deepcopy(model), batch, function or loss_of_output)
    assert real <= memory and found.peak == pytest.approx(real, rel=0.03)
    loaded = fewbit.FastestFit.from_json(found.to_json())
    assert loaded.settings == found.settings
    assert fit(model, batch, 2 * exact_peak, loss=function).settings.head is None


@pytest.mark.slow
def test_fits_and_plan_measure_what_fit_applies():
    """One notion of a setting: the settings of `fit_`, "exact", bits and a candidate, in all three."""
    model, batch = language(layers=2, dropout=0.0)
    paths = [f"encoder.layers.{number}" for number in range(2)]
    settings = Settings({paths[0]: RECOMPUTED, paths[1]: Option(2)}, 4)
    given = ["exact", 4, settings, fewbit.Candidate("own", 2)]
    table = fewbit.fits(model, batch, loss, settings=given, progress=False)
    assert [row.setting for row in table.rows][:2] == ["exact", "4 bits"]
    plan = fewbit.plan(model, [batch, batch], loss, candidates=given, progress=False)
    twin = copy.deepcopy(model)
    settings.apply(twin)
    expected = fewbit.saved_bytes(lambda: loss(twin, batch)).total
    assert plan.rows[2].saved_bytes == expected
    assert plan.rows[0].error == 0 and plan.rows[0].saved_bytes == plan.exact_bytes
    loaded = fewbit.TrainingPlan.from_json(plan.to_json())
    regions = [[row.candidate.checkpoints for row in one.rows] for one in (plan, loaded)]
    assert regions[0] == regions[1] and regions[0][2][0].include == (paths[0],)
    fresh = language(layers=2, dropout=0.0)[0]
    fewbit.compress_(fresh, 2, verbose=False)  # the regions of the candidate before are gone
    assert plan.rows[3].saved_bytes == fewbit.saved_bytes(lambda: loss(fresh, batch)).total


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")
def test_adapters_in_autocast():
    """Frozen weights have neither gradients nor state; autocast is in the loss, and the real step fits."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = tiny_models.llama()
    config.max_position_embeddings = 512
    model = peft.get_peft_model(
        LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    ).train()
    ids = torch.randint(100, (16, 128))

    def mixed(model, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    exact_peak = measured_peak(copy.deepcopy(model), ids, mixed)
    memory = int(0.7 * exact_peak)
    found = fit(model, ids, memory, loss=mixed)
    assert len(found.settings.blocks) == config.num_hidden_layers
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert found.peak <= memory and trained < 0.2 * sum(p.nbytes for p in model.parameters())
    assert measured_peak(model, ids, mixed) <= memory
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert frozen and all(p.grad is None for p in frozen)


@pytest.mark.slow
def test_a_unet_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).train()  # fmt: skip
    batch = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))

    def denoising(model, batch):
        return F.mse_loss(model(*batch).sample, batch[0])

    exact_peak = measured_peak(copy.deepcopy(model), batch, denoising)
    memory = int(0.8 * exact_peak)
    found = fit(model, batch, memory, loss=denoising)
    assert found.settings.blocks and found.peak <= memory
    assert measured_peak(model, batch, denoising) <= 1.01 * memory


@pytest.mark.slow
def test_a_model_without_blocks():
    """The result says that there are none, and an error says what would help. The sample may be any mapping."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    ).train()
    sample = UserDict(input=torch.randn(4, 2048, WIDTH)[0])  # a slice, of which only itself counts

    def fitted(memory):
        return fit(model, sample, memory, loss=lambda model, batch: model(**batch).square().mean())

    found = fitted(2**30)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.settings.blocks == {} and found.code == ""
    assert any(note.startswith("no blocks were found") for note in found.notes)
    with pytest.raises(InputError, match="blocks to compute again") as error:
        fitted(found.exact_peak // 2)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_batches_of_other_sizes():
    """A model trains with other batches than the sample; smaller ones take less memory."""
    model, batch = language(layers=2, dropout=0.0)
    found = fit(model, batch, 6 * MIB)
    peaks = [measured_peak(copy.deepcopy(model), batch[:size], loss) for size in (2, 5, 8)]
    assert peaks[0] < peaks[1] < peaks[2] <= 6 * MIB and found.peak <= 6 * MIB
