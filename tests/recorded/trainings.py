"""Entries "model": short trainings of compressed models, for each model and setting."""

from __future__ import annotations

from functools import partial

import torch

from recorded import api, models, settings
from recorded.leaves import numbers, rows

SEED = 7


def entries():
    """Yield (key, function that returns the answers) for every model and setting."""
    for name in models.names():
        yield f"model/{name}/exact", partial(_exact, name)
        yield f"model/{name}/activations of 2 bits", partial(_activations, name)
        chosen = settings.EVERYWHERE | (settings.FEW if name in settings.SOME else {})
        for setting, options in chosen.items():
            yield f"model/{name}/{setting}", partial(_compressed, name, options)
    for setting, options in settings.REFUSED.items():
        yield f"refused/{setting}", partial(_compressed, "mlp", options)
    yield "model/mlp/numbered samples", _numbered
    yield "model/mlp/compressed twice", _twice
    yield "model/mlp/compiled", _compiled
    yield "model/mlp/accumulated", _accumulated


def _exact(name):
    case = models.made(name)
    return _saved(case, "before") | _trained(case)


def _activations(name):
    case = models.made(name)
    converted = api.with_few_bit_activations(case.model, 2)
    found = _named("conversion", converted) | _saved(case, "before") | _trained(case)
    api.restored(case.model)
    return found | {"restored": _is_restored(case, name)}


def _compressed(name, options):
    case = models.made(name)
    controller = api.compressed(case.model, **_resolved(case, options))
    found = _named("conversion", api.conversion(controller)) | _saved(case, "before")
    found |= _trained(case) | _saved(case, "after")
    state = api.state_of(controller)
    found["state"] = numbers(state)
    found |= _named("bits", api.bits_by_layer(controller))
    found |= _named("bounds", api.bounds_by_layer(controller))
    found |= _resumed(case, name, options, state)
    api.restored(case.model)
    return found | {"restored": _is_restored(case, name)}


def _resolved(case, options) -> dict:
    """Return the options of `compress_`, with a budget in bytes and the sample that it needs."""
    budget = options.get("budget")
    if not isinstance(budget, float):
        return options
    arguments, keywords = case.inputs
    exact = api.saved(case.model, *arguments, **keywords)["total"]
    return options | {"budget": int(budget * exact), "sample": keywords or arguments}


def _saved(case, when) -> dict:
    torch.manual_seed(SEED)
    arguments, keywords = case.inputs
    found = api.saved(case.model, *arguments, **keywords)
    return _named(f"saved {when}", found | {"entries": rows(found["entries"])})


def _trained(case) -> dict:
    """Train for a few steps; return the gradients of the first, all losses and the parameters at the end."""
    torch.manual_seed(SEED)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.05, momentum=0.9)
    found, losses = {}, []
    for step, batch in enumerate(case.batches):
        optimizer.zero_grad()
        loss = case.loss(case.model, batch)
        loss.backward()
        if step == 0:
            found = _gradients(case.model)
        optimizer.step()
        losses.append(float(loss.detach()))
    for name, parameter in case.model.named_parameters():
        found[f"trained {name}"] = parameter
    return found | {"losses": losses, "buffers": [*case.model.buffers()]}


def _gradients(model, prefix="gradient") -> dict:
    return {f"{prefix} {name}": parameter.grad for name, parameter in model.named_parameters()}


def _resumed(case, name, options, state) -> dict:
    """Return the loss and a gradient of a fresh model that continues from the state."""
    fresh = models.made(name)
    controller = api.compressed(fresh.model, **_resolved(fresh, options))
    fresh.model.load_state_dict(case.model.state_dict())
    api.load_state(controller, state)
    torch.manual_seed(SEED)
    loss = fresh.loss(fresh.model, fresh.batches[0])
    loss.backward()
    gradients = [
        parameter.grad for parameter in fresh.model.parameters() if parameter.grad is not None
    ]
    flat = torch.cat([gradient.detach().double().reshape(-1) for gradient in gradients])
    return {"resumed loss": loss, "resumed gradient": flat}


def _is_restored(case, name) -> dict:
    """Compare a restored model with one that was never compressed."""
    exact = models.made(name)
    exact.model.load_state_dict(case.model.state_dict())
    pairs = zip(case.model.modules(), exact.model.modules(), strict=True)
    classes = all(type(ours) is type(theirs) for ours, theirs in pairs)
    for training in (case, exact):
        torch.manual_seed(SEED)
        training.model.zero_grad()
        training.loss(training.model, training.batches[0]).backward()
    pairs = zip(case.model.parameters(), exact.model.parameters(), strict=True)
    gradients = all(_same(ours.grad, theirs.grad) for ours, theirs in pairs)
    return {"classes": classes, "gradients": gradients}


def _same(a, b) -> bool:
    return a is b is None or torch.equal(a, b)


def _numbered():
    case = models.made("mlp")
    controller = api.compressed(case.model, bits=1.5, interval=1)
    samples = len(case.batches[0][0])
    torch.manual_seed(SEED)
    losses = []
    for step, batch in enumerate(case.batches):
        api.number_samples(controller, torch.arange(samples) + samples * (step % 2))
        case.model.zero_grad()
        loss = case.loss(case.model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
    state = numbers(api.state_of(controller))
    return _gradients(case.model, "last gradient") | {"losses": losses, "state": state}


def _twice():
    case = models.made("mlp")
    api.compressed(case.model, bits=1)
    controller = api.compressed(case.model, bits=3, exclude="0")
    return _named("conversion", api.conversion(controller)) | _trained(case)


def _compiled():
    case = models.made("mlp")
    case.model[5].p = 0.0  # a compiler draws other numbers
    controller = api.compressed(case.model, bits=2)
    model, case.model = case.model, torch.compile(case.model, backend="aot_eager")
    found = _trained(case)
    return found | _named("conversion", api.conversion(controller)) | _gradients(model, "last")


def _accumulated():
    case = models.made("mlp")
    controller = api.compressed(case.model, policy="error-bound", interval=1)
    torch.manual_seed(SEED)
    for batch in case.batches:
        case.loss(case.model, batch).backward()
    bounds = _named("bounds", api.bounds_by_layer(controller))
    return _gradients(case.model, "sum of gradients") | bounds


def _named(prefix, values) -> dict:
    """Return {"prefix name": value}."""
    return {f"{prefix} {name}": value for name, value in values.items()}
