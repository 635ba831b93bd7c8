"""Kinds of torch's functions: which of them may decide, which choose elements, and which write to tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional

NEUTRAL, USUAL, READS, CHOOSES, DRAWS_ONE_HOT, DRAWS_SLOPES = range(6)
"""The kinds. NEUTRAL: no decision, and no new tensor from values. READS: returns Python numbers. CHOOSES: returns elements
of its input and their indices. DRAWS_ONE_HOT: `gumbel_softmax`, which chooses without showing an index. DRAWS_SLOPES:
`rrelu`, which draws as many random numbers as its input has negative elements. USUAL: all others."""

_READS = frozenset(
    "item tolist numpy __array__ __bool__ __int__ __float__ __index__ __complex__ __contains__ equal allclose is_nonzero".split()
)
_CHOOSES = {
    "topk": (2, -1), "kthvalue": (2, -1), "mode": (1, -1), "sort": (1, -1), "max": (1, None), "min": (1, None),
    "median": (1, None), "nanmedian": (1, None), "cummax": (1, None), "cummin": (1, None),
}  # fmt: skip
"""{name: (position of the argument `dim`, its default)}. With the default None, the function needs `dim` to return indices."""
_INDICES = "argmax", "argmin", "argsort"
_SORTED = {"bucketize": (1, "boundaries"), "searchsorted": (0, "sorted_sequence")}
"""{name: (position of the sequence into which the function sorts its input, its name)}."""
_RESIZED = frozenset("unique unique_consecutive nonzero argwhere".split())
"""Functions whose results have a size that depends on values. All their results are recorded, also the floating ones."""
_NEUTRAL = frozenset("broadcast_tensors meshgrid randint".split())
DRAWS = frozenset("poisson binomial _standard_gamma _sample_dirichlet".split())
"""Functions that return random floating tensors, and draw as many numbers as their input determines."""
_NO_WRITES = frozenset("requires_grad_ detach_ rename_ share_memory_".split())
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
) | {"__setitem__"}
_NORMS = {
    functional.batch_norm: (1, 2),
    functional.instance_norm: (1, 2),
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
    torch.native_batch_norm: (3, 4),
    torch._batch_norm_impl_index: (3, 4),
}
_STATISTICS = {
    **_NORMS,
    torch.batch_norm_gather_stats_with_counts: (3, 4),
    torch.fused_moving_avg_obs_fake_quant: (3, 4, 5, 6),
    torch._fused_moving_avg_obs_fq_helper: (3, 4, 5, 6),
}
"""{function: positions of the statistics that it updates}. Neither its name nor torch's version counters tell of it."""
_BY_NAME = "running_mean", "running_var", "out"
_TRAINING = 5
"""The position at which norms take `training` or `use_input_stats`, without which they update nothing."""


def name_of(function) -> str:
    """Return the name of a function, method or op."""
    return getattr(function, "__name__", "").partition(".")[0]


@lru_cache(4096)
def kind_of(function) -> int:
    """Return the kind of a function of torch."""
    name = name_of(function)
    if function is functional.gumbel_softmax:
        return DRAWS_ONE_HOT
    if name in _READS:
        return READS
    if name in _CHOOSES:
        return CHOOSES
    if name.startswith("rrelu"):
        return DRAWS_SLOPES
    is_new = name.endswith("_like") or name.startswith("new_")
    if is_new or name in _NEUTRAL or name in ("__get__", "__set__"):
        return NEUTRAL
    return NEUTRAL if getattr(function, "namespace", "") == "fewbit" else USUAL


@lru_cache(4096)
def _writes_first(function) -> bool:
    name = name_of(function)
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return in_place or name in _IN_PLACE


@lru_cache(4096)
def _written_by_schema(function) -> tuple[tuple[int, str], ...]:
    if isinstance(function, torch._ops.OpOverloadPacket):
        schemas = function._schemas.values()
    elif isinstance(function, torch._ops.OpOverload):
        schemas = [function._schema]
    else:
        return ()
    return tuple(
        {
            (number, argument.name): None
            for schema in schemas
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
    )


def written(function, args, kwargs) -> list[torch.Tensor]:
    """Return the tensors among the arguments that a call may change."""
    if _writes_first(function):
        first = args[0] if args else kwargs.get("input", kwargs.get("self"))
        found = [first]
    elif function in _STATISTICS:
        by_name = kwargs.get("training", kwargs.get("use_input_stats", True))
        if function in _NORMS and not (args[_TRAINING] if len(args) > _TRAINING else by_name):
            return []
        found = [args[number] for number in _STATISTICS[function] if number < len(args)]
        found += [kwargs.get(name) for name in _BY_NAME]
    elif kwargs and kwargs.get("out") is not None:
        found = [kwargs["out"]]
    else:
        found = [_argument(args, kwargs, *place) for place in _written_by_schema(function)]
    return tensors_in(found)


def _argument(args, kwargs, position: int, name: str):
    return args[position] if len(args) > position else kwargs.get(name)


def tensors_in(values) -> list[torch.Tensor]:
    """Return the tensors among values, lists and tuples."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def assigned(function, args) -> torch.Tensor | None:
    """Return the tensor, without shared elements, to which `x[i] = y` assigns; None for other functions."""
    if name_of(function) != "__setitem__":
        return None
    x = args[0]
    shares = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
    return None if shares else x


def is_all_decided(function, args, kwargs) -> bool:
    """Return whether all tensors that a call returns are decisions, also the floating ones."""
    name = name_of(function)
    return name in _RESIZED or name in DRAWS or _is_coin(function, args, kwargs)


def _is_coin(function, args, kwargs) -> bool:
    """Return whether a call draws zeros and ones whose probabilities are a tensor."""
    name = name_of(function)
    if name == "bernoulli":
        return len(args) < 2 and "p" not in kwargs
    return name == "bernoulli_" and isinstance(_argument(args, kwargs, 1, "p"), torch.Tensor)


def may_differ_in_size(function) -> bool:
    """Return whether the second run's tensors may have another size than the recorded ones."""
    name = name_of(function)
    return name in _RESIZED or name == "where"  # with one argument, `where` is nonzero


def draws_slopes(function, args, kwargs) -> bool:
    """Return whether a call of kind DRAWS_SLOPES is in training mode."""
    position = 4 if "noise" in name_of(function) else 3
    return bool(_argument(args, kwargs, position, "training"))


def chosen_dim(function, args, kwargs) -> int | None:
    """Return the dimension along which a call of kind CHOOSES chooses, or None."""
    position, default = _CHOOSES[name_of(function)]
    dim = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("axis", default))
    return dim if type(dim) is int and kwargs.get("out") is None else None


def index_count(function, args, kwargs) -> int | None:
    """Return a number that all integers in a call's result are below, or None."""
    name = name_of(function)
    x = args[0] if args else kwargs.get("input")
    if _is_coin(function, args, kwargs):
        return 2
    if name in _SORTED:
        sequence = _argument(args, kwargs, *_SORTED[name])
        return sequence.size(-1) + 1 if isinstance(sequence, torch.Tensor) else None
    if name in _INDICES:
        dim = args[1] if len(args) > 1 and type(args[1]) is int else kwargs.get("dim")
        return x.numel() if dim is None or not x.dim() else x.size(dim)
    return x.size(-1) if name == "multinomial" else None
