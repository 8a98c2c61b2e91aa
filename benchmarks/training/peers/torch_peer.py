"""torch, eager or compiled, with what its tuning guide recommends."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

import nets
from plan import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Workload


def open_step(workload: Workload, folder: str, options: dict[str, Any], threads: int):
    torch.set_num_threads(threads)
    net = _network(workload, folder)
    if options.get("channels_last"):
        net = net.to(memory_format=torch.channels_last)
    loss_of = _head_only(net, options) if workload.trains == "head" else _all(net, options)
    trained = net.head if workload.trains == "head" else net
    optimizer = torch.optim.AdamW(
        trained.parameters(),
        LEARNING_RATE,
        BETAS,
        EPSILON,
        WEIGHT_DECAY,
        **{options["optimizer"]: True},
    )

    def step(x, labels) -> float:
        x = torch.from_numpy(x)
        if options.get("channels_last"):
            x = x.to(memory_format=torch.channels_last)
        loss = loss_of(x, torch.from_numpy(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _network(workload: Workload, folder: str) -> nets.Split:
    """Make the network from its saved weights, without drawing random ones first."""
    with torch.device("meta"):
        net = nets.build(workload.net, dict(workload.options))
    net.load_state_dict(torch.load(f"{folder}/weights.pt", weights_only=True), assign=True)
    for module in net.modules():
        if isinstance(module, nets.Embeddings):  # what is not saved has no values yet
            module.index = torch.arange(module.places.num_embeddings)
    for parameter in net.parameters():
        parameter.requires_grad_()
    return net.train()


def _all(net: nets.Split, options: dict[str, Any]):
    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), labels)

    def loss_in_bfloat16(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(x, labels)

    chosen = loss_in_bfloat16 if options.get("autocast") else loss_of
    return torch.compile(chosen) if options.get("compile") else chosen


def _head_only(net: nets.Split, options: dict[str, Any]):
    """The body in inference mode, and nothing recorded of it."""
    body = net.body.eval().requires_grad_(False)
    if options.get("fold"):
        from torch.fx.experimental.optimization import fuse

        body = fuse(body)
    if options.get("compile"):
        if options.get("freeze"):
            from torch._inductor import config

            config.freezing = True
        body = torch.compile(body)

    def loss_of(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = body(x)
        return F.cross_entropy(net.head(features), labels)

    return loss_of
