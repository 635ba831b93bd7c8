"""The error of the gradients of pretrained networks with few bits, on real text and images.

    python benchmarks/pretrained.py                         # all networks and settings; about an hour on two cores
    python benchmarks/pretrained.py --quick                 # a short form, to check that it works
    python benchmarks/pretrained.py --times                 # times of passes, relative to exact ones, in pretrained_times.*
    python benchmarks/pretrained.py --networks minilm --settings "2 bits" "4 bits"
    python benchmarks/pretrained.py --device cuda --dtype bfloat16

networks/pretrained_networks.py says how the weights are installed. g is the exact gradient of all parameters for a
batch, and g^ the gradient of the compressed model. g^ is random, because rounding is; each pass with new random numbers is
a draw. Each row of the results has

- error: the root of the mean of |g^ - g|^2, over |g|.
- scale: the mean of <g^, g>, over |g|^2. 1 is right.
- bias: the norm of E[g^] - g, over |g|, from the products of errors of different draws; 0 if their mean is negative.
- bias_noise: the bias that these draws show if there is none (one standard deviation). More `--draws` make it smaller.
- added_variance: the mean of |g^ - g|^2, over the variance of g from batch to batch.
- mib: the bytes that a forward saves for the backward, in MiB.

The settings are numbers of bits; "4 bits, recompute_linear" and the like; "compiled, 4 bits" and the like, with `fewbit.compile`
(compared with torch.compile without fewbit); policies, which learn for a few steps first;
"checkpoint_ 8 bits" and the like, where blocks are checkpointed regions; "8 bits, norms 3" and the like, where one kind of tensor
has 3 bits; and "8 bits, first third 2" and the like, where a third of the blocks has 2 bits. Rows of kinds and policies have

- predicted: the error that AdaptiveBits predicts. In "AdaptiveBits(4), one batch" and the like it has learned from the batch for
  which the error is measured; in other rows of AdaptiveBits it has learned from other batches.
- gain: error^2, minus that of 8 bits, over the squared error of 3 bits in a normal tensor (`distortion`). Errors of b bits of
  this kind add about gain * distortion(b) to error^2.

Writes results/pretrained.json (in another dtype or with random weights results/pretrained_<dtype>.json or
results/pretrained_random.json). Rows whose network and setting are measured anew replace earlier rows.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from contextlib import contextmanager
from typing import NamedTuple

import harness
import torch
from networks import pretrained_networks
from networks.pretrained_networks import LOW, Kind

import fewbit
from fewbit.checkpointing import supports_checkpoints
from fewbit.compiler.compiling import compile_in_place, undo_compile
from fewbit.convert import module_settings
from fewbit.runtime.format.distortion import distortion

EXACT = "exact"
BITS = (8, 4, 3, 2, 1)
POLICIES = (2, 3, 4)
"""The bits of AdaptiveBits."""
STEPS = 9
"""Training passes before the bits that AdaptiveBits has chosen are measured. The weights stay as they are."""
FIRST_BATCH_OF_POLICY = 10
THIRDS = ("first", "middle", "last")


class Setting(NamedTuple):
    """A way to compress a network.

    Attributes:
        config: the bits or the configuration for `compress_`; None to compress no layers.
        kind: which tensors have other bits; None for the usual bits.
        steps: the number of training passes before the measurement.
        is_one_batch: whether these passes have the batch of the measurement.
        layers: the argument of `compress_`.
        boundaries: the bits of `checkpoint_`; None if there are no checkpoints.
        is_compiled: whether `fewbit.compile` takes the place of `compress_`. Its gradients are compared with those of torch.compile,
            whose batch norms round differently: EfficientNet-lite0's gradient differs by 7 % from that of eager mode.
    """

    config: int | fewbit.BitConfig | None = None
    kind: Kind | None = None
    steps: int = 0
    is_one_batch: bool = False
    layers: dict | None = None
    boundaries: int | None = None
    is_compiled: bool = False


def settings_of(network: pretrained_networks.Network) -> dict[str, Setting]:
    """Return {name: setting}."""
    found = {f"{bits} bits": Setting(bits) for bits in BITS}
    if any(isinstance(module, torch.nn.Linear) for module in block_of(network, 0).modules()):
        layers = {"recompute_linear": True}
        found |= {f"{bits} bits, recompute_linear": Setting(bits, layers=layers) for bits in BITS}
    for name, setting in [*found.items()]:
        if setting.config in (4, 2):
            found[f"compiled, {name}"] = setting._replace(is_compiled=True)
    for bits in POLICIES:
        adaptive = Setting(fewbit.AdaptiveBits(bits), steps=STEPS)
        found[f"AdaptiveBits({bits})"] = adaptive
        found[f"AdaptiveBits({bits}), one batch"] = adaptive._replace(is_one_batch=True)
    if supports_checkpoints(network.model):
        found |= {f"checkpoint_ {bits} bits": Setting(boundaries=bits) for bits in (8, 6, 4)}
        found["checkpoint_ 8 bits, 4 bits"] = Setting(4, boundaries=8)
    for name, kind in network.kinds.items():
        found[f"8 bits, {name} {LOW}"] = Setting(8, kind)
    for number, third in enumerate(THIRDS):
        first, last = (network.depth * (number + i) // 3 for i in (0, 1))
        blocks = [network.blocks.format(i) for i in range(first, last)]
        found[f"8 bits, {third} third 2"] = Setting(8, Kind({f"{block}.*": 2 for block in blocks}))
    return found


def block_of(network, number):
    """Return a block of the network, or the network itself if it has no blocks of this name."""
    return dict(network.model.named_modules()).get(network.blocks.format(number), network.model)


@contextmanager
def compressed(network, setting: Setting):
    """Compress the model while the block runs. The block gets the controller, if `compress_` makes one."""
    kind, controller = setting.kind, None
    usual = module_settings.EXTRA_BITS_OF_ATTENTION, module_settings.EXTRA_BITS_OF_GATES
    attention, gates = usual if kind is None else (kind.attention, kind.gates)
    module_settings.EXTRA_BITS_OF_ATTENTION, module_settings.EXTRA_BITS_OF_GATES = (
        attention,
        gates,
    )
    overrides = None if kind is None else kind.overrides
    try:
        if setting.is_compiled:
            given = {"layers": setting.layers, "backend": "aot_eager"}
            compile_in_place(network.model, setting.config, **given)
        elif setting.config is not None:
            controller = fewbit.compress_(
                network.model,
                setting.config,
                layers=setting.layers,
                overrides=overrides,
                verbose=False,
            )
        if setting.boundaries is not None:
            fewbit.checkpoint_(network.model, setting.boundaries)
        yield controller
        if setting.boundaries is not None:
            network.model.gradient_checkpointing_disable()
        if setting.is_compiled:
            undo_compile(network.model)
            torch._dynamo.reset()
        elif setting.config is not None:
            fewbit.restore_(network.model)
    finally:
        module_settings.EXTRA_BITS_OF_ATTENTION, module_settings.EXTRA_BITS_OF_GATES = usual


def exact_gradient(network, batch, is_compiled: bool) -> dict[str, torch.Tensor]:
    """Return the gradient without fewbit, of eager mode or of torch.compile."""
    if not is_compiled:
        return gradient(network, batch)
    network.model.compile(backend="aot_eager_decomp_partition")
    try:
        return gradient(network, batch)
    finally:
        network.model._compiled_call_impl = None


def gradient(network, batch) -> dict[str, torch.Tensor]:
    """Return {parameter: its gradient for a batch, in float32}."""
    network.model.zero_grad(set_to_none=True)
    network.loss(batch).backward()
    return {
        name: parameter.grad.float()
        for name, parameter in network.model.named_parameters()
        if parameter.grad is not None
    }


def product(a, b) -> float:
    """Return the inner product of two gradients."""
    return sum(torch.dot(a[name].flatten(), b[name].flatten()).item() for name in b)


def minus(a, b) -> dict[str, torch.Tensor]:
    """Return the difference of two gradients."""
    return {name: a[name] - b[name] for name in b}


def minibatch_variance(network, batches) -> float:
    """Return the variance of the exact gradient from batch to batch."""
    gradients = [gradient(network, network.batch(number)) for number in range(batches)]
    pairs = [(i, j) for i in range(batches) for j in range(i)]
    squares = [product(d, d) for d in (minus(gradients[i], gradients[j]) for i, j in pairs)]
    return sum(squares) / len(squares) / 2


def saved_mib(network, batch) -> float:
    """Return the MiB that a forward with the loss saves for the backward."""
    model = network.model  # which the meter finds in the closure
    return fewbit.saved_bytes(lambda: (model, network.loss(batch))[1]).total / 2**20


def measured(network, batch, exact, draws) -> dict[str, float]:
    """Return the error, scale and bias of `draws` gradients of the compressed model."""
    norm = product(exact, exact)
    total, squares, inner, products = None, 0.0, 0.0, []
    for _ in range(draws):
        found = gradient(network, batch)
        inner += product(found, exact)
        error = minus(found, exact)
        squares += product(error, error)
        if total is None:
            total = error
        else:
            products.append(product(error, total))
            total = {name: total[name] + error[name] for name in total}
    found = {"error": math.sqrt(squares / draws / norm), "scale": inner / draws / norm}
    if draws > 1:
        # There are draws * (draws - 1) / 2 products of two draws' errors. Without bias, the sums in the list are uncorrelated.
        pairs = norm * draws * (draws - 1) / 2
        found["bias"] = math.sqrt(max(sum(products), 0.0) / pairs)
        found["bias_noise"] = math.sqrt(math.hypot(*products) / pairs)
    return found


def rows_of(name, options, keep):
    """Measure a network in all settings, and call keep(row) for each."""
    random = {"random": True} if options.random else {}
    network = pretrained_networks.NETWORKS[name](**random, **options.sizes.get(name, {}))
    network.model.to(options.device, getattr(torch, options.dtype))
    network = network._replace(batch=_on(network, options.device, getattr(torch, options.dtype)))
    batch = network.batch(0)
    exact_of = functools.cache(functools.partial(exact_gradient, network, batch))
    exact = exact_of(False)
    noise, norm = minibatch_variance(network, options.batches), product(exact, exact)
    row = {"network": network.name, "setting": EXACT, "mib": round(saved_mib(network, batch), 2)}
    keep(row | {"minibatch_noise": round(math.sqrt(noise / norm), 4)})
    squared = {}
    for setting, how in settings_of(network).items():
        if options.settings and setting not in options.settings:
            continue
        started, reference = time.perf_counter(), exact_of(how.is_compiled)
        with compressed(network, how) as controller:
            for step in range(how.steps):
                other = network.batch(FIRST_BATCH_OF_POLICY + step)
                gradient(network, batch if how.is_one_batch else other)
            predicted = sum(row.variance for row in controller.allocation) if how.steps else None
            found = measured(network, batch, reference, options.draws)
            found["mib"] = saved_mib(network, batch)
        squared[setting] = found["error"] ** 2
        found["added_variance"] = squared[setting] * norm / noise
        if predicted is not None:
            found["predicted"] = math.sqrt(predicted / norm)
        if how.kind in network.kinds.values() and "8 bits" in squared:
            found["gain"] = (squared[setting] - squared["8 bits"]) / distortion("rotated", LOW)
        found = {key: float(f"{value:.4g}") for key, value in found.items()}
        keep({"network": network.name, "setting": setting, "draws": options.draws} | found)
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)


TIMED = (
    "8 bits",
    "4 bits",
    "2 bits",
    "4 bits, recompute_linear",
    "2 bits, recompute_linear",
    "checkpoint_ 8 bits, 4 bits",
)
ROUNDS = 7


def times_of(network) -> list[dict]:
    """Return rows with the time of a forward and backward pass, divided by that of an exact one right before it."""
    batch, rows = network.batch(0), []
    settings = settings_of(network)
    for setting in TIMED:
        if setting not in settings:
            continue
        ratios = []
        for number in range(ROUNDS + 1):
            exact = _seconds(network, batch)
            with compressed(network, settings[setting]):
                gradient(
                    network, batch
                )  # the first pass of a converted model makes what later ones use
                ratio = _seconds(network, batch) / exact
            if number > 0:  # the first round is a warm-up
                ratios.append(ratio)
        low, _, high = statistics.quantiles(ratios, n=4)
        found = {"time": statistics.median(ratios), "quartile_1": low, "quartile_3": high}
        found = {key: round(value, 3) for key, value in found.items()}
        rows.append({"network": network.name, "setting": setting, "rounds": ROUNDS} | found)
        print(rows[-1], flush=True)
    return rows


def _seconds(network, batch) -> float:
    started = time.perf_counter()
    gradient(network, batch)
    return time.perf_counter() - started


def _on(network, device, dtype):
    """Return network.batch with batches on a device; floating tensors in a dtype."""

    @functools.cache
    def batch(number):
        given = network.batch(number)
        if not isinstance(given, tuple):
            return given.to(device)
        return tuple(x.to(device, dtype if x.is_floating_point() else None) for x in given)

    return batch


def main(arguments=None):
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(pretrained_networks.NETWORKS)
    parser.add_argument("--networks", nargs="+", choices=names, default=names)
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="only these settings")
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--batches", type=int, default=4, help="for the noise of minibatches")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--output", help="the name of the results")
    options = parser.parse_args(arguments)
    options.sizes = {}
    if options.quick:
        options.draws, options.batches = 2, 2
        options.settings = options.settings or ["4 bits", "2 bits"]
        options.sizes = {
            "smollm2": {"tokens": 64},
            "minilm": {"samples": 4},
            "efficientnet": {"samples": 4, "pixels": 64},
        }
    suffix = ("_random" if options.random else "") + (
        "" if options.dtype == "float32" else f"_{options.dtype}"
    )
    name = options.output or f"pretrained{suffix}{'_quick' if options.quick else ''}"
    about = harness.machine("torch", "transformers") | {
        "device": options.device,
        "dtype": options.dtype,
    }
    if options.times:
        networks = (pretrained_networks.NETWORKS[each]() for each in options.networks)
        rows = [row for network in networks for row in times_of(network)]
        harness.save("pretrained_times", about, rows)
        return
    rows = harness.stored(name)

    def keep(row):
        same = ("network", "setting")
        rows[:] = [old for old in rows if any(old[key] != row[key] for key in same)] + [row]
        print(row, flush=True)
        harness.save(name, about, rows)

    for network in options.networks:
        rows_of(network, options, keep)


if __name__ == "__main__":
    main()
