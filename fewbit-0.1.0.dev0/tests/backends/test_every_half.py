"""All 65,536 patterns of float16 and bfloat16: the codes, values and gradients of every activation.

`make gpu-test` runs this file first, because 16-bit instructions of a GPU run nowhere else.
"""

import pytest
import torch
from layers import saved_by
from samples import ACTIVATIONS, gradient, ids, same

from fewbit import functions
from fewbit.runtime.backends import reference
from fewbit.runtime.format.encoding import Encoding

HALVES = torch.float16, torch.bfloat16


def every_pattern(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("sample", **ids(ACTIVATIONS))
def test_every_pattern(sample, dtype, device):
    on_host = every_pattern(dtype)
    x = on_host.to(device, copy=True).requires_grad_()
    table = sample.table(3)
    y, saved = saved_by(lambda: sample(x, table=table))
    (packed,) = saved
    expected = reference.encode(on_host, Encoding.of(table), None)
    assert torch.equal(packed.cpu(), expected), "codes"

    grad = torch.linspace(-3, 3, len(x)).to(dtype).to(device)
    y.backward(grad)
    assert same(x.grad.cpu(), gradient(table, on_host, grad.cpu())), "gradient"

    finite = on_host.isfinite()
    y, x = y.detach().cpu()[finite], on_host[finite].double()
    names = functions.get(sample.function).parameters
    parameters = dict(zip(names, sample.parameters, strict=False))
    exact = torch.from_numpy(functions.get(sample.function, parameters).value(x.numpy()))
    info = torch.finfo(dtype)
    exponent = exact.abs().clamp(min=info.tiny).frexp()[1] - 1
    ulp = torch.full_like(exact, info.eps).ldexp(exponent)
    theirs = sample.torch(on_host[finite].to(device)).cpu()
    wrong = ((y.double() - exact).abs() > 2 * ulp + info.eps / 4 * x.abs()) & (y != theirs)
    assert not wrong.any(), (x[wrong], y[wrong], exact[wrong])
