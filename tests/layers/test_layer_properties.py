"""Properties that every layer of fewbit.nn and fewbit.functional has, for each row of the tables in tests/helpers/layers.py.

A new layer needs a row there. The properties of activations are in test_activation_properties.py.
"""

import copy
import pickle
import re

import pytest
import torch
from exact_copies import Exact, Remembering, Replaying
from expectation import drawn, pooled_z, signed_z
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_strategies import STRATEGIES
from layers import (
    ATTENTION,
    EMBEDDINGS,
    EVERY,
    LAST,
    LAST_3D,
    LOSSES,
    OPERATIONS,
    PRE_ACTIVATION,
    ROWS,
    bytes_by,
    first_of_each,
    first_result,
    fresh,
    gradients,
    ids,
    output_gradient,
    relative,
    saved_by,
)
from samples import DTYPES, same, same_sums
from torch import nn
from torch.utils.checkpoint import checkpoint

import fewbit
import fewbit.functional as F
import fewbit.nn

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel",
    "ignore:Mismatch dtype between input and weight",
    "ignore:input's size at dim=0",
    "ignore::DeprecationWarning:torch.*",
    "ignore:.*isinstance.*treespec",
)
EVERY_CLASS = [layer for layer in first_of_each(ROWS) if layer.name != "LinearCrossEntropy"]
"""One row of each class or function that has properties of its own: torch's function computes LinearCrossEntropy."""
every_row = pytest.mark.parametrize("layer", **ids(ROWS))
every_class = pytest.mark.parametrize("layer", **ids(EVERY_CLASS))
with_copies = pytest.mark.parametrize(
    "layer", **ids([layer for layer in EVERY_CLASS if layer.has_copies])
)
PRODUCTS = [layer for layer in OPERATIONS if layer.name in ("matmul", "mul")]
EPS = 10
"""The rounding errors of gradients from exact copies, at most, in units of the dtype's eps."""


def seeded(function, *arguments):
    """Call the function from a fixed random state, so that dropouts draw the same mask."""
    torch.manual_seed(3)
    return function(*arguments)


def outcome(function, *arguments):
    """Return the seeded function's result, or the type of the error that it raises."""
    try:
        return seeded(function, *arguments)
    except (RuntimeError, ValueError, IndexError, AssertionError) as refusal:
        return type(refusal)


def copies_of(layer):
    """Return the options for which a layer has different backward passes."""
    return ({}, {"copies": 2}) if layer.is_norm and layer.name != "normalize" else ({},)


def needing(inputs):
    return [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]


def all_results(results):
    return results if isinstance(results, tuple) else (results,)


def check_values(layer, y, expected):
    """Compare values to the bit, or up to rounding if the layer adds in another order than torch."""
    if layer.rounding:
        assert relative(y, expected) <= layer.rounding * torch.finfo(y.dtype).eps
    else:
        assert same_sums(y, expected) and y.stride() == expected.stride(), y.dtype


def exact_pair(layer, device="cpu", dtype=torch.float32, **options):
    """Return our module, whose copies are exact, and torch's."""
    if layer.has_copies:
        return layer.pair_with(Exact(), device, dtype, **options)
    return layer.pair(8, device, dtype)


def check(layer, ours, theirs, inputs, limits, has_strides=False, may_be_refused=False):
    """Compare values, gradients within the limits and buffers, or the types of errors; has_strides: the first gradient's too."""
    found, expected = outcome(gradients, ours, *inputs), outcome(gradients, theirs, *inputs)
    if isinstance(expected, type):
        # For float32, torch computes all rows.
        assert found == expected and (may_be_refused or inputs[0].dtype != torch.float32)
        return
    (y, grads), (their_y, exact) = found, expected
    check_values(layer, y, their_y)
    if isinstance(limits, float):
        limits = [limits] * len(exact)
    for grad, wanted, limit in zip(grads, exact, limits, strict=True):
        assert grad.dtype == wanted.dtype and grad.shape == wanted.shape
        error = relative(grad, wanted)
        assert error <= limit if limit else same_sums(grad, wanted), (y.dtype, error, limit)
    assert not has_strides or grads[0].stride() == exact[0].stride() or not grads[0].numel()
    assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


# -- the table ------------------------------------------------------------------------------------------------


def _plain(name):
    """Return the name of a class or function without case, underscores, and endings that functions lack."""
    return re.sub(r"(?<=norm)\dd|loss$|,.*", "", name.replace("_", "").lower())


def test_every_public_layer_has_a_row():
    classes = set(fewbit.nn.__all__) - set(fewbit.nn.activations.__all__)
    assert classes <= {layer.name for layer in ROWS}
    rows = {_plain(layer.name) for layer in ROWS}
    activations = {*F.activations.__all__, "prelu"}
    assert {_plain(name) for name in set(F.__all__) - activations} <= rows
    public = {name for name in (*fewbit.nn.__all__,) if hasattr(fewbit, name)}
    assert public <= set(fewbit.__all__)


# -- gradients ------------------------------------------------------------------------------------------------


@every_row
def test_values_and_gradients_are_torchs(device, layer):
    """If nothing is rounded, gradients are torch's up to a few roundings. Those that need no copy are equal to the bit."""
    for dtype in DTYPES if layer in EVERY_CLASS else (torch.float32, torch.bfloat16):
        for options in copies_of(layer):
            ours, theirs = exact_pair(layer, device, dtype, **options)
            rounding = EPS * torch.finfo(dtype).eps
            limits = rounding if layer.has_copies else layer.limits(theirs, dtype)
            # Where the formula is written out, the layout follows that of the operands.
            is_written = layer.name.startswith(("einsum, one", "scaled_dot_product_attention"))
            has_strides = not options and not is_written
            check(layer, ours, theirs, layer.inputs(device, dtype), limits, has_strides)


@with_copies
def test_errors_fall_with_the_bits(layer):
    """At 8 bits each gradient is within the row's limit. Gradients that need no copy are exact with any number of bits."""
    _, theirs = layer.pair(8)
    inputs, limits = layer.inputs(), layer.limits(theirs, torch.float32)
    errors, exact = [], seeded(gradients, theirs, *inputs)[1]
    for bits in (1, 3, 8):
        ours, _ = layer.pair(bits)
        found = seeded(gradients, ours, *inputs)[1]
        errors.append([relative(grad, wanted) for grad, wanted in zip(found, exact, strict=True)])
    for one, few, many, limit in zip(*errors, limits, strict=True):
        assert many <= limit, (errors, limits)
        if limit < 1e-4:
            assert max(one, few) <= limit, (errors, limits)
        else:
            assert min(one, few) > many and (one > few or not layer.is_unbiased), (errors, limits)


@with_copies
def test_gradients_are_made_from_the_copies(layer):
    """The dequantized values of the copies, saved unchanged, give the same gradients."""
    for dtype in (torch.float32, torch.bfloat16):
        for options in copies_of(layer):
            remembering = Remembering(2)
            ours, _ = layer.pair_with(remembering, dtype=dtype, **options)
            inputs = layer.inputs(dtype=dtype)
            _, found = seeded(gradients, ours, *inputs)
            ours, _ = layer.pair_with(Replaying(remembering.restored()), dtype=dtype, **options)
            _, replayed = seeded(gradients, ours, *inputs)
            for grad, wanted in zip(found, replayed, strict=True):
                assert relative(grad, wanted) <= EPS * torch.finfo(dtype).eps, (dtype, options)


@pytest.mark.parametrize("layer", **ids([layer for layer in EVERY_CLASS if layer.is_unbiased]))
def test_gradients_are_exact_in_expectation(layer):
    """The pooled squares of errors, and the signed sums of errors, over draws at 2 bits and several means of the inputs."""
    options = copies_of(layer)[-1]
    cases = [(layer.kind, 0.0)]
    if layer.kind == "rotated":
        cases.append(("uniform", 1000.0))  # the mean of uniform copies is exact for all inputs
    for kind, offset in cases:
        dtype = torch.float32 if layer.name == "grouped_mm" else torch.float64
        ours, theirs = layer.pair(2, dtype=dtype, quantizer=kind, **options)
        # Numbers that float32 holds, which the quantizer starts from.
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in layer.inputs(offset=offset)]
        exact = seeded(gradients, theirs, *inputs)[1]
        torch.manual_seed(int(offset))
        draws = drawn(lambda ours=ours, inputs=inputs: gradients(ours, *inputs)[1], 32)
        for grads, wanted in zip(draws, exact, strict=True):
            # With draws of 16 bits the smallest fractions of a step are never rounded up.
            least = 1e-5 * float(wanted.abs().max())
            # Entries that share sums over rounded elements are not independent.
            count = min(30, layer.vectors or 30)
            z = pooled_z(grads, wanted, least, independent=count, may_stay=True)
            # The sum of a few squares is not normal.
            assert abs(z) < (5 if count > 12 else 8), (kind, offset, z)
            assert max(map(abs, signed_z(grads, wanted, least))) < 4.5, (kind, offset)


@settings(max_examples=15)
@given(st.data())
@pytest.mark.parametrize("kind", STRATEGIES)
def test_any_layer(kind, data):
    """Values and gradients of exact copies are torch's for arguments, sizes and strides of all kinds, or torch refuses them."""
    layer = data.draw(STRATEGIES[kind]())
    options = {"copies": data.draw(st.sampled_from((1, 2)))} if layer.is_norm else {}
    dtype = torch.float64
    ours, theirs = exact_pair(layer, dtype=dtype, **options)
    inputs = layer.inputs(dtype=dtype, offset=data.draw(st.sampled_from((0.0, 10.0))))
    found, expected = (outcome(gradients, module, *inputs) for module in (ours, theirs))
    if isinstance(expected, type):
        assert found == expected and kind == "pooling", layer  # torch refuses some windows
        return
    (y, grads), (their_y, exact) = found, expected
    assert same(y, their_y) and strides(y) == strides(their_y)
    for grad, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-8)
    assert all(map(torch.equal, ours.buffers(), theirs.buffers()))


def strides(x) -> list[int]:
    """Return the strides of dimensions that have more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


# -- saved tensors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", **ids([layer for layer in ROWS if layer.name != "LinearCrossEntropy"])
)
def test_saved_bytes(device, layer):
    for bits in (1, 3, 8) if layer.has_bits else (None,):
        module, _ = layer.pair(bits, device)
        y, saved = saved_by(module, *needing(layer.inputs(device)))
        found = sum(tensor.nbytes for tensor in saved)
        assert found == layer.expected_bytes(bits, first_result(y)), bits


@every_class
def test_nothing_is_saved_that_no_gradient_needs(device, layer):
    module, theirs = layer.pair(2, device)
    inputs = layer.inputs(device)
    with torch.no_grad():
        assert not bytes_by(fresh(module), *needing(inputs))
    module.requires_grad_(False)
    if layer.is_linear:  # the input's gradient needs the weight alone
        y, saved = saved_by(module, inputs[0].clone().requires_grad_())
        assert not saved and y.requires_grad
    y, saved = seeded(saved_by, fresh(module), *inputs)
    check_values(layer, first_result(y), first_result(seeded(fresh(theirs), *inputs)))
    assert not saved
    if getattr(module, "bias", None) is not None:
        module.bias.requires_grad_()
        y, saved = saved_by(module, *inputs)
        assert not saved
        # torch's own crashes for some layouts if the input's gradient is not asked for.
        needed = needing(inputs)
        expected = torch.autograd.grad(theirs(*needed).sum(), (theirs.bias, needed[0]))[0]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), module.bias)[0], expected)


@every_class
def test_each_input_and_parameter_alone_may_need_a_gradient(layer):
    """The gradient is the one that is computed together with all others, and no more bytes are saved."""
    ours, _ = exact_pair(layer)
    inputs = layer.inputs()
    state = copy.deepcopy(ours.state_dict())
    y, exact = seeded(gradients, ours, *inputs)
    every = [(place, None) for place, x in enumerate(inputs) if x.is_floating_point()]
    every += [(None, name) for name, _ in ours.named_parameters()]
    most = seeded(bytes_by, ours, *needing(inputs))
    for (place, name), wanted in zip(every, exact, strict=True):
        ours.load_state_dict(state)
        for other, parameter in ours.named_parameters():
            parameter.requires_grad_(other == name)
        leaves = [x.clone() for x in inputs]
        leaf = leaves[place].requires_grad_() if name is None else ours.get_parameter(name)
        kept = seeded(bytes_by, ours, *leaves)
        result = first_result(seeded(ours, *leaves))
        assert kept <= most
        grad = torch.autograd.grad(result, leaf, output_gradient(y))[0]
        limit = EPS * torch.finfo(y.dtype).eps if layer.name != "PreActivation" else layer.limit
        assert relative(grad, wanted) <= limit, (place, name)


@every_class
def test_evaluation_mode_is_torchs_own(device, layer):
    if not layer.is_class and layer.name != "PreActivation":
        return
    ours, theirs = layer.pair(1, device)
    inputs = layer.inputs(device)
    (y, grads), (expected, exact) = (gradients(module.eval(), *inputs) for module in (ours, theirs))
    assert bytes_by(ours, *needing(inputs)) <= bytes_by(theirs, *needing(inputs))
    assert same(y, expected)
    for grad, wanted in zip(grads, exact, strict=True):
        torch.testing.assert_close(grad, wanted)


# -- layouts and sizes ----------------------------------------------------------------------------------------


def reversed_strides(x):
    dims = tuple(reversed(range(x.dim())))
    return x.permute(dims).contiguous().permute(dims)


def channels_last(x):
    return x.contiguous(memory_format={4: LAST, 5: LAST_3D}[x.dim()])


STRIDES = {
    "reversed": reversed_strides,
    "sliced": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "channels last": channels_last,
}


@every_class
def test_layouts(device, layer):
    """Strides change no value and no gradient, and results have torch's strides."""
    inputs = layer.inputs(device)
    for name, change in STRIDES.items():
        x = inputs[0]
        if x.dim() < 2 or (name == "channels last" and x.dim() not in (4, 5)):
            continue
        limit = (
            layer.limit if layer.name == "PreActivation" else EPS * torch.finfo(torch.float32).eps
        )
        changed = [change(x), *inputs[1:]]
        check(layer, *exact_pair(layer, device), changed, limit, may_be_refused=True)


@every_class
def test_no_elements(device, layer):
    """The batch is empty, or the last dimension."""
    if "learned mask" in layer.name:  # which torch refuses
        return
    for dim, part in ((0, slice(1)), (-1, slice(-1, None))):
        inputs = [
            x.narrow(dim, 0, 0) if x.shape[part] == layer.shape[part] else x
            for x in layer.inputs(device)
        ]
        check(layer, *layer.pair(2, device), inputs, 0.0, may_be_refused=True)


# -- surroundings ---------------------------------------------------------------------------------------------


@every_class
def test_autocast(device, layer):
    """Outputs and gradients have torch's dtypes; no cast weight is saved."""

    def cast(function, *arguments):
        with torch.autocast(device, torch.bfloat16):
            return function(*arguments)

    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = layer.pair(8, device)
        inputs = layer.inputs(device, dtype)
        found = outcome(cast, gradients, ours, *inputs)
        expected = outcome(cast, gradients, theirs, *inputs)
        if isinstance(expected, type):  # the CPU's autocast leaves two dtypes to bilinear
            assert found == expected
            continue
        (y, grads), (their_y, exact) = found, expected
        assert y.dtype == their_y.dtype
        torch.testing.assert_close(y, their_y, rtol=1e-2, atol=1e-2)
        for grad, wanted in zip(grads, exact, strict=True):
            assert grad.dtype == wanted.dtype and relative(grad, wanted) < max(0.06, layer.limit)
        if dtype == torch.float32:
            kept = cast(bytes_by, fresh(ours), *needing(inputs))
            assert kept <= layer.expected_bytes(8, y)


@every_class
def test_checkpoints(layer):
    """torch's checkpoints give the same gradients to the bit, and fewbit's, which rounds the region's inputs, similar ones."""
    inputs, found = layer.inputs(), []
    if layer.name.startswith(("Embedding", "embedding")):  # a region needs a differentiable input
        return
    module, _ = layer.pair(8)
    for region in (
        module,
        lambda *x: checkpoint(module, *x, use_reentrant=False),
        lambda *x: checkpoint(module, *x, use_reentrant=True),
        lambda *x: fewbit.checkpoint(module, *x, bits=8),
    ):
        leaves = needing(inputs)
        y = first_result(seeded(region, *leaves))
        wanted = [leaf for leaf in (*leaves, *module.parameters()) if leaf.requires_grad]
        module.zero_grad()
        y.backward(output_gradient(y))
        found.append([y, *(leaf.grad for leaf in wanted)])
    plain, *same_ones, rounded = found
    if (
        layer.name != "exp"
    ):  # which saves its result in full, because the recomputation may find larger ones
        assert all(same(x, y) for results in same_ones for x, y in zip(results, plain, strict=True))
    if "ropout" not in layer.id:  # rounding draws from the generator before the dropout
        assert same(rounded[0], plain[0])
    assert [grad.shape for grad in rounded] == [grad.shape for grad in plain]


@every_class
def test_tensors_without_memory(layer):
    """With tensors on the device meta as many bytes are saved, and the gradients have the same sizes and strides."""
    # The row's offsets are on the CPU; exp depends on values; there is no state of a generator.
    if layer.name in ("grouped_mm", "exp", "scaled_dot_product_attention, dropout"):
        return

    def run(device):
        module, _ = layer.pair(4, device)
        leaves = needing(layer.inputs(device))
        total = fewbit.saved_bytes(module, *leaves).total
        y = first_result(module(*leaves))
        y.backward(torch.ones_like(y))
        results = [y, *(x.grad for x in (*leaves, *module.parameters()) if x.requires_grad)]
        return total, [(x.shape, x.stride(), x.dtype) for x in results]

    assert run("meta") == run("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    **ids(
        [
            layer
            for layer in (
                *EVERY,
                *ATTENTION,
                *PRODUCTS,
                *LOSSES[:1],
                *EMBEDDINGS[:1],
                PRE_ACTIVATION,
            )
            # Compiled code draws masks of its own, and takes no average over all batches.
            if not re.search("ropout", layer.id) and layer.options.get("momentum", 0.1) is not None
        ]
    ),
)
def test_compiled(device, layer):
    """The whole layer is one graph. Its forward saves the same as in eager mode, and vectors that these are made from."""
    torch.compiler.reset()
    module, theirs = layer.pair(8, device)
    inputs = layer.inputs(device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager_decomp_partition")
    y, grads = gradients(compiled, *inputs)
    expected, exact = gradients(theirs, *inputs)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for grad, wanted in zip(grads, exact, strict=True):
        assert relative(grad, wanted) < layer.limit
    torch.testing.assert_close(list(module.buffers()), list(theirs.buffers()))

    def on_results(*args):
        return module(*(x.clone() if x.requires_grad else x for x in args))

    again = torch.compile(on_results, fullgraph=True, backend="eager")(*needing(inputs))
    torch.testing.assert_close(first_result(again), expected, rtol=1e-4, atol=1e-4)
    # The compiler saves which targets count, and the layers of a block save copies of their own.
    if layer.name in ("CrossEntropyLoss", "PreActivation"):
        return
    kept = bytes_by(compiled, *needing(inputs))
    assert kept <= layer.expected_bytes(8, y) + 4 * layer.vectors + 16 * bool(layer.vectors)


class Unrelated(torch.autograd.Function):
    """Returns a number that is said not to depend on x: the gradient of x is None."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().sum()

    @staticmethod
    def backward(ctx, grad):
        return None


@every_class
def test_later_layers_may_return_no_gradient(layer):
    """The layer then adds nothing to the gradients of its inputs and parameters, as torch's layer does."""
    ours, _ = layer.pair(2)
    inputs = needing(layer.inputs())
    leaves = [x for x in inputs if x.requires_grad]
    y = first_result(seeded(ours, *inputs))
    (Unrelated.apply(y) + sum(x.sum() for x in leaves)).backward()
    assert all(torch.equal(x.grad, torch.ones_like(x)) for x in leaves)
    assert all(weight.grad is None or not weight.grad.any() for weight in ours.parameters())


@every_class
def test_a_graph_is_used_twice_if_it_is_retained(layer):
    ours, _ = layer.pair(2)
    inputs = needing(layer.inputs())
    leaves = [x for x in (*inputs, *ours.parameters()) if x.requires_grad]
    y = first_result(seeded(ours, *inputs))
    grad = torch.ones_like(y)
    first = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(y, leaves, grad)
    assert all(map(same, first, second))
    if bytes_by(ours, *inputs):
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(y, leaves, grad)


@every_class
def test_a_result_may_be_written_to(layer):
    module, _ = layer.pair(8)
    y = first_result(module(*needing(layer.inputs())))
    expected = y.detach() + 1
    assert same(y.add_(1).detach(), expected)
    y.sum().backward()


# -- modules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", **ids([row for row in EVERY_CLASS if hasattr(fewbit.nn, row.name)])
)
def test_modules_are_torchs(layer):
    """They have torch's class, keys and representation. Conversions make them, and copies and pickles behave alike."""
    ours, theirs = layer.pair(2)
    assert not layer.is_class or isinstance(ours, type(theirs))
    if layer.has_copies:
        assert "bits=2" in repr(ours)
    elif layer.is_class:
        assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if layer.is_class:
        converted, before = nn.Sequential(theirs), repr(theirs)
        fewbit.compress_(converted, 2, verbose=False)
        assert isinstance(theirs, type(ours)) and ("bits=" in repr(theirs)) == layer.has_copies
        assert not layer.has_copies or f"bits={theirs.quantizer.mean_bits}" in repr(theirs)
        fewbit.restore_(converted)
        assert type(theirs) is getattr(nn, layer.name) and repr(theirs) == before
    inputs = needing(layer.inputs())
    expected, saved = seeded(saved_by, copy.deepcopy(ours), *inputs)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        y, kept = seeded(saved_by, again, *inputs)
        assert type(again) is type(ours) and repr(again) == repr(ours)
        assert all(map(same, all_results(y)[:1], all_results(expected)[:1]))
        assert [x.nbytes for x in kept] == [x.nbytes for x in saved]
