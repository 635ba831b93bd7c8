"""`FewbitCallback` in the Trainer of transformers: compression, logs, checkpoints and resumed training."""

import json
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("transformers")

from accelerate.utils import DistributedType
from quick_fit import quick_fit
from trainer_runs import USUAL, llama, logged, saved_by_step, texts, weights
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from two_processes import run_twice

import fewbit
from fewbit.convert.swap import is_converted
from fewbit.errors import InputError
from fewbit.integrations.first_batch import first_batch
from fewbit.integrations.transformers import BITS, SAVED, FewbitCallback

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:.*pin_memory.*:UserWarning",
    "ignore:.*is deprecated and will be removed in v6:FutureWarning",
)
QUIET = {"verbose": False}
SAVES = {"max_steps": 5, "save_strategy": "steps", "save_steps": 3}


def trainer(folder, callback=None, model=None, data=16, **arguments):
    """Return a Trainer of a small model, with the callback."""
    arguments = {**USUAL, "max_steps": 4, "logging_steps": 2, **arguments}
    return Trainer(
        model=llama() if model is None and "model_init" not in arguments else model,
        model_init=arguments.pop("model_init", None),
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=texts(data),
        eval_dataset=texts(4, seed=2),
        callbacks=None if callback is None else [callback],
    )


def test_trains_with_fewer_saved_bytes_and_logs_them(tmp_path):
    """Evaluation is exact, and the model that is saved is one of transformers."""
    callback = FewbitCallback(bits=2, **QUIET)
    run, exact = trainer(tmp_path, callback), trainer(tmp_path)
    assert callback.controller.model is run.model
    assert is_converted(run.model.model.layers[0].mlp.down_proj)
    expected = saved_by_step(exact)
    assert run.evaluate()["eval_loss"] == exact.evaluate()["eval_loss"]
    run.train()
    assert len(logged(run, "loss")) == 2
    assert logged(run, BITS) == [2, 2]
    first, second = logged(run, SAVED)
    assert first == second == saved_by_step(run)
    batch = {name: value[None].repeat(4, 1) for name, value in texts(1)[0].items()}
    # The meter counts a batch of its own, and the Trainer's loss is divided by the number of tokens.
    assert abs(first - fewbit.saved_bytes(run.model, **batch).total) < 1000
    assert 5 * first < expected
    run.save_model(str(tmp_path / "model"))
    text = (tmp_path / "model" / "config.json").read_text()
    assert "fewbit" not in text and json.loads(text)["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert weights(loaded) == weights(run.model)
    assert loaded.config._attn_implementation == "sdpa"


CONFIGS = [
    fewbit.FixedBits(2),
    fewbit.AdaptiveBits(2, interval=3),
    fewbit.SampleBits(2.5),
    fewbit.ErrorBound(interval=3),
]


def check_resumed(tmp_path, bits, stop=3, resumed_in=None, **arguments):
    """Check that a training which stops and is resumed ends with the weights of an uninterrupted one."""
    arguments = {"max_steps": 6, "save_strategy": "steps", "save_steps": stop, **arguments}
    callback = FewbitCallback(bits, **QUIET)
    run = trainer(tmp_path / "a", callback, **arguments)
    run.train()
    other = FewbitCallback(bits, **QUIET)
    torch.manual_seed(123)
    resumed = trainer(tmp_path / (resumed_in or "a"), other, llama(seed=5), **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{stop}"))
    assert weights(resumed.model) == weights(run.model)
    assert other.controller.allocation == callback.controller.allocation
    assert other.controller.bounds == callback.controller.bounds
    assert other.controller.state_dict() == callback.controller.state_dict()
    assert logged(resumed, "loss")[-1] == logged(run, "loss")[-1]


@pytest.mark.fast(2)
@pytest.mark.parametrize("bits", CONFIGS, ids=repr)
def test_resumed_training_ends_with_the_same_weights(bits, tmp_path):
    check_resumed(tmp_path, bits, resumed_in="b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"stop": 4, "max_steps": 7},  # the end of an epoch
        {"gradient_accumulation_steps": 2, "data": 32},
        {"bf16": True, "stop": 5, "max_steps": 9},
        {"gradient_checkpointing": True},
        {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore:gradient checkpointing saves the input of each block in full")
def test_resumed_training_with_other_settings(arguments, tmp_path):
    check_resumed(tmp_path, fewbit.AdaptiveBits(2, interval=3), **arguments)


def test_without_its_state_a_resumed_training_differs(tmp_path):
    """The check above can fail: bits that are chosen anew give other weights. One line says that there is no state."""
    bits = fewbit.AdaptiveBits(2, interval=3)
    run = trainer(tmp_path, FewbitCallback(bits, **QUIET), **SAVES)
    run.train()
    path = tmp_path / "checkpoint-3" / "trainer_state.json"
    state = json.loads(path.read_text())
    assert state["stateful_callbacks"].pop("FewbitCallback")
    path.write_text(json.dumps(state))
    resumed = trainer(tmp_path, FewbitCallback(bits, **QUIET), **SAVES)
    with pytest.warns(UserWarning, match="the checkpoint has no state of FewbitCallback"):
        resumed.train(resume_from_checkpoint=str(path.parent))
    assert weights(resumed.model) != weights(run.model)
    assert (tmp_path / "checkpoint-5" / "trainer_state.json").exists()
    fixed = trainer(tmp_path, FewbitCallback(2, **QUIET), **SAVES)
    fixed.train(resume_from_checkpoint=str(path.parent))  # fixed bits have no state: no warning


def test_counting_does_not_change_the_training(tmp_path):
    ends = []
    for steps in (1, 100):
        callback = FewbitCallback(fewbit.AdaptiveBits(2, interval=2), **QUIET)
        run = trainer(tmp_path, callback, logging_steps=steps)
        run.train()
        ends.append(weights(run.model))
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_a_second_training_continues_with_the_same_controller(tmp_path):
    callback = FewbitCallback(fewbit.AdaptiveBits(2, interval=2), **QUIET)
    run = trainer(tmp_path, callback)
    controller = callback.controller
    run.train()
    step = controller.state_dict()["schedule"]["step"]
    run.train()
    assert callback.controller is controller
    assert controller.state_dict()["schedule"]["step"] == step + 4
    again = trainer(tmp_path, callback, run.model)
    assert callback.controller is controller and again.model is run.model


def test_a_model_of_model_init_is_compressed_in_each_training(tmp_path, capsys):
    callback = FewbitCallback(2)
    run = trainer(tmp_path, callback, model_init=lambda: llama())
    models = [run.model]
    for _ in range(2):
        run.train()
        models.append(run.model)
        assert callback.controller.model is run.model
        assert is_converted(run.model.model.layers[0].mlp.down_proj)
    assert len(set(models)) == 3
    assert logged(run, SAVED)[0] == saved_by_step(run)
    assert capsys.readouterr().out.count("modules converted") == 1


def test_earlier_settings_do_not_stay(tmp_path):
    """A model that was compressed before, by hand or by another trainer, gets the settings of the callback."""
    model = llama()
    layer = model.model.layers[0].mlp.down_proj
    fewbit.compress_(model, 8, **QUIET)
    callback = FewbitCallback(
        **json.loads('{"bits": {"kind": "fixed", "bits": 2}, "verbose": false}')
    )
    run = trainer(tmp_path, callback, model, max_steps=1)
    assert layer.quantizer.bits == 2
    notes = callback.controller.report.notes
    assert any("an earlier call of compress_ was undone" in note for note in notes)
    run.train()
    trainer(tmp_path, FewbitCallback(5, **QUIET), run.model)
    assert layer.quantizer.bits == 5
    again = trainer(tmp_path, None, run.model, max_steps=1)
    again.add_callback(FewbitCallback(3, **QUIET))
    again.train()
    assert layer.quantizer.bits == 3


@pytest.mark.slow
@pytest.mark.parametrize("include", ["*", lambda path, module: True], ids=["json", "function"])
def test_the_trainer_may_make_its_callbacks_anew(include, tmp_path):
    """`restore_callback_states_from_checkpoint` replaces the callbacks by new objects, made from the checkpoint."""
    bits = fewbit.AdaptiveBits(2, interval=3)

    def made():
        return FewbitCallback(bits, include=include, exclude="lm_head", **QUIET)

    run = trainer(tmp_path, made(), **SAVES)
    run.train()
    callback = made()
    resumed = trainer(tmp_path, callback, restore_callback_states_from_checkpoint=True, **SAVES)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    (new,) = (one for one in resumed.callback_handler.callbacks if isinstance(one, FewbitCallback))
    assert new is not callback and new.controller is callback.controller
    assert weights(resumed.model) == weights(run.model)
    if include == "*":
        assert new.arguments == callback.arguments


@pytest.mark.slow
@pytest.mark.parametrize("include", ["*", lambda path, module: True], ids=["json", "function"])
def test_callbacks_that_are_made_anew_compress_new_models(include, tmp_path):
    """With `model_init`, the new callback compresses a model itself, with the arguments in the checkpoint."""
    arguments = {**SAVES, "model_init": lambda: llama()}
    callback = FewbitCallback(fewbit.AdaptiveBits(2, interval=3), include=include, **QUIET)
    run = trainer(tmp_path, callback, **arguments)
    run.train()
    arguments["restore_callback_states_from_checkpoint"] = True
    resumed = trainer(tmp_path, FewbitCallback(8, **QUIET), **arguments)
    refused = pytest.raises(InputError, match="the checkpoint has no include")
    with nullcontext() if include == "*" else refused:
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
        assert weights(resumed.model) == weights(run.model)


def test_bits_that_cannot_be_used():
    for bits in (9, {"kind": "none"}):
        with pytest.raises(InputError, match="expected a (number from 1 to 8|kind out of fixed)"):
            FewbitCallback(bits)


def trained(folder, **arguments):
    """Train for a step, twice. Return the Trainer and the warnings that the callback gave."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run = trainer(folder, FewbitCallback(2, **QUIET), max_steps=1, logging_steps=1, **arguments)
        for _ in range(2):
            run.train()
    own = [str(one.message) for one in found if Path(one.filename).stem == "trainer_callback"]
    return run, own


@pytest.mark.slow
def test_gradient_checkpointing_is_named_unless_it_is_of_fewbit(tmp_path):
    run, found = trained(tmp_path)
    assert found == []
    run, found = trained(tmp_path, gradient_checkpointing=True)
    assert len(found) == 1
    assert found[0].startswith("gradient checkpointing saves the input of each block in full")
    whole = logged(run, SAVED)[0]
    model = llama()
    fewbit.checkpoint_(model)
    run, found = trained(tmp_path, model=model)
    assert found == []
    assert logged(run, SAVED)[0] < 0.6 * whole


def test_layers_whose_forward_is_replaced_are_named(tmp_path):
    """Liger binds its own forward to modules when the training begins, after the callback has compressed them."""
    model = llama()
    run = trainer(tmp_path, FewbitCallback(2, **QUIET), model, max_steps=1)
    for norm in (model.model.layers[0].input_layernorm, model.model.norm):
        norm.forward = lambda x: x * 2
    message = "^2 compressed layers, model.layers.0.input_layernorm first"
    with pytest.warns(UserWarning, match=message):
        run.train()


@pytest.mark.slow
def test_torch_compile(tmp_path):
    """Compiled code trains, with a line about it. Saved bytes are not counted, which would compile it again."""
    model = llama(dropout=0.0)
    arguments = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    run, found = trained(tmp_path, model=model, **arguments)
    assert len(found) == 1 and found[0].startswith("torch_compile=True: ")
    assert logged(run, SAVED) == [] and logged(run, BITS) == [2]
    batch = {name: value[None].repeat(4, 1) for name, value in texts(1)[0].items()}
    compiled = fewbit.saved_bytes(run.model_wrapped, **batch).total
    exact = fewbit.saved_bytes(llama(dropout=0.0), **batch).total
    assert 3 * compiled < exact


WORKER = Path(__file__).parent / "trainer_worker.py"


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_choose_the_same_bits(tmp_path):
    """Both end with the same weights and bits, also in a resumed training. Only one prints the report."""
    texts = run_twice(WORKER, "bits", folder=tmp_path)
    assert [text.count("modules converted") for text in texts] == [2, 0]


@pytest.mark.processes
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_two_processes_take_one_choice(tmp_path, library):
    """With a memory, both choose the same, and a step of a replica takes what was predicted. Only one prints the choice."""
    pytest.importorskip(library)
    texts = run_twice(WORKER, f"memory_of_{library}", folder=tmp_path)
    assert ["exact training takes" in " ".join(text.split()) for text in texts] == [True, False]


class Once(IterableDataset):
    """Data that can be read only once."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Let fit_ measure little, and leave the user's cache alone."""
    quick_fit(monkeypatch, tmp_path)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_memory_in_place_of_bits(tmp_path, quick, steps):
    """The first batch is the sample, the Trainer's optimizer counts, and the same training without fewbit takes more."""
    wide = {"max_position_embeddings": 512, "hidden_size": 128}
    callback = FewbitCallback(memory=11 * 2**20, progress=False, **QUIET)
    run = trainer(
        tmp_path,
        callback,
        llama(**wide),
        per_device_train_batch_size=16,
        data=64,
        gradient_accumulation_steps=steps,
    )
    assert callback.fit is None and not is_converted(run.model.model.layers[0].mlp.down_proj)
    run.train()
    assert callback.fit.peak <= 11 * 2**20 < callback.fit.exact_peak
    assert callback.fit.batch == 16 and callback.fit.optimizer == "AdamW"
    assert len(logged(run, SAVED)) == 2
    exact = trainer(
        tmp_path / "exact", None, llama(**wide), per_device_train_batch_size=16, data=64
    )
    assert logged(run, SAVED)[0] < saved_by_step(exact)


@pytest.mark.parametrize("seedable", [True, False])
def test_no_batch_is_lost_and_none_is_shuffled(tmp_path, quick, seedable):
    """The callback reads the first batch; the training then sees the batches of a training without it, in their order."""
    seen = []
    for callback in (None, FewbitCallback(memory="1 GiB", progress=False, **QUIET)):
        run = trainer(
            tmp_path / str(len(seen)),
            callback,
            llama(),
            data=20,
            per_device_train_batch_size=4,
            max_steps=12,
            accelerator_config={"use_seedable_sampler": seedable},
        )
        batches, original = [], run.training_step

        def step(model, inputs, *rest, batches=batches, original=original):
            batches.append(inputs["input_ids"].clone())
            return original(model, inputs, *rest)

        run.training_step = step
        run.train()
        seen.append((batches, run.accelerator.gradient_state.active_dataloader is None))
    (exact, is_read), (fitted, is_read_too) = seen
    assert len(exact) == len(fitted) == 12 and is_read == is_read_too
    assert all(torch.equal(a, b) for a, b in zip(exact, fitted, strict=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataLoader([]), "a data loader with a batch, got an empty one"),
        (DataLoader(Once()), "a data loader whose data can be read again"),
    ],
)
def test_data_without_a_first_batch(data, message):
    with pytest.raises(InputError, match=f"memory: expected {message}"):
        first_batch(data)


def test_a_memory_needs_a_training_that_it_can_measure(tmp_path):
    run = trainer(tmp_path, FewbitCallback(memory="1 GiB"), gradient_checkpointing=True)
    with pytest.raises(InputError, match="a training with gradient_checkpointing=False, got True"):
        run.train()
    assert FewbitCallback(memory="1 GiB", **QUIET).state()["args"]["memory"] == "1 GiB"


def test_a_loss_of_the_trainer_is_given(tmp_path):
    """With label smoothing the Trainer computes a loss that the callback does not know, unless it is given."""
    run = trainer(tmp_path, None, label_smoothing_factor=0.1)
    callback = FewbitCallback(memory=2**30, progress=False, **QUIET)
    run.add_callback(callback)
    with pytest.raises(InputError, match="with label_smoothing_factor=0, or .*, got 0.1"):
        run.train()
    run.remove_callback(callback)
    given = FewbitCallback(memory=2**30, loss=run.compute_loss, progress=False, **QUIET)
    run.add_callback(given)
    run.train()
    assert given.fit.peak <= 2**30
    assert given.state()["attributes"]["_missing"] == ["loss"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"memory": "1 GiB", "bits": 4}, "bits: expected none with memory='1 GiB', got 4"),
        ({"memory": "12 foo"}, "memory: expected a size"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message):
    with pytest.raises(InputError, match=message):
        FewbitCallback(**arguments)


def test_a_memory_needs_replicas_in_several_processes(tmp_path, monkeypatch):
    """With FSDP or DeepSpeed the model is sharded before the callback sees a batch."""
    callback = FewbitCallback(memory="1 GiB")
    run = trainer(tmp_path, callback)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    state = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr("fewbit.integrations.transformers.AcceleratorState", lambda: state)
    with pytest.raises(
        InputError, match="with DistributedDataParallel, got FSDP; with FSDP2, call"
    ):
        callback.on_train_begin(
            run.args, run.state, None, run.model, train_dataloader=None, optimizer=None
        )
