"""Models of timm: `fit_`, `compress_` and `plan` on transformers, convolutional and mobile networks with random weights."""

import copy
import importlib.util

import pytest
import torch
from measured import gradient, measured_peak
from networks.timm_models import timm_without_torchvision
from quick_fit import quick_fit
from torch.nn import functional as F

import fewbit

HAS_TIMM = importlib.util.find_spec("timm") is not None
timm = timm_without_torchvision() if HAS_TIMM else None

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_TIMM, reason="needs timm")]

SGD = torch.optim.SGD
MODELS = {  # name: (architecture, its options, pixels, images, blocks)
    "vit": ("vit_tiny_patch16_224", {"img_size": 64, "depth": 4, "embed_dim": 96}, 64, 16, 4),
    "convnext": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (16, 32, 64, 128)}, 64, 16, 5),
    "efficientnet": ("efficientnet_b0", {}, 32, 16, 16),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 56, "embed_dim": 48, "depths": (2, 2), "num_heads": (2, 4)},
        56,
        8,
        4,
    ),
    "mobilenetv3": ("mobilenetv3_small_050", {}, 64, 16, 12),
    "regnet": ("regnetx_002", {}, 64, 16, 13),
    "densenet": ("densenet121", {"block_config": (2, 2), "growth_rate": 16}, 48, 16, 7),
}


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(params=MODELS)
def case(request, monkeypatch, tmp_path):
    quick_fit(monkeypatch, tmp_path)
    architecture, options, pixels, images, blocks = MODELS[request.param]
    torch.manual_seed(0)
    model = timm.create_model(architecture, num_classes=10, **options).train()
    return model, (torch.randn(images, 3, pixels, pixels), torch.randint(10, (images,))), blocks


def test_peaks_and_gradients(case):
    """At two targets the real step takes what was promised, and the table names all blocks."""
    model, batch, blocks = case
    exact_peak = measured_peak(copy.deepcopy(model), batch, loss, SGD)
    fixed = 2 * sum(p.nbytes for p in model.parameters())
    for share in (0.92, 0.84):
        memory = int(fixed + share * (exact_peak - fixed))
        found = fewbit.fit_(
            model, batch, memory, loss=loss, optimizer=SGD, verbose=False, progress=False
        )
        assert found.exact_peak == pytest.approx(exact_peak, rel=0.01)
        real = measured_peak(copy.deepcopy(model), batch, loss, SGD)
        assert real <= memory and real == pytest.approx(found.peak, rel=0.01)
        assert len(found.settings.blocks) == blocks == sum(row.count for row in found.rows[:-1])
        assert torch.isfinite(gradient(model, batch, loss)).all()
        assert max(map(len, str(found).splitlines())) <= 100
        assert not any("not considered" in note for note in found.notes)


def test_bits_and_the_plan(case):
    model, batch, _ = case
    plan = fewbit.plan(model, [batch, batch], loss, candidates=[8, 4], draws=2, progress=False)
    errors = [row.error / plan.gradient for row in plan.rows]
    assert 0 < errors[0] < min(errors[1], 0.01)
    twin = copy.deepcopy(model)
    fewbit.compress_(twin, 8, verbose=False)
    torch.manual_seed(1)
    found = gradient(twin, batch, loss)
    torch.manual_seed(1)
    exact = gradient(model, batch, loss)
    assert 0 < (found - exact).norm() < 0.2 * exact.norm()
    saved = [fewbit.saved_bytes(lambda one=one: loss(one, batch)).total for one in (twin, model)]
    assert saved[0] < 0.5 * saved[1]
