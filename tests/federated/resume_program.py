"""A federation with a server that can be killed: python resume_program.py folder round."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from federations import FAST, GOLDEN, of_client
from flwr.serverapp.strategy import FedAdam

from onnxtrain.federated import client_app, run_locally, server_app


def main(folder: str, kill_at: int) -> None:
    asked: list[int] = []
    app = client_app(GOLDEN / "mlp", of_client, state=Path(folder) / "clients", keep_optimizer=True)

    def client(message, context):
        number = next(iter(message.content.config_records.values()))["server-round"]
        if number == kill_at and context.node_config["partition-id"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number not in asked:
            asked.append(number)
        return app(message, context)

    def finish(result, session):
        digest = hashlib.sha256(session.to_buffer().numpy().tobytes()).hexdigest()
        print(json.dumps({"weights": digest, "asked": asked,
                          "rounds": sorted(result.train_metrics_clientapp)}))  # fmt: skip

    server = server_app(
        GOLDEN / "mlp", FedAdam(eta=0.05, fraction_evaluate=0.0), num_rounds=4, config=FAST,
        state=Path(folder) / "server", finish=finish,
    )  # fmt: skip
    run_locally(server, client, 3)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
