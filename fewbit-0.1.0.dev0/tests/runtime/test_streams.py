"""CUDA streams and captures, with stand-ins for the device: a machine without a GPU runs these tests."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fewbit
from fewbit.runtime.format import fingerprint
from fewbit.runtime.interop import cuda_streams
from fewbit.runtime.interop.cuda_streams import AsyncHostCopy
from fewbit.runtime.saved import cache


class Branches(nn.Module):
    """Two linear layers of the same input, each after a call of `before`."""

    def __init__(self, before):
        super().__init__()
        self.first, self.second, self.before = nn.Linear(64, 8), nn.Linear(64, 8), before

    def forward(self, x):
        self.before(0)
        y = self.first(x)
        self.before(1)
        return y + self.second(x)


@pytest.mark.parametrize("streams", [(7, 7), (7, 8)])
def test_layers_share_a_copy_only_in_one_stream(monkeypatch, streams):
    current = [None]
    for module in (cache, fingerprint):
        monkeypatch.setattr(module, "stream_of", lambda x: current[0])
    model = Branches(lambda branch: current.__setitem__(0, streams[branch]))
    fewbit.compress_(model, bits=2, verbose=False)
    x = torch.randn(32, 64)
    saved = {}

    def pack(tensor):
        if tensor.dtype == torch.int32:
            saved[tensor.data_ptr()] = (
                tensor  # kept alive, so that no other tensor gets the address
            )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    assert len(saved) == len(set(streams))
    assert sum(tensor.nbytes for tensor in saved.values()) == len(set(streams)) * 32 * 64 * 2 // 8
    y.sum().backward()
    assert torch.equal(model.first.weight.grad, model.second.weight.grad) == (
        streams[0] == streams[1]
    )


@pytest.mark.parametrize("streams", [(7, 7), (7, 8)])
def test_a_mask_is_found_only_in_its_stream(monkeypatch, streams):
    current = [streams[0]]
    for module in (cache, fingerprint):
        monkeypatch.setattr(module, "stream_of", lambda x: current[0])
    found = cache.SavedTensorCache(SimpleNamespace(entries=lambda entries: entries))
    found.begin()
    y, mask = torch.ones(40), object()
    found.put_mask(fingerprint.Content(y), mask, is_in_place=False)
    current[0] = streams[1]
    assert (found.get_mask(fingerprint.Content(y)) is mask) == (streams[0] == streams[1])


def test_a_capture_does_not_query_events(monkeypatch):
    """CUDA ends a capture with an error if an event is queried during it."""
    state = SimpleNamespace(is_capturing=False, is_done=False)

    def query():
        assert not state.is_capturing
        return state.is_done

    event = SimpleNamespace(query=query, synchronize=lambda: None)
    monkeypatch.setattr(cuda_streams, "_start", lambda tensors: (torch.cat(tensors), event))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.is_capturing)
    numbers = torch.arange(3.0)
    copy = AsyncHostCopy([numbers])
    assert not copy.is_there()
    state.is_done = state.is_capturing = True
    assert not copy.is_there()
    state.is_capturing = False
    assert copy.is_there() and copy.values() == {id(numbers): [0.0, 1.0, 2.0]}
