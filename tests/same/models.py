"""Questions about models: what `compress_` converts and saves, how models train, and what policies and plans choose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import compiled_models
import odd_models
import probed_models
import torch
from layers import ROWS, first_of_each, gradients
from samples import normal
from torch import nn

import fewbit
import fewbit.nn
from fewbit import functions
from same.layers import ARGUMENTS

STEPS = 3
FIXED = {"bits": 2}
POLICIES = {
    "1.75 bits by sample": {"bits": fewbit.SampleBits(1.75)},
    "adaptive": {"bits": fewbit.AdaptiveBits(2, interval=1)},
    "error bound": {"bits": fewbit.ErrorBound(interval=1)},
    "pre-activation": {"bits": fewbit.PreActivationBits(2)},
}
SETTINGS = {
    "8 bits": {"bits": 8},
    "small groups": {**FIXED, "layers": {"group_size": 32}},
    "2 copies": {**FIXED, "layers": {"copies": 2, "activation_bits": 1}},
    "uniform": {**FIXED, "layers": {"quantizer": "uniform", "attention_bits": 2}},
    "no functions": {**FIXED, "layers": {"functional": False}},
    "some modules": {**FIXED, "include": "*[0246]*", "overrides": {"*2*": 5, "4*": None}},
    "level L1": {"bits": fewbit.Level("L1")},
    "adaptive, given bits": {"bits": fewbit.AdaptiveBits(2.5, interval=2), "overrides": {"0*": 6}},
    "error bound of .5": {"bits": fewbit.ErrorBound(0.5, window="max", interval=1)},
    "error bound by channel": {"bits": fewbit.ErrorBound(by_channel=True, interval=1)},
    "error bound, quant+zvc": {"bits": fewbit.ErrorBound(codec="quant+zvc", interval=1)},
    "error bound, error-bounded": {"bits": fewbit.ErrorBound(codec="error-bounded", interval=1)},
    "error bound, jpeg": {"bits": fewbit.ErrorBound(codec="jpeg", interval=1)},
    "budget": {"budget": 0.3},
}
"""Settings of `compress_`. A budget is a share of the bytes that the exact model saves."""
TRANSFORMERS = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration",
}


class Case(NamedTuple):
    """A model, its batches, and the function (model, batch) -> loss."""

    model: nn.Module
    batches: list
    loss: Callable


def questions():
    """Yield (key, function that returns the answer)."""
    everything = {"everything": {**FIXED, "layers": {"everything": True}}}
    for name in probed_models.MODELS:
        for setting, options in ({"2 bits": FIXED} | everything | POLICIES | SETTINGS).items():
            yield f"model/{name}/{setting}", partial(_trained, partial(_probed, name), options)
    for name in sorted(odd_models.ODD.keys() - {"by itself"}):  # which has no forward
        options = odd_models.OPTIONS.get(name, {})
        for setting, given in ({"2 bits": FIXED} | POLICIES).items():
            yield f"model/{name}/{setting}", partial(_trained, partial(_odd, name), given | options)
    for name in compiled_models.MODELS:
        for setting, options in ({"2 bits": FIXED} | everything).items():
            yield (
                f"model/{name}, loss/{setting}",
                partial(_trained, partial(_written, name), options),
            )
        if name != "scan":  # whose loop takes long to compile
            yield f"model/{name}, loss/compiled", partial(_compiled, name)
    for name in TRANSFORMERS:
        several = {"2 bits": FIXED, "adaptive": POLICIES["adaptive"]} | everything
        for setting, options in several.items():
            yield f"model/{name}/{setting}", partial(_trained, partial(_text, name), options)
    for row in first_of_each(ROWS):
        if row.is_class:
            yield f"converted/{row.id}", partial(_converted, row.theirs, row.inputs)
    for name in functions.modules():
        if hasattr(nn, name):
            yield f"converted/{name}", partial(_converted, partial(_activation, name), _matrix)
    for name in probed_models.MODELS:
        yield f"measured/plan of {name}", partial(_plan, name)
        yield f"measured/variance profile of {name}", partial(_profile, name)
        yield f"measured/gradient ratio of {name}", partial(_ratio, name)


def _probed(name):
    make, shape = probed_models.MODELS[name]
    return Case(make(), _batches(shape), lambda model, x: probed_models.loss_of(model(x)))


def _odd(name):
    def loss(model, x):
        return getattr(model, "parts", model)(x).square().mean()

    return Case(odd_models.ODD[name](), _batches((6, 8)), loss)


def _written(name):
    make, shape = compiled_models.MODELS[name]
    return Case(make(), _batches(shape), lambda model, x: model(x))


def _text(name):
    import tiny_models
    from modeling import of

    model = of(name, TRANSFORMERS[name])(getattr(tiny_models, name)())
    tokens = torch.randint(3, 90, (STEPS, 3, 12))
    return Case(model.train(), [*tokens], lambda model, x: model(input_ids=x, labels=x).loss)


def _batches(shape):
    return [normal(shape, scale=1.0, seed=step) for step in range(STEPS)]


def _trained(make, options):
    """Return what a compressed model saves, its training, its state, and a step of a model that resumes from the state."""
    case = _made(make)
    x = case.batches[0]
    keywords = {"input_ids": x, "labels": x} if x.dtype == torch.int64 else {}
    inputs = () if keywords else (x,)
    if "budget" in options:
        exact = fewbit.saved_bytes(case.model, *inputs).total
        budget = fewbit.Budget(int(options["budget"] * exact), interval=1)
        options = {"bits": budget, "sample": x}
    controller = fewbit.compress_(case.model, verbose=False, **options)
    found = {"conversion": controller.report}
    found["saved"] = fewbit.saved_bytes(case.model, *inputs, **keywords)
    found |= _steps(case)
    found |= {"allocation": controller.allocation, "bounds": controller.bounds}
    found["state"] = state = controller.state_dict()
    found["saved after"] = fewbit.saved_bytes(case.model, *inputs, **keywords)
    resumed = _made(make)
    fewbit.compress_(resumed.model, verbose=False, **options).load_state_dict(state)
    found["resumed"] = _steps(resumed)
    fewbit.restore_(case.model)
    modules = {type(module).__module__ for module in case.model.modules()}
    return found | {"restored": sorted(modules)}


def _made(make):
    torch.manual_seed(0)
    return make()


def _steps(case):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(case.model.parameters(), 0.01, momentum=0.9)
    losses = []
    for batch in case.batches:
        optimizer.zero_grad()
        loss = case.loss(case.model, batch)
        loss.backward()
        if not losses:
            grads = [parameter.grad for parameter in case.model.parameters()]
            first = [None if grad is None else grad.clone() for grad in grads]
        optimizer.step()
        losses.append(loss.item())
    names = [name for name, _ in case.model.named_parameters()]
    found = {"losses": losses, "gradients": dict(zip(names, first, strict=True))}
    return found | {"parameters": case.model.parameters(), "next draw": torch.rand(1)}


def _compiled(name):
    case = _made(partial(_written, name))
    torch._dynamo.reset()
    compiled = fewbit.compile(case.model, bits=2, backend="aot_eager")
    torch.manual_seed(1)
    loss = compiled(case.batches[0])
    loss.backward()
    return {"loss": loss, "gradients": [parameter.grad for parameter in case.model.parameters()]}


def _activation(name):
    return getattr(nn, name)(*ARGUMENTS.get(name, ()))


def _matrix():
    return [normal((6, 40))]


def _converted(make, inputs):
    """Return what `compress_` makes of a model of one layer, and its gradients."""
    model = nn.Sequential(_made(make))
    report = fewbit.compress_(model, 2, verbose=False).report
    torch.manual_seed(1)
    _, found = gradients(model[0], *inputs())
    return {"conversion": report, "gradients": found, "text": repr(model)}


def _plan(name):
    case = _made(partial(_probed, name))
    candidates = [
        fewbit.Candidate("fixed", 2),
        fewbit.Candidate("adaptive", fewbit.AdaptiveBits(1.5)),
        fewbit.Candidate("error-bound", fewbit.ErrorBound(0.5)),
        fewbit.Candidate("activations", 2, {}, "replace_activations_"),
    ]
    options = {"candidates": candidates, "progress": False}
    found = fewbit.plan(case.model, case.batches, case.loss, **options)
    return {"plan": found.to_dict(), "next draw": torch.rand(1)}


def _profile(name):
    case = _made(partial(_probed, name))
    found = fewbit.variance_profile(case.model, case.batches, case.loss, draws=2, progress=False)
    return {"profile": found, "agreement": found.agreement, "next draw": torch.rand(1)}


def _ratio(name):
    case = _made(partial(_probed, name))
    controller = fewbit.compress_(case.model, fewbit.ErrorBound(interval=1), verbose=False)
    _steps(case)
    found = controller.gradient_ratio(case.batches, case.loss, draws=3)
    return {"ratio": found.ratio, "rows": found, "next draw": torch.rand(1)}
