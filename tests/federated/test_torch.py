"""A torch client and an onnxtrain client in one federation: same names, same numbers."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

import torch
from federations import arrays, federate, images, same
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, FedProx

from exporting import export
from onnxtrain import artifacts
from onnxtrain.federated import client_app
from onnxtrain.onnxblock.optim import SGD

CONFIG = {"learning-rate": 0.05, "local-epochs": 2, "batch-size": 40}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.bn = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(4 * 36, 3)

    def forward(self, image):
        return self.fc(torch.flatten(torch.relu(self.bn(self.conv(image))), 1))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("net")
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():  # the exporter stores equal tensors once, under one of their names
        for tensor in net.bn.state_dict().values():
            if tensor.dtype == torch.float32:
                tensor.uniform_(0.5, 1.5)
    model = export(net.train(), torch.zeros(2, 1, 6, 6), "torchscript")
    artifacts.generate_artifacts(
        model, loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=SGD(momentum=0.9), artifact_directory=folder / "artifacts",
        additional_output_names=["y"], nominal_checkpoint=True, proximal=True,
    )  # fmt: skip
    return folder / "artifacts"


def torch_client() -> ClientApp:
    """As Flower's own examples for torch are written."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        net, config = Net(), message.content["config"]
        net.load_state_dict({**net.state_dict(), **message.content["arrays"].to_torch_state_dict()})
        first = [p.detach().clone() for p in net.parameters()]
        optimizer = torch.optim.SGD(net.parameters(), lr=config["learning-rate"], momentum=0.9)
        x, y = (torch.tensor(a) for a in images(context.node_config["partition-id"]))
        net.train()
        for _ in range(config["local-epochs"]):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            pull = sum(((p - q) ** 2).sum() for p, q in zip(net.parameters(), first, strict=True))
            (loss + config.get("proximal-mu", 0.0) / 2 * pull).backward()
            optimizer.step()
        numbers = {"num-examples": len(y), "train_loss": float(loss.detach()), "torch": 1.0}
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(numbers)}
        content["onnxtrain"] = ConfigRecord({"reply": config["onnxtrain-reply"]})
        return Message(RecordDict(content), reply_to=message)

    return app


@pytest.mark.parametrize(
    "strategy", [FedAvg, FedAvgM, lambda **k: FedProx(proximal_mu=0.5, **k)],
    ids=["FedAvg", "FedAvgM", "FedProx"],
)  # fmt: skip
def test_they_learn_together_and_count_the_same(strategy, exported) -> None:
    ours = client_app(exported, lambda c: images(c.node_config["partition-id"]),
                      fit_options={"shuffle": False})  # fmt: skip
    theirs = torch_client()

    def mixed(message, context):
        return (theirs if context.node_config["partition-id"] == 1 else ours)(message, context)

    made = {
        name: federate(exported, client, strategy(fraction_evaluate=0.0), rounds=3, config=CONFIG)
        for name, client in (("ours", ours), ("theirs", theirs), ("mixed", mixed))
    }
    for result in made.values():
        metrics = result.train_metrics_clientapp
        assert [m["left-out"] for m in metrics.values()] == [0, 0, 0]
        assert metrics[3]["train_loss"] < metrics[1]["train_loss"]
    assert "torch" in made["theirs"].train_metrics_clientapp[1]
    assert "torch" not in made["mixed"].train_metrics_clientapp[1]
    names = {"conv.weight", "conv.bias", "bn.weight", "bn.bias", "bn.running_mean",
             "bn.running_var", "fc.weight", "fc.bias"}  # fmt: skip
    weights = {name: arrays(result) for name, result in made.items()}
    assert all(set(found) == names for found in weights.values())
    for name in names:
        for other in ("theirs", "mixed"):
            np.testing.assert_allclose(
                weights["ours"][name], weights[other][name], rtol=2e-3, atol=2e-4, err_msg=name
            )
    assert not same(weights["ours"], weights["theirs"])
