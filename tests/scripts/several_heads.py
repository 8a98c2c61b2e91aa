"""A network with three outputs."""

import torch


class Heads(torch.nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.body = torch.nn.Linear(6, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, size) for size in sizes)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return tuple(head(hidden) for head in self.heads)
