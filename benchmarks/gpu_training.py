"""Memory, largest batch and speed of training ResNet-50 and GPT-2-small: exact, recomputed and compressed.

    python benchmarks/gpu_training.py                       # a CUDA device
    python benchmarks/gpu_training.py --quick               # fewer steps, less memory
    python benchmarks/gpu_training.py --device cpu --quick  # tiny models, to check that it runs

A step is a forward, a backward and an optimizer step in bfloat16 autocast. ResNet-50 has random images of 224x224 in
channels-last order and SGD with momentum; GPT-2-small has random sequences of 1024 tokens and AdamW. Both optimizers
are fused, and dropout is off. In every arm, the head and the loss of the language model process the tokens in
checkpointed chunks, because the logits of 50257 words would otherwise take most of the memory.

The arms are: exact; level L2 at 4 and 2 bits; levels L3 and L4 at 2 bits on average, which have adapted to the data before
they are measured; pre-activation blocks at 4 bits; few-bit activations alone; checkpointing of every block, by torch and by `fewbit.checkpoint_`, whose
regions save inputs of 8 bits; the latter with 2 bits inside the regions; exact training
and L2 at 2 bits with the step in a CUDA graph; torch.compile; fewbit.compile with 2 bits; and torch.compile with
activation_memory_budget 0.5. Each arm runs in a process of its own, so that memory of other arms does not count. The
processes are copies of a server that has imported torch. Before the arms run, gradients of L2 at 8 bits are compared with
exact gradients. The arms run even if this check fails, and the program then ends with an error.

The memory of the device is capped (--memory), so that the search for the largest batch takes seconds. Peaks include
the parameters, the gradients and the optimizer's state. On a CPU, the resident memory of the process is measured
instead, minus that before the model was built. It includes freed memory that the C library keeps.

Writes results/gpu_training.json after every check and arm, with --device cpu only if $OUT is set.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import time

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fewbit
from fewbit.models import transformer
from fewbit.models.activation_names import FACTORIES
from fewbit.models.resnet import ResNet
from fewbit.runtime import backends

GIB = 2**30
CASES = {
    # batch: the size at which arms are compared. most: the largest size, for which 32-bit indices of kernels suffice.
    "resnet50": {"model": "resnet50", "size": 224, "classes": 1000, "batch": 64, "most": 2048},
    "gpt2": {"context": 1024, "depth": 12, "vocabulary": 50257, "batch": 8, "most": 512},
}
LLAMA = {"context": 4096, "depth": 4, "width": 2048, "batch": 1, "most": 64}
"""A stack of Llama's blocks, without words; gpu_proof.py trains it."""
TINY = {
    "resnet50": {"model": "resnet18", "size": 64, "classes": 10, "batch": 8, "most": 32},
    "gpt2": {"context": 16, "depth": 1, "vocabulary": 64, "batch": 4, "most": 16},
}
SMALL = {"resnet50": 8, "gpt2": 1}  # the batch size of `check`
WIDTH, HEADS = 768, 12
CHUNK = 2048  # tokens whose logits exist at a time
TOLERANCE = 0.05
TRIES = 12
WARM_UP = 17  # untimed steps of an arm whose bits adapt


# -- Models -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_proj(self.act(self.c_fc(self.ln_2(x))))


class Rotary(nn.Module):
    """Rotates the vectors of heads, (batch, heads, tokens, 64), by their positions."""

    def __init__(self, context: int):
        super().__init__()
        rates = 10000.0 ** (-torch.arange(32) / 32)
        angles = torch.arange(context)[:, None] * rates
        self.register_buffer("sines", angles.sin(), persistent=False)
        self.register_buffer("cosines", angles.cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tables = self.sines[: x.shape[-2]], self.cosines[: x.shape[-2]]
        sines, cosines = (table.to(x.dtype) for table in tables)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


class LlamaBlock(nn.Module):
    """A block of Llama whose heads have 64 entries, with rotary positions."""

    def __init__(self, width: int, rotary: Rotary):
        super().__init__()
        self.rotary = rotary
        self.input_norm, self.output_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        hidden = width * 8 // 3 // 64 * 64
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.input_norm(x)
        q, k, v = (
            layer(normed).unflatten(-1, (-1, 64)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        normed = self.output_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """A stack of `LlamaBlock`s, which maps (batch, tokens, width) to the same shape.

    Args:
        depth: the number of blocks.
        width: a multiple of 64.
        context: the largest number of tokens.
    """

    def __init__(self, depth: int, width: int, context: int):
        super().__init__()
        rotary = Rotary(context)
        self.h = nn.ModuleList(LlamaBlock(width, rotary) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x


class GPT2(nn.Module):
    """A GPT2Model for machines without transformers. It maps tokens (batch, length) to hidden states."""

    def __init__(self, context: int, depth: int, vocabulary: int):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(context, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(depth))
        self.ln_f = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


def build(case, settings, device):
    torch.manual_seed(0)
    if case == "resnet50":
        model = ResNet(settings["model"], classes=settings["classes"])
        return model.to(device, memory_format=torch.channels_last).train()
    if case == "llama":
        sizes = (settings[name] for name in ("depth", "width", "context"))
        return Llama(*sizes).to(device).train()
    if importlib.util.find_spec("transformers") is None:
        sizes = (settings[name] for name in ("context", "depth", "vocabulary"))
        return GPT2(*sizes).to(device).train()
    # torch's GELU, because that of transformers saves the result of every operation, so that other arms would look
    # better.
    model = transformer.build("gpt2", FACTORIES["gelu_tanh"], "sdpa")
    model.h = model.h[: settings["depth"]]
    model.config.n_layer = settings["depth"]
    if settings["vocabulary"] != model.config.vocab_size:
        model.config.vocab_size = settings["vocabulary"]
        model.wte = nn.Embedding(settings["vocabulary"], WIDTH)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device).train()


def data(case, settings, batch, device):
    generator = torch.Generator(device).manual_seed(1)
    if case == "resnet50":
        size = (batch, 3, settings["size"], settings["size"])
        x = torch.randn(size, device=device, generator=generator)
        y = torch.randint(settings["classes"], (batch,), device=device, generator=generator)
        return x.contiguous(memory_format=torch.channels_last), y
    if case == "llama":
        size = (batch, settings["context"], settings["width"])
        x, y = (torch.randn(size, device=device, generator=generator) for _ in range(2))
        return x.bfloat16().requires_grad_(), y.bfloat16()
    size = (batch, settings["context"] + 1)
    tokens = torch.randint(settings["vocabulary"], size, device=device, generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss(case, forward, embedding, x, y):
    """Return the mean loss of a batch.

    Args:
        case: A key of CASES.
        forward: The model, possibly compiled.
        embedding: The weight of the language model's embedding, which is also that of its head; else None.
        x: The images or tokens.
        y: The labels or next tokens.
    """
    out = forward(x)
    if case == "resnet50":
        return F.cross_entropy(out.float(), y)
    if case == "llama":
        return F.mse_loss(out, y)
    hidden = out if isinstance(out, Tensor) else out.last_hidden_state
    parts = zip(hidden.flatten(0, 1).split(CHUNK), y.flatten().split(CHUNK), strict=True)
    options = {"use_reentrant": False, "preserve_rng_state": False}
    sums = (checkpoint(_chunk, *part, embedding, **options) for part in parts)
    return sum(sums) / y.numel()


def _chunk(hidden, y, embedding):
    return F.cross_entropy(F.linear(hidden, embedding).float(), y, reduction="sum")


# -- Arms -------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *inputs, **options):
        return checkpoint(self.block, *inputs, use_reentrant=False, **options)


def checkpointed(model):
    stages = (
        [model.h] if hasattr(model, "h") else [getattr(model, f"layer{i}") for i in range(1, 5)]
    )
    for stage in stages:
        for i, block in enumerate(stage):
            stage[i] = Checkpointed(block)
    return model


def compiled(model):
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = 0.5
    return torch.compile(model)


def compressed(model):
    return fewbit.compile(model, bits=2)


def level(name, bits, **options):
    def arm(model):
        fewbit.compress_(model, bits=fewbit.Level(name, bits), verbose=False, **options)
        return model

    return arm


def preactivation(model):
    fewbit.compress_(model, fewbit.PreActivationBits(4), verbose=False)
    return model


def checkpoint_(model):
    fewbit.checkpoint_(model, include="h.*" if hasattr(model, "h") else "layer?.*")
    return model


def checkpoint_2_bits(model):
    return checkpoint_(level("L2", 2)(model))


def activations(model):
    fewbit.replace_activations_(model, verbose=False)
    return model


# An arm is a function that converts a model and returns the callable to train. Arms that compile take longest, so they are
# last in case time runs out. The step of an arm in CAPTURED is recorded in a CUDA graph, which the timed steps replay.
COMPILING = {
    "torch.compile": torch.compile,
    "fewbit.compile 2 bits": compressed,
    "budget 0.5": compiled,
}
CAPTURED = {
    "exact, CUDA graph": lambda model: model,
    "L2 2 bits, CUDA graph": level("L2", 2),
}
ARMS = {
    "exact": lambda model: model,
    "L2 4 bits": level("L2", 4),
    "L2 2 bits": level("L2", 2),
    "L3 2 bits": level("L3", 2),
    "L4 2 bits": level("L4", 2),
    "pre-activation 4 bits": preactivation,
    "activations": activations,
    "checkpointing": checkpointed,
    "checkpoint_": checkpoint_,
    "checkpoint_, 2 bits": checkpoint_2_bits,
    **CAPTURED,
    **COMPILING,
}


# -- Devices ----------------------------------------------------------------------------------------


class Cuda:
    def __init__(self, memory):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))

    def clear(self):
        gc.collect()
        torch.cuda.empty_cache()

    def now(self):
        return torch.cuda.memory_allocated()

    @contextlib.contextmanager
    def peak(self):
        """Return a context manager. Its dict contains the peaks of memory in bytes after the `with` block."""
        peaks = {}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield peaks
        torch.cuda.synchronize()
        peaks["allocated"] = torch.cuda.max_memory_allocated()
        peaks["reserved"] = torch.cuda.max_memory_reserved()

    def seconds(self, call, repeats):
        return harness.device_seconds(call, "cuda", repeats, warm=0)


class Cpu:
    """Measures resident memory instead of a device's. The cap is checked after each block that is measured."""

    def __init__(self, memory):
        self._memory, self._before = memory, harness.resident_bytes()

    def clear(self):
        gc.collect()
        with contextlib.suppress(AttributeError):  # only glibc has this function
            ctypes.CDLL(None).malloc_trim(0)

    def now(self):
        return harness.resident_bytes() - self._before

    @contextlib.contextmanager
    def peak(self):
        peaks = {}
        with harness.watched(self.now) as found:
            yield peaks
        peaks["allocated"] = found.most
        if peaks["allocated"] > self._memory:
            raise torch.OutOfMemoryError(f"{peaks['allocated']} bytes resident")

    def seconds(self, call, repeats):
        return harness.seconds(call, repeats, warm=False)


DEVICES = {"cuda": Cuda, "cpu": Cpu}


# Parts of the error messages of libraries under torch if memory runs out.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "unable to find an engine")


def is_out_of_memory(error) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)
    )


# -- What one process does --------------------------------------------------------------------------


class Training:
    """A model with its optimizer and a batch. `step` runs one training step."""

    def __init__(self, case, settings, device, arm):
        self.case, self.settings, self.device = case, settings, device
        self.model = build(case, settings, device)
        # Collected before the arm changes the model: checkpointing wraps blocks, but their parameters stay the same.
        self.parameters = list(self.model.parameters())
        self.embedding = self.model.wte.weight if case == "gpt2" else None
        self.forward = arm(self.model)
        self.is_compiled = arm in COMPILING.values()
        if case != "resnet50":
            options = {"fused": True, "capturable": arm in CAPTURED.values()}
            self.optimizer = torch.optim.AdamW(self.parameters, 1e-4, **options)
        else:
            self.optimizer = torch.optim.SGD(self.parameters, 1e-2, momentum=0.9, fused=True)
        self.x = self.y = None

    def take(self, batch):
        self.x = self.y = None
        self.x, self.y = data(self.case, self.settings, batch, self.device)
        if self.is_compiled:
            # Without this, the compiler would make a new graph for each batch size that the search tries.
            torch._dynamo.maybe_mark_dynamic(self.x, 0)

    def backward(self, autocast=True):
        with torch.autocast(self.device, torch.bfloat16, enabled=autocast):
            value = loss(self.case, self.forward, self.embedding, self.x, self.y)
        value.backward()

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.backward()
        self.optimizer.step()

    def capture(self):
        """Record a step in a CUDA graph. From now on, `step` replays it."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.step = graph.replay

    def gradient(self, autocast):
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(autocast)
        return torch.cat([each.grad.flatten() for each in self.parameters]).double()


def check(case, settings, options):
    """Return the relative error of the whole gradient at 8 bits, in float32 and in autocast.

    The forwards are the same, so all of the error is that of the backward pass.
    """
    batch, device = SMALL[case], options["device"]
    row = {}
    for name, autocast in (("float32", False), ("autocast", True)):
        flat = []
        for arm in (ARMS["exact"], level("L2", 8, layers=fewbit.LayerSettings(activation_bits=8))):
            training = Training(case, settings, device, arm)
            training.take(batch)
            flat.append(training.gradient(autocast))
        row[name] = float((flat[1] - flat[0]).norm() / flat[0].norm())
    return row


def measure(case, settings, options):
    """Train one arm and return its row: memory, time, and the largest batch."""
    device = DEVICES[options["device"]](options["memory"])
    batch, steps = settings["batch"], options["steps"]
    start = time.perf_counter()
    training = Training(case, settings, options["device"], ARMS[options["arm"]])
    training.take(batch)
    # After these steps the optimizer's state and the libraries' workspaces exist, and the compiler has run. The first
    # observed steps of level L3 are 1, 2, 4 ... 16.
    for _ in range(WARM_UP if options["arm"].startswith(("L3", "L4")) else 3):
        training.step()
    row = {
        "batch": batch,
        "parameters": sum(each.numel() for each in training.parameters),
        "backend": backends.on[torch.empty(0, device=options["device"]).device].name,
    }
    training.optimizer.zero_grad(set_to_none=True)
    device.clear()
    row["before_bytes"] = device.now()
    row["warm_up_s"] = time.perf_counter() - start
    is_captured = options["arm"] in CAPTURED
    with device.peak() as peaks:
        training.capture() if is_captured else training.step()
    row |= {f"{name}_bytes": value for name, value in peaks.items()}
    row |= speed(device, training, batch, steps)
    if options["search"] and not is_captured:
        row |= search(device, training, settings, steps, options["memory"])
    return row


def speed(device, training, batch, steps, prefix=""):
    training.step()
    times = device.seconds(training.step, steps)
    middle = statistics.median(times)
    return {
        f"{prefix}step_ms": 1e3 * middle,
        f"{prefix}step_least_ms": 1e3 * times[0],
        f"{prefix}step_most_ms": 1e3 * times[-1],
        f"{prefix}samples_per_s": batch / middle,
    }


def search(device, training, settings, steps, memory):
    tries = {}

    def attempt(batch, call):
        """Return what `call` returns and the peaks of memory for a batch of this size, or None if memory runs out."""
        try:
            training.take(batch)
            with device.peak() as peaks:
                result = call()
            return result, peaks
        except Exception as error:
            # The traceback of the error holds the step's tensors until this block ends, so memory is freed after it.
            if not is_out_of_memory(error):
                raise
        finally:
            training.x = training.y = None
            training.optimizer.zero_grad(set_to_none=True)
            device.clear()
        return None

    def peak_of(batch):
        def twice():
            # The second step runs in memory that the first has fragmented.
            training.step()
            training.step()

        done = attempt(batch, twice)
        tries[batch] = done is not None
        return done and done[1].get("reserved", done[1]["allocated"])

    batch, bounded = largest(peak_of, settings["batch"], settings["most"], memory)
    row = {"tries": len(tries)}
    timed = None
    # Longer runs can still fail in fragmented memory. Then a slightly smaller batch is tried.
    for _ in range(4):
        if batch == 0:
            break
        of_batch = batch
        timed = attempt(batch, lambda: speed(device, training, of_batch, steps, "largest_"))  # noqa: B023
        if timed is not None:
            break
        batch, bounded = batch - max(1, batch // 32), True
    return (
        row
        | {"largest_batch": batch, "largest_is_a_bound": not bounded}
        | (timed[0] if timed else {})
    )


def largest(peak_of, first, most, memory):
    """Return (the largest batch size that fits, to within a sixteenth; whether a larger one was found not to fit).

    The peak of memory grows about linearly with the batch, so two sizes that fit tell which one to try next.

    Args:
        peak_of: A function that returns the peak of memory for a batch size in bytes, or None if it does not fit.
        first: The first size to try.
        most: The largest size to try.
        memory: The bytes that the process may take.
    """
    peaks, bad, batch = {0: 0}, None, first
    for _ in range(TRIES):
        peak = peak_of(batch)
        if peak is None:
            bad = batch
        else:
            peaks[batch] = peak
        good = max(peaks)
        if good >= most or (bad is not None and bad - good <= max(1, good // 16)):
            break
        if good == 0:
            batch = bad // 2
        elif bad is not None:
            batch = max(bad - max(1, bad // 16), good + 1)
        elif len(peaks) == 2:
            batch = min(2 * good, most)
        else:
            before = sorted(peaks)[-2]
            slope = (peaks[good] - peaks[before]) / (good - before)
            more = (memory - peaks[good]) / slope if slope > 0 else good
            batch = min(good + max(int(0.97 * more), 1, good // 16), most)
    return max(peaks), bad is not None


# -- Processes --------------------------------------------------------------------------------------


# The server of processes imports these modules once. torch's optimizers import Dynamo.
PRELOADED = ["torch._dynamo", "fewbit.compress.compress"]


def _child(function, connection, arguments):
    try:
        result = function(*arguments)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    connection.send(result)
    connection.close()


def in_process(function, *arguments, limit):
    """Call a function in a new process, and return its result, a dict.

    Return {"error": message} if the function fails or takes longer than `limit` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(function, theirs, arguments))
    process.start()
    theirs.close()
    try:
        result = ours.recv() if ours.poll(limit) else {"error": f"not done within {limit:.0f} s"}
    except EOFError:
        result = {"error": "the process ended without a result"}
    # The process has nothing more to do after it has sent its result, so it may be killed.
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    return result


# -- Output -----------------------------------------------------------------------------------------


def describe(row, exact):
    if "error" in row:
        return row["error"]
    peak = f"peak {row['allocated_bytes'] / GIB:6.2f} GiB"
    if exact and exact is not row:
        peak += f" ({row['allocated_bytes'] / exact['allocated_bytes']:.2f} of exact)"
    if "reserved_bytes" in row:
        peak += f", reserved {row['reserved_bytes'] / GIB:.2f}"
    parts = [peak, _speed(row, row["batch"], exact, "")]
    if "largest_batch" in row:
        at_least = "at least " if row["largest_is_a_bound"] else ""
        parts.append(f"largest batch {at_least}{row['largest_batch']}")
        if "largest_step_ms" in row:
            parts.append(_speed(row, row["largest_batch"], exact, "largest_"))
    return "; ".join(parts)


def _speed(row, batch, exact, prefix):
    text = (
        f"batch {batch}: {row[prefix + 'samples_per_s']:.4g} samples/s, step {row[prefix + 'step_ms']:.1f} ms "
        f"({row[prefix + 'step_least_ms']:.1f} .. {row[prefix + 'step_most_ms']:.1f})"
    )
    if exact and exact is not row and not prefix:
        text += f", {row['step_ms'] / exact['step_ms']:.2f} of exact"
    return text


def about(device):
    own = importlib.util.find_spec("transformers") is None
    result = harness.machine("torch", "numpy", *([] if own else ["transformers"]))
    result |= {"fewbit": fewbit.__version__, "threads": torch.get_num_threads(), "device": device}
    result["gpt2_from"] = "benchmarks/gpu_training.py" if own else "fewbit.models.transformer"
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        result |= {
            "device": properties.name,
            "device_memory": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer steps, a smaller cap")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, help="default: all that the device is for"
    )
    parser.add_argument(
        "--memory", type=float, help="GiB that a process may take (20, quick 12, CPU 2)"
    )
    parser.add_argument("--steps", type=int, help="timed steps (20, quick 5)")
    parser.add_argument("--seconds", type=float, default=280, help="arms start within (280)")
    parser.add_argument("--no-search", action="store_true", help="without the largest batch")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device, quick = arguments.device, arguments.quick
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("expected a CUDA device, found none; --device cpu --quick is a smoke run")
    if device == "cpu":
        # With several threads, a step takes seconds if another program runs. Child processes inherit this variable.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    cases = CASES if device == "cuda" else TINY
    # On a CPU, compiling would take longer than all other arms, and tell nothing about a GPU.
    arms = arguments.arms or [
        each for each in ARMS if device == "cuda" or each not in (*COMPILING, *CAPTURED)
    ]
    memory = arguments.memory or (2 if device == "cpu" else 12 if quick else 20)
    options = {
        "device": device,
        "memory": int(memory * GIB),
        "steps": arguments.steps or (5 if quick else 20),
        "search": not arguments.no_search,
    }
    machine = about(device) | {"memory_cap": options["memory"], "steps": options["steps"]}
    print(json.dumps(machine), flush=True)

    rows, failed = [], []

    def add(row):
        rows.append(row)
        if device == "cuda" or os.environ.get("OUT"):
            harness.save("gpu_training", machine, rows)

    for case in arguments.cases:
        errors = in_process(check, case, cases[case], options, limit=120)
        print(f"{case} {cases[case]}: gradient at 8 bits off by {errors}", flush=True)
        if not max(errors.get("float32", 1), errors.get("autocast", 1)) < TOLERANCE:
            failed.append(case)
        add({"measure": "gradient at 8 bits", "case": case, **errors})
    exact = {}
    # Arms are the outer loop, so that if time runs out, both cases lack the last arms.
    for arm in arms:
        for case in arguments.cases:
            left = deadline - time.monotonic()
            # Starting a process and building a model takes longer than this.
            if left < 10:
                row = {"error": "no time left"}
            else:
                row = in_process(measure, case, cases[case], options | {"arm": arm}, limit=left)
            if arm == "exact" and "error" not in row:
                exact[case] = row
            print(f"{case:9} {arm:21} {describe(row, exact.get(case))}", flush=True)
            add({"measure": "training", "case": case, "arm": arm, **cases[case], **row})
    if failed:
        sys.exit(f"{', '.join(failed)}: expected gradients at 8 bits within {TOLERANCE} of exact")


if __name__ == "__main__":
    main()
