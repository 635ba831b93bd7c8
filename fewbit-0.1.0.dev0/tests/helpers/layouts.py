"""Layouts in which tensors pass through a model."""

import torch
from torch import nn


def _padded(y):
    return torch.nested.to_padded_tensor(2 * y, 0.0).flatten(0, 1)


LAYOUTS = {  # {name: (function to the layout, function back, True if gradients can be measured)}
    "CSR": (lambda h: h.to_sparse_csr(), lambda y: y.to_dense(), False),
    "COO": (lambda h: h.to_sparse(), lambda y: y.to_dense(), True),
    "mkldnn": (lambda h: h.to_mkldnn(), lambda y: y.to_dense(), False),
    "nested": (lambda h: torch.nested.as_nested_tensor([h[:3], h[3:]]), _padded, False),
    "negative": (
        lambda h: (torch.complex(h, h).conj() * torch.complex(h, h)).real,
        lambda y: y,
        True,
    ),
    "sparse gradient": (
        lambda h: torch.gather(h, 1, torch.arange(64).expand(8, 64), sparse_grad=True),
        lambda y: y,
        False,
    ),
}


class InLayout(nn.Module):
    """A model whose first layer's result has a layout: between two layers if is_inside, else as the model's result."""

    def __init__(self, name: str, is_inside: bool):
        super().__init__()
        self.there, self.back, _ = LAYOUTS[name]
        self.is_inside = is_inside
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = self.there(self.a(x))
        return self.b(self.back(h)) if self.is_inside else h

    def loss(self, x):
        """Return the loss, of the model's result in a dense layout."""
        y = self(x)
        return (y if self.is_inside else self.back(y)).square().sum()
