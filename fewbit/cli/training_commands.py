"""Commands for training: memory, plan and demo. They need torch."""

from __future__ import annotations

from pathlib import Path

import click

from fewbit import models
from fewbit.cli.application import app
from fewbit.cli.options import (
    PICTURES,
    Size,
    force_option,
    given,
    json_option,
    number,
    output_options,
    several_bits,
)
from fewbit.cli.output import print_result
from fewbit.cli.progress_bar import Progress
from fewbit.errors import FewbitError
from fewbit.files import check_writable
from fewbit.printable import one_line

_FAMILIES = [family.name for family in models.FAMILIES]


@app.command(
    help=f"""Count the memory of training a MODEL, and the largest batch on a device.

    The command counts what the paper lists in its appendix B: the model's size, the bytes saved
    for the backward pass, the part of these bytes that nonlinearities save, and the largest batch
    that fits on the device together with four copies of the model. All are counted without and
    with few-bit codes.

    A MODEL is the usual name of a {", ".join(_FAMILIES[:-1])} or {_FAMILIES[-1]}, for
    example resnet50 or RoBERTa-base. Weights are random, nothing is downloaded. A single MODEL is
    shown in detail, with the paper's figures.

    With --fits, the command computes the peak memory of a whole training step instead, for exact
    training and for compression of all layers, and says whether the step fits on the device.

    With --fit SIZE, the command chooses for each block of the model what it saves, so that a
    training step fits in this memory in the least time, and prints the calls that do this.
    Nothing is run: times follow from measured costs of this machine's CPU.

    \b
    Examples:
      fewbit memory resnet18
      fewbit memory resnet18 --fits --device "2 GiB" --batch 8 --image-size 64
      fewbit memory resnet18 --fit "260 MiB" --batch 64 --image-size 64
      fewbit memory vgg16 densenet121 --bits 2 --device-memory 80GB
      fewbit memory resnet50 --activation relu --image-size 224 --json
    """
)
@click.argument("names", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "is_all", is_flag=True, help="Count every model.")
@several_bits(default="1 to 4; with --fits 4 and 2")
@click.option(
    "--device-memory",
    "--device",
    "device_bytes",
    type=Size(),
    metavar="SIZE",
    default="32GB",
    show_default=True,
    help="The device's memory, for example 80GB or 11264MB. Units are powers of 1024, so GB and GiB mean "
    "the same.",
)
@click.option(
    "--fits",
    "is_fit",
    is_flag=True,
    help="Compute the peak memory of training steps, and what fits on the device.",
)
@click.option(
    "--fit",
    "fit_bytes",
    type=Size(),
    metavar="SIZE",
    help="Choose what each block saves, so that a training step fits in SIZE.",
)
@click.option(
    "--optimizer",
    metavar="NAME",
    help="With --fits or --fit: an optimizer of torch.optim.  [default: adamw]",
)
@number("--batch", "Number of samples in the counted forward pass.  [default: 1]")
@number("--image-size", "Width and height of images in pixels, at least 64.  [default: 256]")
@number("--sequence-length", "Number of tokens in a text.  [default: 256]")
@click.option(
    "--activation",
    metavar="NAME",
    help="The activation function: gelu, silu, relu, ..., or own for the model's own.  "
    "[default: own, but gelu instead of relu]",
)
@click.option("--dropout", is_flag=True, help="Count with dropout; the paper counts without.")
@json_option
def memory(names, is_all, activation, dropout, is_fit, fit_bytes, optimizer, as_json, **options):
    """Run `fewbit memory`."""
    if is_fit or fit_bytes is not None:
        option = "--fits" if is_fit else "--fit"
        unused = {"--all": is_all, "--activation": activation is not None, "--dropout": dropout}
        unused |= {"--fit": is_fit and fit_bytes is not None}
        unused |= {"--bits": not is_fit and options["bits"] not in (None, ())}
        for name in (name for name, is_given in unused.items() if is_given):
            raise FewbitError(f"{name}: expected it without {option}")
        options |= {"memory": fit_bytes}
        print_result(_fit(option, names, optimizer or "adamw", **given(**options)), as_json)
        return
    if optimizer is not None:
        raise FewbitError(f"--optimizer: expected --fits or --fit with it, got {optimizer} alone")
    if bool(names) == is_all:
        raise click.UsageError(
            "expected either the name of a model or --all", click.get_current_context()
        )
    from fewbit.analysis.memory import memory

    options = given(**options)
    if activation is not None:
        options["activation"] = None if activation == "own" else activation
    with Progress() as progress:
        report = memory(names, dropout=dropout, progress=progress, **options)
    print_result(report, as_json)


def _fit(
    option,
    names,
    optimizer,
    device_bytes,
    batch=1,
    image_size=None,
    sequence_length=None,
    bits=(4, 2),
    memory=None,
):
    """Return the result of `fewbit.fits`, or with `memory` of `fewbit.fit_`, for synthetic data."""
    if len(names) != 1:
        raise FewbitError(f"{option}: expected one MODEL, got {len(names)}")
    import torch

    from fewbit.planning.fit import fit_
    from fewbit.planning.fits import EXACT, fits

    classes = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    if optimizer.lower() not in classes:
        raise FewbitError(
            f"--optimizer: expected a class of torch.optim, such as adamw or sgd, got {optimizer}"
        )
    try:
        name = models.resolve(names[0])
    except FewbitError as error:
        raise FewbitError(f"{error}; for your own model, call fewbit.fits or fewbit.fit_") from None
    is_text = models.family(name).is_text
    if (image_size if is_text else sequence_length) is not None:
        other = "--image-size" if is_text else "--sequence-length"
        raise FewbitError(
            f"{other}: expected a model of {'images' if is_text else 'texts'}, got {names[0]}"
        )
    size = models.check_size(name, (sequence_length if is_text else image_size) or 256)
    with torch.device("meta"):  # the weights take no memory
        model, data, loss = _as_trained(name, batch, size)
    if memory is not None:
        kind = classes[optimizer.lower()]
        return fit_(model, data, memory, loss=loss, optimizer=kind, verbose=False)
    return fits(
        model,
        data,
        loss,
        optimizer=classes[optimizer.lower()],
        device=device_bytes,
        settings=[EXACT, *bits],
        sequence_dim=1 if is_text else None,
    )


def _as_trained(name, batch, size):
    """Return the model as it is trained, with head and loss, a batch, and the loss, None for the model's own."""
    import torch

    from fewbit.models import transformer, workload

    if models.family(name).is_text:
        model = transformer.build(name, attention="sdpa", has_head=True).train()
        tokens = torch.zeros(batch, size, dtype=torch.long)
        return model, {"input_ids": tokens, "labels": tokens.clone()}, None
    images, classes = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.long)
    return models.build(name), (images, classes), workload.classification_loss


@app.command()
@click.argument("name", metavar="MODEL|FUNCTION")
@number("--batch", "Number of samples in a batch.  [default: 16 images or 4 texts]")
@number("--batches", "Number of batches.  [default: 4]")
@number(
    "--size",
    "Width and height of images in pixels, at least 64, or number of tokens in a text.  "
    "[default: 64]",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="Measure only the settings of this policy, for example fixed; may be repeated.  "
    "[default: all that suit the model, except compile]",
)
@number(
    "--share",
    "The largest error of the recommended setting, divided by the variance between "
    "minibatches.  [default: 0.1]",
    metavar="S",
    type=float,
)
@number(
    "--draws",
    "How often the tensors of every batch are rounded anew, at least 2.  [default: 2]",
    metavar="D",
)
@output_options(
    "the plan, JSON, HTML, CSV, PNG or SVG by its ending,", ".json", ".html", ".csv", *PICTURES
)
@json_option
def plan(name, batch, batches, size, policies, share, draws, output, force, as_json):
    """Compare settings by memory and gradient error, before a long run.

    For each policy and bit setting the command measures the bytes that are saved for the backward
    pass, the error of the gradient, and the time of a forward and backward pass. Among the settings
    whose error is at most --share times the variance of the gradient between minibatches, it
    recommends the one with the fewest bytes.

    A MODEL is one of those of 'fewbit memory', with random weights and synthetic data. For a model
    and data of your own, give a FUNCTION as package.module:function. It returns (model, batch,
    loss), the arguments of fewbit.plan. ResNet-50 and RoBERTa-base take minutes on two cores.

    \b
    Examples:
      fewbit plan resnet18 --batch 2 --batches 2 --policy fixed
      fewbit plan resnet18 --batch 2 --policy activations -o plan.html
    """
    sizes = given(batch=batch, batches=batches, size=size)
    from fewbit.planning.candidates import default_candidates
    from fewbit.planning.plan import plan

    work = _own_workload(name, sizes) if ":" in name else _synthetic_workload(name, sizes)
    candidates = default_candidates(work[0], policies) if policies else None
    found = plan(*work, **given(candidates=candidates, share=share, draws=draws))
    if output is not None:
        found.save(output, force=force)
    print_result(found, as_json, output)


def _synthetic_workload(name, sizes):
    from fewbit.analysis.gradients import CHUNKS, size_of
    from fewbit.models.workload import workload

    made = workload(name, **sizes)
    size = size_of(made.batches[0])
    if len(made.batches) == 1 and size % CHUNKS:
        raise FewbitError(
            f"expected --batches of at least 2, or --batch of a multiple of {CHUNKS}, got --batches 1 with --batch {size}"
        )
    return made


def _own_workload(name, sizes):
    from fewbit.analysis.gradients import CHUNKS, batches_of, size_of

    if sizes:
        raise FewbitError(
            f"--{next(iter(sizes))}: expected the name of a model with it, got {name}, which makes its own batch"
        )
    made = _call(name)
    if not isinstance(made, tuple) or len(made) != 3:
        length = f" of {len(made)}" if isinstance(made, tuple) else ""
        raise FewbitError(
            f"{name}: expected it to return (model, batch, loss), got {type(made).__name__}{length}"
        )
    model, batch, loss = made
    batches = batches_of(batch)
    if len(batches) == 1 and (size := size_of(batches[0])) % CHUNKS:
        raise FewbitError(
            f"{name}: expected several batches, or one of a multiple of {CHUNKS} samples, got one of {size}"
        )
    return model, batches, loss


def _call(name):
    """Call the user's function. An exception becomes a FewbitError of one line."""
    from fewbit.functions.callables import import_callable, misfit_of

    function = import_callable(name)
    misfit = misfit_of(function, 0)
    if misfit:
        raise FewbitError(
            f"{name}: expected a function without arguments, got one for which: {misfit}"
        )
    try:
        return function()
    except FewbitError:
        raise
    except Exception as error:
        raise FewbitError(f"{name} raised {one_line(error)}") from error


@app.command()
@number("--steps", "Number of steps of every training.  [default: 600]")
@number(
    "--seeds", "Train every model from N seeds, for means and standard deviations.  [default: 1]"
)
@several_bits(of="Bits of few-bit GELUs", default="3")
@several_bits("--everything", of="Bits of models in which all layers are compressed", default="4")
@several_bits(
    "--average",
    of="Average bits, for example 2.5, of models with AdaptiveBits (level L3)",
    default="none",
    type=float,
)
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Train every model of docs/results/index.md: --bits 1 to 4, --everything 4 and 2, --average 2.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default="demo",
    metavar="DIR",
    help="Write demo_losses.png and demo.json to DIR.  [default: demo]",
)
@force_option
@json_option
def demo(steps, seeds, bits, everything, average, is_all, output, force, as_json):
    """Train a small transformer exactly, and with compression.

    A character-level transformer learns the help texts that Python ships: with torch's GELU, with
    few-bit GELUs, and with all saved tensors compressed, from the same seeds. The command shows
    the bytes saved for the backward pass and the final losses, and draws the losses. By default it
    trains three models from each seed, which takes one to two minutes on two cores; with --all it
    trains eight. It needs torch.

    \b
    Examples:
      fewbit demo --steps 20
      fewbit demo --all --steps 20 --output every-arm
      fewbit demo --steps 20 --seeds 2 --bits 3 --output two-seeds --json
    """
    paths = output / "demo_losses.png", output / "demo.json"
    if output.is_dir():
        for path in paths:
            check_writable(path, force)
    import torch

    from fewbit.demo.experiment import EVERY_ARM, check_request, run_demo
    from fewbit.demo.training import TrainingSettings
    from fewbit.render.figures import matplotlib

    request = (EVERY_ARM if is_all else {}) | given(
        bits=bits, everything=everything, average=average, seeds=seeds
    )
    check_request(**request)
    matplotlib("fewbit demo")  # a missing matplotlib is reported now, not after the training
    settings = TrainingSettings(**given(steps=steps))
    _make_directory(output)
    for path in paths:
        check_writable(path, force)
    with Progress() as progress:
        result = run_demo(
            settings=settings,
            progress=progress,
            processes=min(torch.get_num_threads(), 8),  # a process takes half a gigabyte of memory
            **request,
        )
    for path in paths:
        result.save(path, force=force)
    print_result(result, as_json, *paths)


def _make_directory(path):
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FewbitError(f"{path}: expected a directory or a place for one: {reason}") from None
