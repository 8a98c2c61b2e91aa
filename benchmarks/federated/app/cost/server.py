"""The server is the same for both clients."""

import json
from pathlib import Path

from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from onnxtrain.federated import server_app

app = ServerApp()


@app.main()
def main(grid, context):
    def finish(result, session):
        rounds = {n: dict(m) for n, m in result.train_metrics_clientapp.items()}
        Path(context.run_config["output"]).write_text(json.dumps(rounds))

    folder = context.run_config["folder"]
    strategy = FedAvg(fraction_evaluate=0.0)
    server_app(f"{folder}/artifacts", strategy, finish=finish)(grid, context)
