# ruff: noqa: D103
"""Go on in Python with what JavaScript saved; prints what came of it as JSON.

`continue.py steps FOLDER CHECKPOINT EXPORTED` takes the steps from the tenth on, of the inputs
that `golden/make.py` defines. `continue.py fit FOLDER CHECKPOINT SAVED` goes on with a run of `fit`
until a step, and saves it. `continue.py leg FOLDER CHECKPOINT SAVED` takes the steps from `start`
to `stop`, which standard input names, and saves what came of them.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from onnxtrain.api import CheckpointState, TrainingSession
from onnxtrain.device.loop import SaveCheckpoint, fit


def batch(step: int, expected: dict) -> list:
    shape, words, classes = expected["shape"], expected["words"], expected["classes"]
    drawn = (np.arange(int(np.prod(shape))) * 7919 + step * 104729) % 1009
    x = drawn % words if words else (drawn / 1009 * 2 - 1).astype(np.float32)
    return [x.reshape(shape), (np.arange(shape[0]) * 5 + step * 3) % classes]


def steps(folder: Path, checkpoint: Path, exported: Path) -> dict:
    expected = json.loads((folder / "expected.json").read_text())
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    x, labels = batch(20, expected)
    own = session.export_model_for_inferencing(None, ["y"])
    model = onnxruntime.InferenceSession(exported.read_bytes())
    made = model.run(None, {expected["inputs"][0]: x})[0]
    evaluated = session.eval_step(x, labels)[1]
    return {
        "same export": own == exported.read_bytes(),
        "metadata": model.get_modelmeta().custom_metadata_map,
        "difference": float(np.abs(made - evaluated).max()),
        "same bytes": CheckpointState.load_checkpoint(checkpoint).to_bytes(True)
        == checkpoint.read_bytes(),
        "losses": [float(session.step(*batch(step, expected))[0]) for step in range(10, 20)],
    }


def leg(folder: Path, checkpoint: Path, saved: Path) -> dict:
    record = json.loads(sys.stdin.read())
    expected = json.loads((folder / "expected.json").read_text())
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)
    made = [session.step(*batch(step, expected))[0] for step in range(*record)]
    session.save_checkpoint(saved)
    return {"losses": [float(loss) for loss in made]}


def go_on(folder: Path, checkpoint: Path, saved: Path) -> dict:
    record = json.loads(sys.stdin.read())
    shape = record.get("shape", [8])
    arrays = np.array(record["input"], np.float32).reshape(-1, *shape), np.array(record["labels"])
    session = TrainingSession.from_folder(folder, checkpoint=checkpoint)

    class Stop:
        def on_step_end(self, run: object) -> None:
            if run.step == record["stop"]:
                run.stop()

    history = fit(session, arrays, record["epochs"], batch_size=record["batchSize"], progress=False,
                  schedule="linear", resume=True,
                  callbacks=[Stop(), SaveCheckpoint(saved)])  # fmt: skip
    return {"losses": history.losses}


if __name__ == "__main__":
    actions = {"steps": steps, "fit": go_on, "leg": leg}
    print(json.dumps(actions[sys.argv[1]](*map(Path, sys.argv[2:]))))
