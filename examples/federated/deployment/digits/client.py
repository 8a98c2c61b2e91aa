"""The client of a device: its digits, and a folder for what stays with it."""

from pathlib import Path

from onnxtrain.federated import client_app

from .data import train_and_test


def own_data(context):
    """The digits of this device, which its own configuration tells."""
    node = context.node_config
    return train_and_test(int(node["partition-id"]), int(node["num-partitions"]), "iid")


app = client_app(
    Path(__file__).parent / "artifacts.json",
    data=lambda context: own_data(context)[0],
    evaluate=lambda context: own_data(context)[1],
    metrics=["accuracy"],
    export="digits.onnx",  # in the folder that the node's configuration names: state-dir
    outputs=["scores"],
)
