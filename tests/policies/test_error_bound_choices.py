"""The bits that follow from made-up measurements, compared with bits computed by other means."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.config import ErrorBound
from fewbit.errors import BoundWarning
from fewbit.policies.error_bound import table_errors
from fewbit.policies.error_bound.choices import ExactCodec
from fewbit.policies.error_bound.estimates import ConstraintEstimate, Pair, TensorEstimate
from fewbit.policies.error_bound.largest_errors import least_average, polynomial_error, sizes
from fewbit.policies.error_bound.observations import (
    EXPECTED,
    MEASURED,
    ActivationNorms,
    GradientConstraint,
    MonitoredNorms,
    ProbeResult,
    TensorNorms,
)
from fewbit.policies.error_bound.policy import ErrorBoundPolicy


def tensor(*constraints, samples=4, squares=(1.0, 2.0, 3.0, 4.0), elements=400, **facts):
    """Return the result for the first input of a layer. `result_of` adds the layer's name."""
    squares = (*squares, *[0.0] * (16 - len(squares)))
    rest = {"constraints": constraints, **facts}
    return TensorNorms("", 0, 8.0, False, elements, samples, squares, **rest)


def weight(v2, first, second=0.0, label="weight"):
    return GradientConstraint(label, EXPECTED, v2, first, second)


def result_of(slots, *activations):
    """Return the result of a probe from {layer, or (layer, number): TensorNorms} and the norms of activations."""
    names = [name if isinstance(name, tuple) else (name, 0) for name in slots]
    named = [
        replace(slot, name=name, input=number)
        for (name, number), slot in zip(names, slots.values(), strict=True)
    ]
    by_name = dict(zip(names, named, strict=True))
    return ProbeResult(by_name, {activation.name: activation for activation in activations})


def activation(v2, grad2=1.0, function="gelu", parameters=(), name="act"):
    return ActivationNorms(name, function, parameters, v2, grad2)


def learned(*results, names=("a", "b"), **bound):
    """Return a policy that has learned from results: ProbeResult, or {layer: TensorNorms}."""
    policy = ErrorBoundPolicy(ErrorBound(**bound), names, activations=["act"])
    for result in results:
        policy.take_in(result if isinstance(result, ProbeResult) else result_of(result))
    return policy


def noise(kind, bits):
    """Return the largest squared error of rounding, divided by the number to which it is proportional."""
    if kind == "uniform":
        return 1 / 4 / (2**bits - 1) ** 2
    # D / (1 - D) of the normal tables, and the rounding of scales to bfloat16
    return (0.570796, 0.133121, 0.035784, 0.0095921, 0.0025110, 6.44655e-4, 1.63505e-4, 4.11868e-5)[
        bits - 1
    ] + 5.504e-6


def best_error(squares, samples, total, kind="uniform"):
    """Return the least error with that total of bits by exhaustive search, with equal bits for parts of equal samples."""
    parts = sizes(samples)
    best = math.inf
    for bits in itertools.product(range(1, 9), repeat=len(parts)):
        if sum(size * bit for size, bit in zip(parts, bits, strict=True)) <= total:
            error = sum(
                size * square * noise(kind, bit)
                for size, square, bit in zip(parts, squares, bits, strict=True)
            )
            best = min(best, error)
    return best


@settings(max_examples=30)
@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=3),
    st.floats(1e-6, 1e3),
    st.sampled_from(["uniform", "rotated", "masked"]),
)
def test_the_least_average_is_the_least(squares, limit, kind):
    squares = sorted(squares)
    samples = len(squares)
    found = least_average(squares, samples, limit, kind)
    if found is None:
        assert best_error(squares, samples, 8 * samples, kind) > samples * limit * (1 - 1e-5)
        return
    total = round(found * samples)
    assert found * samples == pytest.approx(total)
    assert best_error(squares, samples, total, kind) <= samples * limit * (1 + 1e-5)
    if total > samples:
        assert best_error(squares, samples, total - 1, kind) > samples * limit * (1 - 1e-5)


@pytest.mark.parametrize("kind", ["uniform", "rotated"])
@pytest.mark.parametrize("limit", [0.3, 0.02, 0.001])
def test_bits_of_a_tensor_whose_samples_share_none(limit, kind):
    """The bits are the fewest whole ones whose mean squared error is at most the limit."""
    found = least_average([0.5], 0, limit, kind)
    assert found == next(b for b in range(1, 9) if 0.5 * noise(kind, b) <= limit)
    assert least_average([0.5], 0, 1e-9, kind) is None
    assert least_average([0.0] * 16, 0, 0.0, kind) == 1


@pytest.mark.parametrize("samples", [1, 3, 15, 16, 17, 40, 100])
def test_parts_of_samples(samples):
    parts = sizes(samples)
    assert sum(parts) == samples and len(parts) == min(samples, 16)
    assert max(parts) - min(parts) <= 1


def test_the_strictest_constraint_decides():
    constraints = (
        weight(4.0, 10.0),
        GradientConstraint("input", MEASURED, 1.0, 3.0, 2.0),
        weight(9.0, 1.0, label="x: weight"),
    )
    policy = learned({"a": tensor(*constraints)}, e2=0.5)
    choice = policy.choices["a", 0]
    expected = {
        constraint.label: polynomial_error(0.5 * constraint.v2, constraint.first, constraint.second)
        for constraint in constraints
    }
    assert choice.dx2 == pytest.approx(min(expected.values()))
    assert choice.constraint.label == min(expected, key=expected.get) == "weight"
    assert choice.constraint.kind == EXPECTED
    assert choice.dx2 == pytest.approx(0.5 * 4 / 10**2)
    # Samples' squares are 1 to 4, elements 400: by trying.
    total = round(4 * choice.average)
    assert best_error((1, 2, 3, 4), 4, total) <= 400 * choice.dx2 * (1 + 1e-9)
    assert best_error((1, 2, 3, 4), 4, total - 1) > 400 * choice.dx2 or total == 4
    assert policy.averages == {("a", 0): choice.average}


def test_a_gradient_of_zero_keeps_exactly_and_no_gradient_one_bit():
    seen = {"a": tensor(weight(0.0, 1.0)), "b": tensor(), "c": tensor(weight(1.0, 1.0))}
    policy = learned(seen, names="abc")
    assert policy.choices["a", 0].average is None and policy.choices["a", 0].dx2 == 0
    assert policy.choices["b", 0].average == 1 and policy.choices["b", 0].dx2 == math.inf
    policy = learned({**seen, "b": tensor(is_known=False)}, names="abc")
    assert policy.choices["b", 0].average == 8


def test_where_not_all_gradients_were_seen_bits_stay():
    policy = learned({"a": tensor(weight(1.0, 1.0), is_known=False)})
    assert policy.choices["a", 0].average == 8
    assert policy.choices["a", 0].dx2 == pytest.approx(0.5)
    for codec, v2, kept in (
        ("quant+zvc", 1.0, 8),
        ("quant+zvc", 1e-9, None),
        ("quant", 1e-9, None),
    ):
        seen = {"a": tensor(weight(v2, 1.0), is_known=False), "b": tensor(weight(1.0, 1.0))}
        policy = learned(seen, codec=codec)
        assert policy.choices["a", 0].average == kept
        assert kept or isinstance(policy.codec_of(("a", 0)), ExactCodec)


def rows(*pairs):
    """Return results of a slot with (v2, first), beside another slot with the rest of a total of 100."""
    return [
        {"a": tensor(weight(v2, first)), "b": tensor(weight(100 - v2, 1.0))} for v2, first in pairs
    ]


def test_the_mean_and_the_maximum_of_observations():
    seen = rows((4, 10), (1, 20), (7, 5))
    assert learned(*seen).choices["a", 0].dx2 == pytest.approx(0.5 * 12 / (100 + 400 + 25))
    assert learned(*seen, window="max").choices["a", 0].dx2 == pytest.approx(0.5 * 4 / 400)


def test_ten_observations_count():
    seen = rows((50, 1000), *[(4, 10)] * 9)
    assert learned(*seen).choices["a", 0].dx2 < 1e-4
    assert learned(*seen, *rows((4, 10))).choices["a", 0].dx2 == pytest.approx(0.5 * 4 / 100)


def test_a_scale_of_the_loss_has_no_say():
    seen = rows((4, 10), (1, 20), (7, 5))
    scaled = []
    for slots, scale in zip(seen, (1, 2**16, 2**-8), strict=True):
        numbers = {name: slot.constraints[0] for name, slot in slots.items()}
        scaled.append(
            {
                name: tensor(weight(scale**2 * before.v2, scale * before.first))
                for name, before in numbers.items()
            }
        )
    for window in ("mean", "max"):
        a, b = (learned(*item, window=window) for item in (seen, scaled))
        assert a.choices["a", 0].dx2 == pytest.approx(b.choices["a", 0].dx2, rel=1e-12)
        assert a.averages == b.averages


@pytest.mark.parametrize("total", [0.0, math.inf, math.nan])
def test_a_step_without_a_finite_gradient_says_nothing(total):
    policy = learned({"a": tensor(weight(1.0, 1.0))})
    before = policy.knowledge, policy.choices
    policy.take_in(result_of({"a": tensor(weight(total, 5.0))}))
    policy.take_in(None)
    assert (policy.knowledge, policy.choices) == before


def test_variables_that_are_gone_are_forgotten():
    both, one = (
        {"a": tensor(weight(1.0, 1.0)), "b": tensor(weight(1.0, 1.0))},
        {"b": tensor(weight(1.0, 1.0))},
    )
    assert ("a", 0) in learned(both, *[one] * 8).choices
    assert ("a", 0) not in learned(both, *[one] * 9).choices


def test_batches_of_other_sizes():
    """Squares are in units of elements, so twice the samples and elements lead to the same bits."""
    small = tensor(weight(1.0, 10.0), samples=16, squares=[2.0] * 16, elements=1600)
    large = tensor(weight(1.0, 10.0), samples=32, squares=[2.0] * 16, elements=3200)
    found = [
        learned(*item).choices["a", 0].average
        for item in ([{"a": small}], [{"a": large}], [{"a": small}, {"a": large}])
    ]
    assert found[0] == found[1] == found[2]


def by_channel(codec, weights):
    """Return a policy that has seen a convolution's channels with these weights."""
    config = ErrorBound(codec=codec, by_channel=True)
    policy = ErrorBoundPolicy(config, ["a"], channels={"a": len(weights)})
    policy.take_in(result_of({"a": tensor(weight(4.0, 10.0), channel_weights=tuple(weights))}))
    return policy


WEIGHTS = [0.5, 1.5, 1.0, 0.0]


def test_bits_by_channel():
    x = torch.zeros(2, 4, 8, 8)
    assignment = by_channel("quant", WEIGHTS).assign((x,))
    assert assignment.samples_of(x, "a") == 8 and assignment.samples_of(x, "b") == 2
    assert assignment.samples_of(x[:, :, :4, :4].contiguous(), "a") == 2  # 16 elements are too few
    assert assignment.samples_of(x.contiguous(memory_format=torch.channels_last), "a") == 2
    slot = assignment.slot(("a", 0), 8, False)
    assert assignment.sensitivities(slot, torch.ones(8)).tolist() == WEIGHTS * 2
    assert assignment.sensitivities(slot, torch.ones(2)).tolist() == [1, 1]


def test_codecs_by_channel():
    codec = by_channel("quant+zvc", WEIGHTS).codec_of(("a", 0))
    assert codec.channels == pytest.approx([0.04, 0.02 / 1.5, 0.02, math.inf])
    x = torch.randn(2, 4, 16, 16)
    payload = codec.quantize(x, torch.tensor([1]))
    errors = (payload.spec.dequantize(payload.tensors) - x).square().mean((0, 2, 3))
    assert (errors <= torch.tensor(codec.channels)).all() and errors[1] > 0


def test_of_two_slopes_no_larger_table_is_solved(monkeypatch):
    """One bit is always enough, and solving a larger table would take a second or more in a training step."""
    strict = activation(1e-12, function="leaky_relu", parameters=(0.01,))
    seen = result_of({}, strict, activation(1.0, name="other"))
    asked, load = [], table_errors.store.load_table
    table_errors.table_error.cache_clear()
    monkeypatch.setattr(
        table_errors.store,
        "load_table",
        lambda *args, **options: asked.append(args) or load(*args, **options),
    )
    assert learned(seen).activations == {"act": 1}
    assert asked == [("leaky_relu", 1)]


def test_activations_by_the_mean_or_each_observation():
    slots = {"a": tensor(weight(100.0, 1.0))}
    first, second = (result_of(slots, activation(ratio)) for ratio in (1.0, 0.0006))
    assert (
        learned(first, second).activations["act"]
        < learned(first, second, window="max").activations["act"]
    )


def monitored(*pairs, label="weight"):
    """Return a result with the norms that the monitor measured: (layer, label, (|g^|^2, |g|^2))."""
    slots = {"a": tensor(weight(1.0, 1.0, label=label)), "b": tensor(weight(3.0, 1.0))}
    for name, name_label, pair in pairs:
        slots[name] = replace(slots[name], monitored=(MonitoredNorms(name_label, *pair),))
    return result_of(slots)


def test_ratios_are_of_sums():
    policy = learned(
        monitored(("a", "weight", (1.2, 1.0))),
        monitored(("b", "weight", (3.0, 3.0))),
        monitored(("a", "weight", (1.0, 1.0))),
    )
    assert policy.ratio == pytest.approx((1.1 + 3.0) / (1 + 3))
    assert policy.knowledge.slots["a", 0].ratio == pytest.approx(1.1)


def test_exact_variables_count_as_they_are():
    """The monitor does not measure them: 3 of 4 parts of |g|^2."""
    first = tensor(weight(1.0, 1.0), monitored=(MonitoredNorms("weight", 1.2, 1.0),))
    policy = learned({"a": first, "b": tensor(weight(3.0, 1e9))})
    assert policy.choices["b", 0].average is None and policy.choices["a", 0].average
    assert policy.ratio == pytest.approx((1.2 + 3.0) / (1.0 + 3.0))


def test_parameters_gradients_count_in_all():
    of_input = monitored(("a", "input", (8.0, 1.0)), ("b", "weight", (3.3, 3.0)), label="input")
    policy = learned(of_input)
    assert policy.ratio == pytest.approx(1.1)
    assert policy.knowledge.slots["a", 0].ratio == pytest.approx(8)


def test_the_warning_comes_once_and_names_the_worst():
    policy = ErrorBoundPolicy(ErrorBound(), ["a", "b"])
    worst = monitored(("a", "weight", (4.0, 1.0)), ("b", "weight", (2.1, 3.0)))
    for _ in range(2):  # of one draw or two the ratio may be anything
        policy.take_in(worst)
    with pytest.warns(
        BoundWarning, match=r"is 1\.52, above 1 \+ e2 = 1\.5; most in a \(4\), b \(0\.7\)"
    ):
        policy.take_in(worst)
    policy.take_in(monitored(("a", "weight", (9.0, 1.0))))
    assert policy.ratio > 1.5


def test_no_warning_for_what_may_be_chance():
    policy = ErrorBoundPolicy(ErrorBound(), ["a", "b"])
    for hat2 in (1.0, 2.5, 0.9, 2.0, 1.2, 2.3):
        policy.take_in(monitored(("a", "weight", (hat2, 1.0))))
    assert policy.ratio > 1.5


def test_the_warning_comes_where_one_of_many_is_far_above_it():
    """Each observation has other slots, so the noise of one slot does not count as noise between them."""
    names = "abcdefgh"
    policy = ErrorBoundPolicy(ErrorBound(), list(names))
    slots = {name: tensor(weight(1.0, 1.0)) for name in names}

    def learn(round_, name):
        hat2 = (9.0 if name == "a" else 1.02) + 0.01 * round_
        seen = replace(slots[name], monitored=(MonitoredNorms("weight", hat2, 1.0),))
        policy.take_in(result_of({**slots, name: seen}))

    for round_ in range(2):
        for name in names:
            learn(round_, name)
    assert policy.ratio == pytest.approx((9.005 + 7 * 1.025) / 8)
    with pytest.warns(BoundWarning, match=r"most in a \(9\.01\), "):
        learn(2, "a")


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_excess_is_a_mean_with_its_standard_error(count):
    rng = np.random.default_rng(count)
    pairs = [rng.uniform(0.5, 2.0, (count, 2)) for _ in range(3)]
    labels = "weight", "input", "b: weight"
    constraints = {
        label: ConstraintEstimate(label, MEASURED, (), tuple(Pair(*pair) for pair in seen))
        for label, seen in zip(labels, pairs, strict=True)
    }
    known = TensorEstimate("a", 0, 8.0, False, True, 400, 4, 4, constraints=constraints)
    for of_parameters, which in ((True, (0, 2)), (False, (0, 1, 2))):
        values = sum(pairs[i][:, 0] - 1.5 * pairs[i][:, 1] for i in which)
        error = values.mean() if count < 3 else values.std(ddof=1) / np.sqrt(count)
        assert known.excess(1.5, of_parameters, False) == pytest.approx((values.mean(), error**2))


def test_what_the_monitor_saw_with_other_settings_is_not_taken_over():
    first = learned(*[monitored(("a", "weight", (4.0, 1.0)), ("b", "weight", (3.3, 3.0)))] * 2)
    for other in (ErrorBound(e2=0.1), ErrorBound(codec="quant+zvc"), ErrorBound(window="max")):
        policy = ErrorBoundPolicy(other, ["a", "b"])
        policy.load_state_dict(first.state_dict())
        assert policy.ratio is None
        assert policy.knowledge.slots.keys() == first.knowledge.slots.keys()
    policy = ErrorBoundPolicy(ErrorBound(), ["a", "b"])
    policy.load_state_dict(first.state_dict())
    assert policy.ratio == first.ratio and policy.state_dict() == first.state_dict()


@pytest.mark.parametrize(("e2", "bits", "is_met"), [(0.5, 8, True), (1e-3, 1, False)])
def test_given_bits_that_are_too_few_are_told(e2, bits, is_met):
    given = replace(tensor(weight(1.0, 1.0)), average=bits, is_fixed=True)
    (bounded,) = learned({"a": given}, e2=e2).tables(None, "")["bounds"]
    assert bounded.is_fixed and bounded.is_met == is_met and bounded.bits == bits


def test_exact_values_are_kept_of_a_few_in_turn():
    sizes = {"a": 100, "b": 60, "c": 40, "d": 30}
    seen = {name: tensor(weight(1.0, 1.0), elements=number) for name, number in sizes.items()}
    policy = learned(seen, names="abcd")
    found = []
    for _ in range(4):
        found.append([name for name, _ in policy.monitored()])
        policy.monitored()  # of a forward that no backward pass came to
        policy.take_in(result_of(seen))
    assert found == [["a"], ["b", "c"], ["d"], ["a"]]
    assert ErrorBoundPolicy(ErrorBound(), ["a"]).monitored() == []


def test_those_that_a_forward_did_not_meet_are_next():
    """A tensor that was not saved may belong to another module. A tensor that is never saved again loses its turn."""
    seen = {name: tensor(weight(1.0, 1.0), elements=10) for name in "abc"}
    policy = learned(seen, names="abcd")
    assert policy.monitored() == [("a", 0)]
    policy.take_in(result_of({"b": seen["b"], "c": seen["c"]}))
    assert policy.monitored() == [("a", 0)]
    for _ in range(8):
        policy.take_in(result_of({"b": seen["b"], "d": seen["b"]}))
    assert list(policy.knowledge.slots) == [("b", 0), ("c", 0), ("d", 0)]
    turns = []
    for _ in range(3):
        turns += policy.monitored()
        policy.take_in(result_of({item: seen["a"] for item in "bcd"}))
    assert turns == [("b", 0), ("c", 0), ("d", 0)]


def merged(*results):
    """Return the result that each of several processes makes from all results."""
    return learned().merge(list(results))


def test_results_of_processes_are_merged():
    """Squared errors of two processes add up; what one has not seen comes from the other."""
    first = tensor(
        weight(1.0, 3.0),
        GradientConstraint("input", MEASURED, 2.0, 1.0, 2.0),
        channel_weights=(0.5, 1.5),
        monitored=(MonitoredNorms("weight", 5.0, 4.0),),
    )
    second = tensor(
        weight(3.0, 4.0),
        GradientConstraint("input", MEASURED, 1.0, 2.0, 0.0),
        channel_weights=(1.5, 0.5),
    )
    alone = tensor(weight(1.0, 1.0), is_known=False)
    found = merged(
        result_of({"a": first}, activation(1.0, 2.0)),
        None,
        result_of({"a": second, ("b", 2): alone}, activation(3.0, 4.0)),
    )
    a = found.slots["a", 0]
    assert (a.elements, a.samples, a.squares[:5], a.is_known) == (800, 4, (2, 4, 6, 8, 0), True)
    assert a.constraints == (
        GradientConstraint("weight", EXPECTED, 4.0, 5.0),
        GradientConstraint("input", MEASURED, 3.0, math.sqrt(5), 2.0),
    )
    assert a.channel_weights == (1.0, 1.0)
    assert a.monitored == (MonitoredNorms("weight", 5.0, 4.0),)
    assert found.slots["b", 2] == replace(alone, name="b", input=2)
    assert found.activations == {"act": activation(4.0, 6.0)}
    assert merged(None, ProbeResult()) == ProbeResult()


def test_processes_that_see_different_gradients():
    """A constraint that only one process has seen counts for both. Constraints with the same label are one, in any order."""
    other = weight(1.0, 1.0, label="b: weight")
    found = merged(
        result_of({"a": tensor(weight(1.0, 1.0))}),
        result_of({"a": tensor(other, weight(1.0, 1.0), weight(3.0, 3.0))}),
    ).slots["a", 0]
    assert found.is_known
    assert [constraint.label for constraint in found.constraints] == ["weight", "b: weight"]
    v2, first, _ = (getattr(found.constraints[0], name) for name in ("v2", "first", "second"))
    # The stricter of the second process's two: V^2 = 4, and first at least that of either.
    assert v2 == 5.0 and first == pytest.approx(math.hypot(1.0, 3.0 * math.sqrt(4 / 3)))
