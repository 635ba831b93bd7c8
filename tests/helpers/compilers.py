"""Helpers for tests of compiled code: Inductor's passes without code generation, and equal rounding in both modes."""

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from fewbit.convert.function_mode import FunctionMode
from fewbit.runtime.ops import library
from fewbit.runtime.saved.forward import Saving
from fewbit.runtime.saved.sharing import SharedCopies

# Passes and lowerings are imported late, because their modules warn of torch's own deprecations on import.


class Draws:
    """The seed that rounds all copies. A graph has the seed that was set when the graph was traced."""

    seed = 12345


def draw_alike(monkeypatch) -> Draws:
    """Make eager mode save the copies that compiled code saves, so that gradients differ only by floating-point rounding.

    One seed rounds all copies, no layer reuses the copy of another layer, and none is masked. The
    cross-entropy that a model computes is torch's, as in compiled code. Copies still differ if torch's eager operation
    returns other strides than the traced one.
    """
    draws = Draws()

    def seed(saving, x, *_):
        return new_seed(x)

    def new_seed(x):
        return torch.full((1,), draws.seed, dtype=torch.int64, device=x.device)

    monkeypatch.delitem(FunctionMode.TABLE, torch.nn.functional.cross_entropy)
    monkeypatch.setattr(library, "new_seed", new_seed)
    monkeypatch.setattr(SharedCopies, "get", lambda *_: None)
    monkeypatch.setattr(SharedCopies, "get_mask", lambda *_: None)
    monkeypatch.setattr(Saving, "seed", seed)
    monkeypatch.setattr(Saving, "seed_of", seed)
    return draws


def inductor_passes(graph, inputs):
    """Run Inductor's decompositions and passes and then the graph op by op, as a backend for torch.compile.

    Ops get tensors with the strides that are left after Inductor has removed operations without effect, as in Inductor's own
    code, which may also restore the traced strides. Every result of an op of fewbit must have its traced layout, because
    Inductor's code relies on that when it writes to memory.
    """
    import torch._inductor.lowering  # which decompositions look into  # noqa: F401

    make = aot_autograd(
        fw_compiler=_compile,
        bw_compiler=_compile,
        inference_compiler=_compile,
        partition_fn=_partition,
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    return make(graph, inputs)


def _settings():
    # Random numbers come from torch's own generator, as in eager mode.
    return config.patch(fallback_random=True)


def _fake_mode():
    return V.set_fake_mode(torch._guards.TracingContext.get().fake_mode)


def _compile(graph, inputs):
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    with _fake_mode(), _settings():
        post_grad_passes(graph, False)
    graph.recompile()
    return make_boxed_func(_AsTraced(graph).run)


class _AsTraced(torch.fx.Interpreter):
    def run_node(self, node):
        result = super().run_node(node)
        if getattr(node.target, "namespace", None) == "fewbit":
            given = filter(_is_tensor, tree_leaves(self.map_nodes_to_values(node.args, node)))
            taken = {tensor.untyped_storage().data_ptr() for tensor in given}
            traced = tree_leaves(node.meta["val"])
            for ours, fake in zip(tree_leaves(result), traced, strict=True):
                assert _metadata(ours) == _metadata(fake), (node.target, ours, fake)
                storage = ours.untyped_storage()
                assert storage.nbytes() >= ours.numel() * ours.element_size()
                assert not ours.numel() or storage.data_ptr() not in taken, node
                taken.add(storage.data_ptr())
        return result


def _is_tensor(x):
    return isinstance(x, torch.Tensor)


def _metadata(x):
    """Return a tensor's metadata, with symbolic numbers replaced by those that they were traced with."""
    numbers = *x.shape, *x.stride(), x.storage_offset()
    return [n.node.hint if isinstance(n, torch.SymInt) else n for n in numbers], x.dtype


def _partition(graph, joint_inputs, **keywords):
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    with _fake_mode(), _settings():
        joint_graph_passes(graph)
    return min_cut_rematerialization_partition(graph, joint_inputs, compiler="inductor", **keywords)
