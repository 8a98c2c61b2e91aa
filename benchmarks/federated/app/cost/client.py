"""Two clients that do the same: one with onnxtrain, one with torch, chosen by the run."""

import time
from functools import cache

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@cache
def part(folder, client, clients, samples):
    """The digits of a client, which are read once."""
    x, y = (np.load(f"{folder}/{name}.npy", mmap_mode="r") for name in ("x", "y"))
    own = np.arange(client, len(y), clients)[: samples or None]
    return np.ascontiguousarray(x[own]), np.ascontiguousarray(y[own])


def data(context):
    node, run = context.node_config, context.run_config
    return part(run["folder"], node["partition-id"], node["num-partitions"], run["samples"])


@cache
def onnxtrain_client(folder):
    from onnxtrain.federated import client_app

    return client_app(f"{folder}/artifacts", data)


@app.train()
def train(message, context):
    """Train with what the run asks for."""
    if context.run_config["client"] == "onnxtrain":
        return onnxtrain_client(context.run_config["folder"])(message, context)
    return torch_train(message, context)


def torch_train(message, context):
    """As an expert would write it: tensors are made once, batches are slices of a permutation."""
    import torch
    from torch.nn import functional

    config, (x, y) = message.content["config"], tensors(context)
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=config["learning-rate"], momentum=0.9)
    began, total = time.perf_counter(), 0.0
    net.train()
    for _ in range(config["local-epochs"]):
        total = 0.0
        for batch in torch.randperm(len(y)).split(config["batch-size"]):
            optimizer.zero_grad(set_to_none=True)
            loss = functional.cross_entropy(net(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            total += loss.detach().item() * len(batch)
    seconds = time.perf_counter() - began
    numbers = {"num-examples": len(y), "train_loss": total / len(y), "train_seconds": seconds}
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(numbers)}
    content["onnxtrain"] = ConfigRecord({"reply": message.content["config"]["onnxtrain-reply"]})
    return Message(RecordDict(content), reply_to=message)


def tensors(context):
    import torch

    x, y = data(context)
    return torch.from_numpy(x), torch.from_numpy(y)


@cache
def network():
    import os

    import torch
    from torch import nn

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
            self.fc1, self.fc2, self.fc3 = (
                nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10))  # fmt: skip

        def forward(self, x):
            x = nn.functional.max_pool2d(nn.functional.relu(self.conv1(x)), 2)
            x = nn.functional.max_pool2d(nn.functional.relu(self.conv2(x)), 2)
            x = nn.functional.relu(self.fc1(torch.flatten(x, 1)))
            return self.fc3(nn.functional.relu(self.fc2(x)))

    return Net()
