"""The client: five lines, and where its data are."""

from pathlib import Path

from onnxtrain.federated import client_app

from .data import train_and_test


def own_data(context):
    """The digits of this client."""
    node = context.node_config
    return train_and_test(
        node["partition-id"], node["num-partitions"], context.run_config["spread"]
    )


app = client_app(
    Path(__file__).parent / "artifacts.json",
    data=lambda context: own_data(context)[0],
    evaluate=lambda context: own_data(context)[1],
    metrics=["accuracy"],
)
