"""Every call of fewbit that the record makes.

If the public API is renamed or moved, change this file alone: arguments and results of these adapters stay, so that keys
and values of a record that was made before stay comparable. Options of `compressed` have the names of `compress_` as of
version 0.1.0.dev0, whatever they are called later. Rows and states have the fields that these functions document.
"""

from __future__ import annotations

import contextlib
import io

import torch

import fewbit
import fewbit.functional
import fewbit.nn

Refusal = fewbit.FewbitError
"""The errors for settings and inputs that fewbit does not serve."""


# -- converting models ---------------------------------------------------------------------------------------


def compressed(model, **options):
    """Compress a model in place and return its controller.

    Args:
        model: a torch.nn.Module.
        options: keywords that `compress_` had in version 0.1.0.dev0.
    """
    bits, options = _in_todays_words(**options)
    return fewbit.compress_(model, bits, verbose=False, **options)


def _in_todays_words(**options) -> tuple[object, dict]:
    """Return the configuration and the other keywords that the options of version 0.1.0.dev0 stand for."""
    given = {name: value for name, value in options.items() if value is not None}
    layers = {
        name: given.pop(old)
        for name, old in (
            ("activation_bits", "activation_bits"),
            ("attention_bits", "attention_bits"),
            ("group_size", "group_size"),
            ("min_dtype", "minimum"),
            ("copies", "copies"),
            ("functional", "functional"),
        )
        if old in given
    }
    if layers:
        layers = {"layers": fewbit.LayerSettings(**layers)}
    if "overrides" in given:
        given["overrides"] = {
            glob: _override(change) for glob, change in given["overrides"].items()
        }
    return _configuration(given), given | layers


def _override(change):
    if not isinstance(change, dict):
        return change
    names = {"minimum": "min_dtype"}
    return fewbit.LayerSettings(**{names.get(name, name): value for name, value in change.items()})


def _configuration(given: dict):
    """Take the options that say who chooses bits out of `given`. Return the configuration."""
    bits, level = given.pop("bits", None), given.pop("level", None)
    interval = {"interval": given.pop("interval")} if "interval" in given else {}
    names = ("e2", "window", "codec", "by_channel")
    bound = {name: given.pop(name) for name in names if name in given}
    if given.pop("policy", "fixed") == "error-bound":
        for name, value in (("bits", bits), ("level", level)):
            if value is not None:
                raise fewbit.InputError(f"no {name} with an error bound")
        return fewbit.ErrorBound(**bound, **interval)
    if bound:
        raise fewbit.InputError("an error bound needs its policy")
    fuse = given.pop("fuse", None)
    if fuse is not None:
        if fuse != "preactivation":
            raise fewbit.InputError("no such fuse")
        if level not in (None, "L2"):
            raise fewbit.InputError("fused norms at another level")
        return fewbit.PreActivationBits() if bits is None else fewbit.PreActivationBits(bits)
    if "budget" in given:
        if bits is not None or level not in (None, "L3", "L4", "L5"):
            raise fewbit.InputError("a budget with bits or at another level")
        config = fewbit.Budget(given.pop("budget"), **interval)
        if level in ("L4", "L5"):
            given["offload"] = fewbit.HostOffload(level == "L5")
        return config
    if level is None:
        return fewbit.AdaptiveBits(bits, **interval) if bits != int(bits or 0) and bits else bits
    if level in ("L3", "L4", "L5"):
        if level != "L3":
            given["offload"] = fewbit.HostOffload(level == "L5")
        return fewbit.AdaptiveBits(4 if bits is None else bits, **interval)
    return fewbit.Level(level, bits)


def with_few_bit_activations(model, bits: int, **options) -> dict:
    """Convert the activation modules of a model alone, and return its `conversion`."""
    return _conversion(fewbit.replace_activations_(model, bits, verbose=False, **options))


def restored(model) -> None:
    """Undo `compressed` in place."""
    fewbit.restore_(model)


def conversion(controller) -> dict:
    """Return what was converted, without words.

    Returns:
        "converted": {path: [bits, whether it saves nothing of its own]}, "left alone": sorted paths, "bits of
        functions": [inputs, attention, activations] or None, "bytes": [before, after] for the sample, or None.
    """
    return _conversion(controller.report)


def _conversion(report) -> dict:
    return {
        "converted": {row.path: [row.bits, row.shared] for row in report.converted},
        "left alone": sorted(row.path for row in report.left_alone),
        "bits of functions": report.functions,
        "bytes": None
        if report.saved is None
        else [sum(tensors.values()) for tensors in report.saved],
    }


def state_of(controller) -> dict:
    """Return the controller's state: nested lists and mappings of numbers and texts."""
    return controller.state_dict()


def load_state(controller, state) -> None:
    """Continue from a state of `state_of`."""
    controller.load_state_dict(state)


def number_samples(controller, numbers) -> None:
    """Tell the controller which samples of the data the next forward has."""
    controller.number_samples(numbers)


def bits_by_layer(controller) -> dict:
    """Return the bits that levels from L3 on chose.

    Returns:
        {"path, input": [bits, elements, samples, whether the bits were given, sensitivity, variance]}.
    """
    return {
        f"{row.name or '(model)'}, {row.input}": [
            row.bits,
            row.elements,
            row.samples,
            row.is_fixed,
            row.sensitivity,
            row.variance,
        ]
        for row in controller.allocation
    }


def bounds_by_layer(controller) -> dict:
    """Return what policy "error-bound" found.

    Returns:
        {"path, input": [dx, bits, elements, whether bits were given, whether the bound is met, ratio, whether the tensor
        is kept exactly]}, "ratio" of all parameters, and "unobserved", the paths of layers without an observation.
    """
    bounds = controller.bounds
    rows = {
        f"{row.name or '(model)'}, {row.input}": [
            row.dx,
            row.bits,
            row.elements,
            row.is_fixed,
            row.is_met,
            row.ratio,
            row.kept == "exact",
        ]
        for row in bounds
    }
    return rows | {"ratio": bounds.ratio, "unobserved": list(bounds.unobserved)}


# -- measuring -----------------------------------------------------------------------------------------------


def saved(model, *inputs, **keywords) -> dict:
    """Return what one forward keeps for backward.

    Returns:
        "total", "parameters" and "buffers" in bytes, "by kind": {kind: bytes}, "by module": {path: bytes}, and "entries":
        [module, kind, shape, dtype, bytes] of each storage.
    """
    found = fewbit.saved_bytes(model, *inputs, **keywords)
    return {
        "total": found.total,
        "parameters": found.parameters,
        "buffers": found.buffers,
        "by kind": found.by_kind(),
        "by module": found.by_module(),
        "entries": [
            [entry.module, entry.kind, list(entry.shape), str(entry.dtype), entry.bytes]
            for entry in found.entries
        ],
    }


def gradient_ratio(controller, batches, loss, **options) -> dict:
    """Return the controller's gradient ratio: the numbers for all parameters, and by module."""
    found = controller.gradient_ratio(batches, loss, **options)
    return {
        "ratio": found.ratio,
        "error": found.error,
        "relative error": found.relative_error,
        "is exceeded": found.is_exceeded,
        "by module": found.by_module,
        "relative by module": found.relative_by_module,
    }


def plan(model, batches, loss, candidates=None, **options) -> dict:
    """Return a plan without its times.

    Args:
        candidates: [(policy, options of `compressed`, whether activations alone are converted)], or None for the default.

    Returns:
        The numbers for the whole plan, and "rows": [[bytes, error, its standard error, variance, its standard error,
        bias]] in the order of the candidates. "recommended" and "closest" are indices of rows.
    """
    if candidates is not None:
        candidates = [_candidate(*candidate) for candidate in candidates]
    found = fewbit.plan(model, batches, loss, candidates=candidates, progress=False, **options)
    rows = list(found.rows)
    return {
        "exact bytes": found.exact_bytes,
        "gradient": found.gradient,
        "sampling": found.sampling,
        "sampling error": found.sampling_error,
        "recommended": None if found.recommended is None else rows.index(found.recommended),
        "closest": rows.index(found.closest),
        "rows": [
            [
                row.saved_bytes,
                row.error,
                row.error_error,
                row.variance,
                row.variance_error,
                row.bias,
            ]
            for row in rows
        ],
    }


def _candidate(policy, options, activations_only=False):
    bits, options = _in_todays_words(**options)
    method = "replace_activations_" if activations_only else "compress_"
    return fewbit.Candidate(policy, bits, options, method)


def candidate_of_document(values: dict) -> dict:
    """Return the candidate of a plan's JSON document as version 0.1.0.dev0 wrote it."""
    config = dict(values["bits"])
    kind = config.pop("kind")
    options = {
        "fixed": lambda: {"bits": config["bits"], "level": "L2"},
        "adaptive": lambda: {"bits": config["average"], "level": "L3"},
        "error-bound": lambda: {"policy": "error-bound", "e2": config["e2"]},
        "pre-activation": lambda: {"bits": config["bits"], "fuse": "preactivation"},
    }[kind]()
    activations_only = values["method"] == "replace_activations_"
    if activations_only:
        del options["level"]
    rest = {name: value for name, value in values.items() if name not in ("bits", "method")}
    return rest | {"activations_only": activations_only} | {"options": options | values["options"]}


def variance_profile(model, batches, loss, **options) -> dict:
    """Return a variance profile: names of contexts and parameters, and every array."""
    measuring = {name: options.pop(name) for name in ("draws", "chunks", "seed") if name in options}
    bits, options = _in_todays_words(**options)
    if bits is not None:
        options["bits"] = bits
    found = fewbit.variance_profile(model, batches, loss, progress=False, **options, **measuring)
    return {
        "contexts": list(found.contexts),
        "parameters": list(found.parameters),
        "terms": found.terms,
        "standard errors of terms": found.terms_error,
        "sampling": found.sampling,
        "direct": found.direct,
        "bias": found.bias,
        "agreement": found.agreement,
        "sampling ratio": found.sampling_ratio,
        "own share": found.own_share,
    }


# -- layers, functions and ops -------------------------------------------------------------------------------


def layer_names() -> list[str]:
    """Return the names of all classes of `fewbit.nn`."""
    return sorted(fewbit.nn.__all__)


def layer(name: str, *arguments, **options):
    """Build a layer of `fewbit.nn`."""
    return getattr(fewbit.nn, name)(*arguments, **options)


def function_names() -> list[str]:
    """Return the names of all functions of `fewbit.functional`."""
    return sorted(fewbit.functional.__all__)


def function(name: str):
    """Return a function of `fewbit.functional`."""
    return getattr(fewbit.functional, name)


def encoding_of(table) -> str:
    """Return a table as the text that ops take."""
    from fewbit.runtime.format.encoding import Encoding

    return Encoding.of(table).text


OPS = {
    "encode": "encode",
    "encode kept": "encode_kept",
    "decode and multiply": "decode_mul",
    "pack": "pack",
    "unpack": "unpack",
    "pack kept": "pack_kept",
    "narrow kept": "narrow_kept",
    "quantize": "quantize",
    "dequantize": "dequantize",
}


def op(name: str):
    """Return the op of `torch.ops.fewbit` for a name in OPS."""
    import fewbit.runtime.ops.quantizer_ops  # noqa: F401

    return getattr(torch.ops.fewbit, OPS[name]).default


def coded(name: str, x, bound, seed: int):
    """Compress a tensor by a codec within a bound, and decompress it.

    Args:
        name: "quant", "quant+zvc", "error-bounded" or "jpeg".
        bound: the squared error of an element, a number or one for each channel.

    Returns:
        (bytes of the payload, values).
    """
    from fewbit.runtime.codecs import codec

    payload = codec(name).compress(x, bound, torch.tensor([seed]))
    return payload.nbytes, codec(name).decompress(payload)


# -- tables --------------------------------------------------------------------------------------------------


def solved(name: str, bits=None, **options):
    """Solve for a table."""
    return fewbit.solve(name, bits, threads=1, **options)


def loaded(name: str, bits=None, **options):
    """Return a table that is shipped, cached or solved now."""
    return fewbit.load_table(name, bits, **options)


def table_functions() -> list[str]:
    """Return the names of all functions that have tables."""
    from fewbit import functions

    return list(functions.names())


def shipped(name: str) -> list:
    """Return the shipped tables of a function."""
    return list(fewbit.shipped_tables(name))


def document_of(table) -> dict:
    """Return a table's document without the time and the version of the solver."""
    document = table.document()
    document["solver"] = {
        name: value
        for name, value in document["solver"].items()
        if name not in ("seconds", "version")
    }
    return document


def verified(name: str) -> list:
    """Return [whether the claim holds, the recomputed error] for each shipped table of a function."""
    from fewbit.catalog.store import tables_directory

    found = fewbit.verify(tables_directory() / f"{name}.json")
    return [
        [not result.problems and result.unchecked is None, result.recomputed] for result in found
    ]


def error_table(names, bits, **options) -> list[dict]:
    """Return the rows of an error table."""
    return fewbit.error_table(names, bits, **options).records()


# -- the command line ----------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str]:
    """Run a command of the command line in this process.

    Returns:
        (exit code, standard output).
    """
    from fewbit.cli import app

    output, errors, code = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            app(list(arguments), prog_name="fewbit")
    except SystemExit as stop:
        code = stop.code or 0
    return code, output.getvalue()


# -- the machine ---------------------------------------------------------------------------------------------


def kernels() -> str:
    """Return the name of the backend that serves the CPU, with its instruction set."""
    from fewbit.runtime import backends

    return backends.of(torch.empty(0)).name
