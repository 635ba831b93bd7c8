"""`FewbitCallback` in the trainers of TRL, with and without adapters of peft."""

import random
from importlib.util import find_spec

import pytest
import torch

if any(find_spec(name) is None for name in ("trl", "peft", "datasets", "tokenizers")):
    pytest.skip("needs trl, peft, datasets and tokenizers", allow_module_level=True)

from quick_fit import quick_fit
from trainer_runs import USUAL, llama, logged, saved_by_step, weights

import fewbit
from fewbit.integrations.transformers import BITS, SAVED, FewbitCallback

# To import TRL takes seconds, so the tests import it when they run.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:.*packing.*:UserWarning",
    ),
]
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
QUIET = {"verbose": False}
OPTIONS = {**USUAL, "max_steps": 2, "gradient_checkpointing": False}


def tokenizer():
    """Return a tokenizer of single letters, which needs no files."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def lines(count, length, seed):
    """Return lines of random letters."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS[4:], k=length)) for _ in range(count)]


def lora():
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])


def sft(folder, callback, with_lora=False, model=None, **arguments):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model or llama(),
        args=SFTConfig(str(folder), **{**OPTIONS, **arguments}),
        train_dataset=Dataset.from_dict({"text": lines(16, 40, 1)}),
        processing_class=tokenizer(),
        peft_config=lora() if with_lora else None,
        callbacks=[callback],
    )


def dpo(folder, callback, with_lora=False, **arguments):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    columns = {
        "prompt": lines(16, 10, 1),
        "chosen": [f" {line}" for line in lines(16, 30, 2)],
        "rejected": [f" {line}" for line in lines(16, 30, 3)],
    }
    return DPOTrainer(
        model=llama(),
        ref_model=None if with_lora else llama(),
        args=DPOConfig(str(folder), **{**OPTIONS, **arguments}),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer(),
        peft_config=lora() if with_lora else None,
        callbacks=[callback],
    )


def online(folder, name, callback, with_lora, **arguments):
    """Return a GRPOTrainer or RLOOTrainer, which generates texts and compares log-probabilities with a reference model's."""
    import trl
    from datasets import Dataset

    # Without adapters, the trainer loads the reference model from the model's folder.
    start = llama()
    start.save_pretrained(folder / "model")
    model = type(start).from_pretrained(folder / "model")
    options = {**OPTIONS, "num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    return getattr(trl, f"{name}Trainer")(
        model=model,
        reward_funcs=lambda completions, **_: [float(len({*text})) for text in completions],
        args=getattr(trl, f"{name}Config")(str(folder), **{**options, **arguments}),
        train_dataset=Dataset.from_dict({"prompt": lines(16, 10, 1)}),
        processing_class=tokenizer(),
        peft_config=lora() if with_lora else None,
        callbacks=[callback],
    )


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "bits", [fewbit.AdaptiveBits(2, interval=2), fewbit.ErrorBound(interval=2)], ids=repr
)
@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_passes_without_gradient_do_not_advance_the_policy(name, bits, with_lora, tmp_path):
    """The trainers generate, and compute log-probabilities of the old policy and of the reference, by the trained model."""
    callback = FewbitCallback(bits, **QUIET)
    run = online(tmp_path, name, callback, with_lora, max_steps=4, num_iterations=2)
    counts, before = {True: 0, False: 0}, []

    def state():
        return callback.controller and callback.controller.state_dict()

    def begin(model, args):
        before.append(state())

    def end(model, args, result):
        with_grad = torch.is_grad_enabled()
        counts[with_grad] += 1
        first = before.pop()
        assert with_grad or state() == first

    inner = run.model.get_base_model() if with_lora else run.model  # which generates
    inner.register_forward_pre_hook(begin)
    inner.register_forward_hook(end)
    start = weights(run.model)
    run.train()
    assert run.state.global_step == 4 and weights(run.model) != start
    assert counts[True] == 4 and counts[False] >= 8
    assert callback.controller.state_dict()["schedule"]["step"] == counts[True]


@pytest.mark.parametrize("with_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("make", [sft, dpo])
def test_a_trainer_saves_several_times_fewer_bytes(make, with_lora, tmp_path):
    """The whole step counts: TRL's loss is computed in the model's forward, in bfloat16 autocast by default."""
    saved = []
    for bits in (fewbit.Level("L0"), fewbit.AdaptiveBits(2)):
        callback = FewbitCallback(bits, **QUIET)
        run = make(tmp_path, callback, with_lora)
        before = weights(run.model)
        run.train()
        assert run.args.bf16 and weights(run.model) != before
        saved.append(min(logged(run, SAVED)))
        assert len(logged(run, SAVED)) == 2
    paths = [row.path for row in callback.controller.report.converted]
    assert any("lora_A" in path for path in paths) == with_lora
    assert saved[0] > 8 * saved[1]


def test_logits_are_not_saved_by_default(tmp_path):
    """TRL computes the loss in tiles. With label smoothing it computes the loss from logits, outside of the model."""
    tokens, width, words = 4 * 40, 64, 4096
    saved = []
    for smoothing in (0.0, 0.1):
        model, callback = llama(vocab_size=words, dropout=0.0), FewbitCallback(2, **QUIET)
        options = {"bf16": False, "label_smoothing_factor": smoothing}
        run = sft(tmp_path, callback, model=model, **options)
        run.train()
        saved.append(min(logged(run, SAVED)))
        assert logged(run, SAVED)[-1] == saved_by_step(run)
    assert saved[0] < 4 * 4 * tokens * width
    assert saved[1] > saved[0] + 4 * tokens * words


def test_copies_may_be_moved_by_hooks_around_the_step(tmp_path):
    """`activation_offloading` needs a GPU. Its hooks on saved tensors do what torch's `save_on_cpu` does here."""
    ends = []
    for is_moved in (False, True):
        run = sft(
            tmp_path, FewbitCallback(fewbit.AdaptiveBits(2, interval=2), **QUIET), max_steps=4
        )
        if is_moved:
            run.args.activation_offloading = True
            run.maybe_activation_offload_context = torch.autograd.graph.save_on_cpu()
        run.train()
        assert (logged(run, SAVED) == []) == is_moved and len(logged(run, BITS)) == 4
        ends.append(weights(run.model))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("with_lora", [False, True])
def test_a_memory_in_place_of_bits(tmp_path, monkeypatch, with_lora):
    """The trainer of TRL trains with what `fit_` has chosen for its first batch."""
    quick_fit(monkeypatch, tmp_path)
    callback = FewbitCallback(memory="1 GiB", progress=False, **QUIET)
    run = sft(tmp_path, callback, with_lora)
    before = weights(run.model)
    run.train()
    assert callback.fit.peak <= 2**30 and len(callback.fit.settings.blocks) == 2
    assert callback.fit.optimizer == "AdamW"
    assert before != weights(run.model)
