"""Write the artifacts of the two federated apps: run it after a change of the network.

It needs onnx; the apps do not.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from network import write_artifacts

from onnxtrain.federated import pack


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_artifacts(folder, proximal=True)
        for app in ("simulation", "deployment"):
            sizes = pack(folder, HERE / app / "digits" / "artifacts.json")
            print(app, sizes)


if __name__ == "__main__":
    main()
