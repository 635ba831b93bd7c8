"""`fewbit.fit_` against settings made by hand: measured peaks, times in turns, and errors, on the CPU.

    python benchmarks/fit.py                 # all seven models; an hour on two cores
    python benchmarks/fit.py llama-lora moe  # some of them
    python benchmarks/fit.py --draw          # docs/images/fit.png from the results

For each model, `fit_` chooses settings for four targets between the least memory that it can reach and the peak of exact
training. The peak of each setting is measured by torch's profiler in the second of two whole steps with SGD, and the times of
forward and backward passes in turns: all settings once, then all once more, and so on. Times are those of the only thread, in which
other programs do not count. A time is the median over the rounds of the ratio to the exact step of the same round. The memory
budget of torch.compile is an arm of its own turns with exact steps, because the settings of a compiled model cannot be changed. Its
graphs run op by op, like eager mode. `fit_` offloads nothing on the CPU, where the host's memory is
the device's. The results are in results/fit.json.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import warnings
from collections import defaultdict
from functools import partial

import harness
import torch
from networks.compiled_networks import with_budget
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import fewbit
from fewbit.analysis.gradients import Measured, tensors_of
from fewbit.analysis.meter import identity_of
from fewbit.planning.block_settings import EXACT, RECOMPUTED, Option, Settings, everywhere
from fewbit.planning.block_steps import OptimizerBytes
from fewbit.planning.examination import examine
from fewbit.planning.fake_steps import loss_of_output
from fewbit.planning.fit import Search

NAME = "fit"
SHARES = (0.75, 0.5, 0.25, 0.08)
"""The targets: so much of the way from the least peak to the exact one."""
ERROR, ROUNDS = 0.1, 5
SGD = partial(torch.optim.SGD, lr=0.0)
BUDGETS = (0.5, 0.2)
"""The shares of its saved bytes that torch.compile may keep."""
aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip
"""The operations whose results selective checkpoints save."""
NOT_SHOWN = ("checkpoint, 4 bits", "checkpoint 8 bits, 4 bits")
"""The slowest arms, which the picture leaves out."""
SHOWN = {"transformer": "transformer", "llama-lora": "Llama with LoRA", "resnet-50": "ResNet-50"}
"""{the models of the picture: their titles}."""


class Classifier(nn.Module):
    def __init__(self, width=768, layers=2, words=1000):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0, "gelu", batch_first=True)
        self.embedding = nn.Embedding(words, width)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x)).mean(1))


def transformer():
    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    return Classifier(), (torch.randint(1000, (6, 128)), torch.randint(10, (6,))), loss


def tokens(batch, length, words=1000):
    ids = torch.randint(words, (batch, length))
    return {"input_ids": ids, "labels": ids}


def llama(batch=6, inner=1408):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=16, vocab_size=1000
    )  # fmt: skip
    return LlamaForCausalLM(config), tokens(batch, 128), None


def llama_lora():
    from peft import LoraConfig, get_peft_model

    model, batch, _ = llama(batch=3, inner=2816)
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")), batch, None


def experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=1000,
    )  # fmt: skip
    return MixtralForCausalLM(config), tokens(8, 128), None


def resnet():
    from fewbit.models.workload import workload

    model, (batch,), loss = workload("resnet50", batch=24, size=64, batches=1)
    return model, batch, loss


def unet():
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=2, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    batch = torch.randn(8, 3, 32, 32), torch.randint(1000, (8,)), torch.randn(8, 3, 32, 32)

    def loss(model, batch):
        noisy, steps, noise = batch
        return F.mse_loss(model(noisy, steps).sample, noise)

    return model, batch, loss


def encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=256, d_ff=1024, d_kv=64, num_layers=3, num_decoder_layers=3, num_heads=4, vocab_size=1000, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), tokens(8, 128), None


MODELS = {
    "llama-lora": llama_lora, "transformer": transformer, "moe": experts, "encoder-decoder": encoder_decoder, "unet": unet,
    "resnet-50": resnet, "llama": llama,
}  # fmt: skip


class Selective:
    """torch's selective checkpoints of every block: the results of matrix products, convolutions and attention are saved."""

    def __init__(self, paths):
        self.paths = list(paths)
        self.code = f"fewbit.checkpoint_(model, None, include={self.paths}, context_fn=selective)"

    def apply(self, model, always=False):
        everywhere([], EXACT).apply(model)
        fewbit.checkpoint_(model, None, include=self.paths, context_fn=selective)
        return everywhere_exact(model) if always else None


def everywhere_exact(model):
    return fewbit.compress_(model, 8, overrides={"": None}, verbose=False)


def selective():
    return create_selective_checkpoint_contexts(
        lambda context, operation, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE
            if operation in PRODUCTS
            else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


def by_hand(paths):
    """Return {name: settings} of what one would set by hand."""
    second = dict.fromkeys(paths, EXACT) | dict.fromkeys(paths[::2], RECOMPUTED)
    return {
        "exact": everywhere(paths, EXACT),
        "selective": Selective(paths),
        "4 bits": everywhere(paths, Option(4), 4),
        "2 bits": everywhere(paths, Option(2), 2),
        "checkpoint": everywhere(paths, RECOMPUTED),
        "checkpoint every second": Settings(second),
        "checkpoint, 4 bits": everywhere(paths, Option(4, True), 4),
        "checkpoint 8 bits, 4 bits": everywhere(paths, Option(4, True, 8), 4),
    }


def measured_peak(model, batch, loss, make=SGD) -> int:
    """Return the most bytes that exist at one moment of the second training step, as torch's profiler sees it."""
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step():
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    existing = [*model.parameters(), *model.buffers(), *tensors_of(batch), *tensors_of(states)]
    before = sum(dict(map(identity_of, existing)).values())
    return before + harness.most_bytes(step)


def made(name: str):
    """Return a model in training mode, a batch and a loss or None, with the settings of all measurements."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batch, loss = MODELS[name]()
    return model.train(), batch, loss


def compared(name: str) -> dict:
    """Return the measurements of a model."""
    model, batch, loss = made(name)
    start = time.perf_counter()
    optimizer = OptimizerBytes(model, torch.optim.SGD, False)
    found = examine(model, batch, loss, optimizer, progress=False)
    examined, search = time.perf_counter() - start, Search(found, ERROR)
    exact_peak, least = int(max(found.exact.bytes.peak.max(), found.update)), search.least()
    arms, targets = by_hand(found.paths), []
    for share in SHARES:
        memory = int(least.peak + share * (exact_peak - least.peak))
        chosen = search.fastest(memory)
        targets.append(
            {"memory": memory, "predicted_peak": None if chosen is None else int(chosen.peak)}
        )
        if chosen is not None:
            arms[f"fit_ {share:g}"] = chosen.settings
            gap = (chosen.seconds - min(chosen.bound, chosen.seconds)) / found.exact.seconds
            targets[-1] |= {"predicted_error": chosen.error, "gap": gap, "arm": f"fit_ {share:g}"}
            targets[-1]["predicted_time"] = 1 + chosen.seconds / found.exact.seconds
    value = loss or loss_of_output
    steps = Measured(model, value, 0)
    times: dict[str, list] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, settings in arms.items():
            settings.apply(model)
            steps.gradient(batch, 0)
            gc.collect()
            begin = time.thread_time()
            steps.gradient(batch, 0)
            times[arm].append(time.thread_time() - begin)
    rows, exact = {}, None
    for arm, settings in arms.items():
        controller = settings.apply(model, always=True)
        controller.context.salt = b"measured"
        gradient = steps.gradient(batch, 0)
        exact = gradient if exact is None else exact
        differences = (x - y for x, y in zip(gradient, exact, strict=True))
        square = sum(float(y.double().square().sum()) for y in exact)
        error = sum(float(d.double().square().sum()) for d in differences) / square
        settings.apply(model)
        rows[arm] = {
            "peak": measured_peak(model, batch, value),
            "seconds": [round(s, 4) for s in times[arm]],
            # In turns: the median of the ratios to the exact step of the same round.
            "time": statistics.median(
                a / b for a, b in zip(times[arm], times["exact"], strict=True)
            ),
            "error": error,
            "code": settings.code,
        }
    return {
        "examined_seconds": round(examined, 1),
        "blocks": len(found.paths),
        "targets": targets,
        "arms": rows,
    }


def budgets(name: str) -> dict:
    """Return {name of an arm: its measurements} of torch's memory budgets, in turns with exact training."""
    model, batch, loss = made(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            # The backward graph would save running statistics, which the forward graph has changed.
            module.running_mean = module.running_var = module.num_batches_tracked = None
    value = loss or loss_of_output
    calls = {f"memory budget {share:g}": with_budget(model, share) for share in BUDGETS}
    calls = {"exact": model, **calls}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    times, gradients = defaultdict(list), {}
    for arm, call in calls.items():
        gradients[arm] = torch.autograd.grad(value(call, batch), parameters)
        torch.testing.assert_close(gradients[arm], gradients["exact"], rtol=1e-3, atol=1e-4)
    for _ in range(ROUNDS):
        for arm, call in calls.items():
            gc.collect()
            begin = time.thread_time()
            torch.autograd.grad(value(call, batch), parameters)
            times[arm].append(time.thread_time() - begin)
    del gradients
    return {
        arm: {
            "peak": measured_peak(model, batch, lambda model, batch, call=call: value(call, batch)),
            "seconds": [round(s, 4) for s in times[arm]],
            "time": statistics.median(
                a / b for a, b in zip(times[arm], times["exact"], strict=True)
            ),
            "error": 0.0,
            "code": f"torch._functorch.config.activation_memory_budget = {arm.split()[-1]}",
        }
        for arm, call in calls.items()
        if arm != "exact"
    }


def judge(target: dict, rows: dict) -> None:
    """Compare the choice for a target with the other settings that fit in the same memory."""
    if target["predicted_peak"] is None:
        return
    own = rows[target["arm"]]
    fitting = {
        arm: row["time"]
        for arm, row in rows.items()
        if not arm.startswith("fit_") and row["peak"] <= target["memory"] and row["error"] <= ERROR
    }
    best = min(fitting, key=fitting.get, default=None)
    target |= {
        "peak": own["peak"],
        "time": own["time"],
        "error": own["error"],
        "best_by_hand": best,
    }
    target["time_of_best"] = None if best is None else fitting[best]
    target["time_of_checkpoint"] = fitting.get("checkpoint")


def draw(rows) -> None:
    """Draw time against peak for three models: settings made by hand, and the front of `fit_`'s choices."""
    from fewbit.render.figures import matplotlib
    from fewbit.render.labels import add_labels

    matplotlib("benchmarks/fit.py")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    found = [row for name in SHOWN for row in rows if row["model"] == name]
    panels, labels = figure.subplots(1, len(found)), []
    for axes, row in zip(panels, found, strict=True):
        points = {
            arm: (one["peak"] / 2**20, one["time"])
            for arm, one in row["arms"].items()
            if arm not in NOT_SHOWN
        }
        budgets = {arm: xy for arm, xy in points.items() if arm.startswith("memory budget")}
        hand = {arm: xy for arm, xy in points.items() if not arm.startswith(("fit_", "memory"))}
        chosen = defaultdict(list)  # several targets may have the same choice
        for arm, one in row["arms"].items():
            if arm.startswith("fit_"):
                chosen[one["code"]].append(points[arm])
        front = sorted(
            tuple(map(statistics.fmean, zip(*xys, strict=True))) for xys in chosen.values()
        )
        for found, color, label in (
            (hand, "tab:gray", "set by hand"),
            (budgets, "tab:orange", "memory budget of torch.compile"),
        ):
            axes.plot(*zip(*found.values(), strict=True), "o", color=color, label=label)
        axes.plot(*zip(*front, strict=True), "o-", color="tab:blue", label="chosen by fit_")
        labels.append(
            [
                (
                    arm.removeprefix("memory ").replace(
                        "checkpoint every second", "every second block"
                    ),
                    xy,
                    "black",
                )
                for arm, xy in (hand | budgets).items()
            ]
        )
        axes.margins(0.25, 0.12)
        axes.set_title(SHOWN[row["model"]], fontsize="medium")
        axes.set_xlabel("peak memory of a step, MiB")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("time / exact time")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    for axes, of_axes in zip(panels, labels, strict=True):
        add_labels(axes, of_axes)
    figure.savefig(harness.IMAGES / "fit.png", dpi=200)


def show(row) -> None:
    print(f"{row['model']}: examined in {row['examined_seconds']} s")
    for arm, one in row["arms"].items():
        print(
            f"    {arm:28}{one['peak'] / 2**20:9.1f} MiB{one['time']:7.2f}  error {one['error']:.2g}"
        )
    for target in row["targets"]:
        if target["predicted_peak"] is None:
            print(f"  target {target['memory'] / 2**20:.1f}: nothing fits")
            continue
        print(
            f"  target {target['memory'] / 2**20:.1f}: predicted {target['predicted_peak'] / 2**20:.1f}, measured "
            f"{target['peak'] / 2**20:.1f} MiB; time {target['time']:.2f}, best by hand {target['best_by_hand']} "
            f"{target['time_of_best']}, checkpoint {target['time_of_checkpoint']}"
        )


def main():
    names = [name for name in sys.argv[1:] if name != "--draw"] or list(MODELS)
    about = harness.machine("torch", "transformers", "diffusers", "peft")
    if "--draw" in sys.argv:
        draw(harness.stored(NAME))
        return
    tasks = [{"model": name} for name in names]
    rows = harness.run_missing(NAME, about, compared, tasks, 1)
    for row in rows:
        if not any(arm.startswith("memory budget") for arm in row["arms"]):
            row["arms"] |= harness.in_process(budgets, row["model"])
        for target in row["targets"]:
            judge(target, row["arms"])
        harness.save(NAME, about, rows)
        show(row)


if __name__ == "__main__":
    main()
