"""The networks of alternatives.py: a GPT-2 on words, a ResNet-18 on images, and a LoRA fine-tuning of a Llama on bytes.

Dropout is off in all of them, so that gradients can be compared.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from networks import digits_resnet
from networks.compiled_networks import Step
from networks.short_training import train
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fewbit.demo import text
from fewbit.demo.text import Corpus
from fewbit.models.resnet import ResNet

WIDTH, LAYERS, HEADS, CONTEXT = 256, 4, 4, 256
VOCABULARY, BYTES = 4096, 256
SOURCES = "argparse", "ast", "difflib", "doctest", "inspect", "pickle", "tarfile", "typing"
"""The modules of the standard library whose source code the LoRA adapters learn."""
RANK = 8
PRETRAINING, WARM_UP = 200, 20
"""The steps that train the base of LoRA, and those of exact training before gradients and bytes are measured."""


class Task(NamedTuple):
    """A network and its data.

    Attributes:
        build: a function that returns the model. The parameters depend on torch's seed.
        batch: a function of a size and a generator, which returns a batch (inputs, targets) for training.
        held_out: a function of a size, which returns a list of batches that are not used for training.
        loss: a function of (model, inputs, targets).
        measured: the size of the batch with which bytes, times and gradients are measured.
        trained: the size of a batch of training.
        quick: the size of all batches with --quick.
    """

    build: Callable
    batch: Callable
    held_out: Callable
    loss: Callable
    measured: tuple[int, int]
    trained: tuple[int, int]
    quick: tuple[int, int]


# -- Data -------------------------------------------------------------------------------------------


@functools.cache
def words() -> Corpus:
    """Return Python's help texts as words. The number VOCABULARY - 1 stands for all rare words."""
    characters = text.python_topics()
    numbers = torch.cat([characters.train, characters.held_out]).tolist()
    found = re.findall(r" ?\w+|\s+|[^\w\s]", "".join(characters.alphabet[i] for i in numbers))
    common = [word for word, _ in Counter(found).most_common(VOCABULARY - 1)]
    number = {word: i for i, word in enumerate(common)}
    return _corpus([number.get(word, VOCABULARY - 1) for word in found])


@functools.cache
def source_code() -> Corpus:
    """Return the source code of some modules of the standard library, as bytes."""
    paths = (inspect.getsourcefile(import_module(name)) for name in SOURCES)
    return _corpus(list(b"".join(Path(path).read_bytes() for path in paths)))


@functools.cache
def help_bytes() -> Corpus:
    """Return Python's help texts as numbers below BYTES."""
    characters = text.python_topics()
    code = torch.tensor([min(ord(one), BYTES - 1) for one in characters.alphabet])
    return Corpus("", code[characters.train], code[characters.held_out])


def _corpus(numbers) -> Corpus:
    cut = round(len(numbers) * (1 - text.HELD_OUT))
    return Corpus("", torch.tensor(numbers[:cut]), torch.tensor(numbers[cut:]))


def _windows(corpus):
    """Return the functions `batch` and `held_out` of a corpus. A size is (windows, tokens of a window)."""

    def batch(size, generator):
        return tuple(part.contiguous() for part in corpus().batch(*size, generator))

    def held_out(size):
        parts = corpus().held_out_batch(128, size[1])
        return list(zip(*(part.contiguous().split(16) for part in parts), strict=True))

    return batch, held_out


def _enlarged(images, pixels):
    """Return images of digits with 3 channels and the given number of pixels per side."""
    images = F.interpolate(images, size=pixels, mode="bilinear", antialias=True)
    return images.expand(-1, 3, -1, -1).contiguous()


def _images(size, generator):
    images, labels, _, _ = digits_resnet.digits()
    chosen = torch.randint(len(images), (size[0],), generator=generator)
    return _enlarged(images[chosen], size[1]), labels[chosen]


def _held_out_images(size):
    _, _, images, labels = digits_resnet.digits()
    return [(_enlarged(images, size[1]), labels)]


# -- Models -----------------------------------------------------------------------------------------


def _gpt2():
    # torch's GELU, because that of transformers saves the result of every operation, so that exact training would
    # look worse than it needs to be.
    config = GPT2Config(
        n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=CONTEXT, vocab_size=VOCABULARY,
        activation_function="gelu_pytorch_tanh", bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _llama():
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=688, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=2, vocab_size=BYTES, max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _lora(folder):
    """Return a pretrained Llama with adapters at all linear layers of the blocks."""
    model = _llama()
    model.load_state_dict(torch.load(_base_path(folder)))
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", lora_dropout=0.0)
    return get_peft_model(model, config)


def _of_tokens(model, ids, targets):
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def fused_loss(model, ids, targets):
    """Return the loss of a GPT-2 whose logits are computed in chunks, and are not saved."""
    from fewbit.functional import linear_cross_entropy

    hidden = model.transformer(input_ids=ids).last_hidden_state
    return linear_cross_entropy(hidden, model.lm_head.weight, targets, chunk_size=256)


def _of_classes(model, images, labels):
    return F.cross_entropy(model(images).float(), labels)


def networks(folder: Path) -> dict[str, Task]:
    """Return the tasks by name. `folder` has the files that `prepare` writes."""
    tokens = {"loss": _of_tokens, "measured": (4, 256), "trained": (2, 64), "quick": (2, 32)}
    sizes = {"measured": (16, 64), "trained": (16, 32), "quick": (2, 32)}
    return {
        "GPT-2": Task(_gpt2, *_windows(words), **tokens),
        "ResNet-18": Task(
            lambda: ResNet("resnet18", nn.ReLU, classes=10),
            _images,
            _held_out_images,
            _of_classes,
            **sizes,
        ),
        "LoRA": Task(lambda: _lora(folder), *_windows(source_code), **tokens),
    }


NAMES = "GPT-2", "ResNet-18", "LoRA"


# -- Training before the measurements ---------------------------------------------------------------


def _base_path(folder) -> Path:
    return Path(folder) / "base.pt"


def warm_path(folder, name) -> Path:
    """Return the file with the parameters of a network for which bytes, times and gradients are measured."""
    return Path(folder) / f"{name}.pt"


def prepare(name: str, folder: Path, quick: bool) -> None:
    """Write the parameters of a network after WARM_UP steps of exact training; for LoRA, first those of its base."""
    torch.set_num_threads(1)
    if name == "LoRA":
        torch.manual_seed(0)
        base = Task(_llama, *_windows(help_bytes), _of_tokens, (8, 64), (8, 64), (2, 32))
        module = Step(base)
        exact_steps(base, module, 2 if quick else PRETRAINING, quick)
        torch.save(module.model.state_dict(), _base_path(folder))
    task = networks(folder)[name]
    torch.manual_seed(0)
    module = Step(task)
    exact_steps(task, module, 2 if quick else WARM_UP, quick)
    torch.save(module.model.state_dict(), warm_path(folder, name))


def exact_steps(task, module, steps, quick):
    generator = torch.Generator().manual_seed(10**6)
    batches = iter(lambda: task.batch(task.quick if quick else task.trained, generator), None)
    train(module, batches, lambda module, batch: module(*batch), steps, 1e-3, 0)


def to_device(batch: tuple[Tensor, ...], device: str) -> tuple[Tensor, ...]:
    return tuple(x.to(device) for x in batch)
