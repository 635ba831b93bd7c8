"""The architectures: published parameter counts, shapes, keys, activations that can be exchanged."""

import sys

import pytest
import torch
from fresh_process import run
from torch import nn

from fewbit import models
from fewbit.errors import FewbitError
from fewbit.models import densenet, efficientnet, resnet, transformer, vgg
from fewbit.models.activation_names import FACTORIES, is_activation

# torchvision's documentation; transformers: the sizes of the published checkpoints.
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b7": 66_347_960,
    "roberta-base": 124_645_632,
    "roberta-large": 355_359_744,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


def build(name, *arguments):
    with torch.device("meta"):
        return models.build(name, *arguments)


@pytest.mark.fast(5)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    assert sum(parameter.numel() for parameter in build(name).parameters()) == PARAMETERS[name]


def test_every_model_is_known_once():
    modules = (resnet.LAYERS, vgg.LAYERS, densenet.LAYERS, efficientnet.SCALES, transformer.SIZES)
    assert models.names() == tuple(name for module in modules for name in module)
    assert set(models.names()) == set(PARAMETERS)


# Keys and shapes that checkpoints of torchvision have, first, last and odd ones.
KEYS = {
    "resnet18": {"layer2.0.downsample.1.running_var": (128,), "fc.weight": (1000, 512)},
    "resnet50": {"layer4.2.conv3.weight": (2048, 512, 1, 1), "bn1.num_batches_tracked": ()},
    "vgg16": {"features.28.weight": (512, 512, 3, 3), "classifier.6.bias": (1000,)},
    "densenet121": {
        "features.denseblock4.denselayer16.conv2.weight": (32, 128, 3, 3),
        "features.transition3.norm.weight": (1024,),
        "features.norm5.bias": (1024,),
        "classifier.weight": (1000, 1024),
    },
    "efficientnet_b0": {
        "features.0.0.weight": (32, 3, 3, 3),
        "features.1.0.block.1.fc1.weight": (8, 32, 1, 1),
        "features.2.0.block.3.1.weight": (24,),
        "classifier.1.weight": (1000, 1280),
    },
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_torchvisions(name):
    state = build(name).state_dict()
    assert {key: tuple(state[key].shape) for key in KEYS[name]} == KEYS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in PARAMETERS if name[0] not in "gr"] + ["resnet50"]
)
def test_images_become_logits(name):
    assert build(name)(torch.empty(2, 3, 96, 64, device="meta")).shape == (2, 1000)


def test_a_densenet_block_carries_all_features_on():
    torch.manual_seed(0)
    block = densenet.DenseBlock(4, 2, 3, FACTORIES["relu"])
    x = torch.randn(2, 4, 5, 5)
    y = block(x)
    assert y.shape == (2, 10, 5, 5)
    assert torch.equal(y[:, :4], x)


def test_stochastic_depth_drops_whole_samples_and_keeps_the_mean():
    torch.manual_seed(0)
    drop = efficientnet.StochasticDepth(0.25)
    y = drop(torch.ones(4000, 2, 1, 1))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert torch.equal(y[:, 0], y[:, 1])
    assert abs(y.mean().item() - 1) < 0.03
    assert torch.equal(drop.eval()(y), y)


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "densenet121", "efficientnet_b0"])
def test_the_activation_of_images_is_exchanged_everywhere(name):
    own = "SiLU" if name.startswith("eff") else "ReLU"
    kinds = {
        type(module).__name__ for module in build(name, "selu").modules() if is_activation(module)
    }
    assert kinds == ({"SELU", "Sigmoid"} if own == "SiLU" else {"SELU"})
    assert own in {type(module).__name__ for module in build(name).modules()}


@pytest.mark.parametrize("name", ["roberta-base", "gpt2"])
def test_the_activation_of_transformers_is_exchanged_in_every_layer(name):
    model = build(name, nn.SELU)
    assert sum(isinstance(module, nn.SELU) for module in model.modules()) == 12
    assert not any("GELU" in type(module).__name__ for module in model.modules())
    # RoBERTa's pooler keeps its own.
    assert sum(isinstance(module, nn.Tanh) for module in model.modules()) == (name != "gpt2")


def test_softmax_and_attention_are_no_activations():
    others = nn.Softmax(0), nn.MultiheadAttention(4, 1), nn.Linear(1, 1), nn.Dropout()
    assert not any(map(is_activation, others))
    assert all(is_activation(make()) for make in FACTORIES.values())


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("ResNet-18", "resnet18"),
        ("VGG 16", "vgg16"),
        ("Efficient Net B0", "efficientnet_b0"),
        ("roberta_large", "roberta-large"),
        ("GPT-2 XL", "gpt2-xl"),
    ],
)
def test_spellings(spelling, name):
    assert models.resolve(spelling) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet9"], r"^unknown model 'resnet9': did you mean resnet50 or "),
        (["%"], r"^unknown model '%': expected resnet18, .*, gpt2-xl$"),
        (["vgg11", "geluu"], "^unknown activation 'geluu': did you mean gelu"),
        (["gpt2"], "^the model gpt2 needs transformers: pip install transformers$"),
    ],
)
def test_what_cannot_be_built(arguments, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FewbitError, match=message):
        models.build(*arguments)


def test_names_need_neither_torch_nor_transformers():
    code = "import sys; sys.modules['torch'] = None; from fewbit import models; "
    run(code + "assert models.resolve('GPT2') == 'gpt2' and 'resnet18' in models.names()")
