"""A client needs the device half and Flower; neither onnx nor torch."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="`make test-flower` sets up an environment with Flower")

from onnxtrain import federated as flower

HERE = Path(__file__).parent
# What is not to be imported is not there at all.
BLOCK = """
import sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nowhere())
sys.path.insert(0, {here!r})
"""
FEDERATION = """
from federations import GOLDEN, federate, images_of_client
from onnxtrain.federated import client_app, from_arrays, to_arrays, pack
app = client_app(GOLDEN / "cnn", images_of_client, images_of_client, metrics=["accuracy"],
                 state="kept", keep_optimizer=True, export="m.onnx", outputs=["output"])
result = federate(GOLDEN / "cnn", app, rounds=2, which="no-batch-norm", state="server",
                  export="all.onnx", outputs=["output"])
assert result.train_metrics_clientapp[2]["clients"] == 3
print("learned")
"""


def run(code: str, blocked: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    program = BLOCK.format(blocked=blocked, here=str(HERE)) + code
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )


def test_a_federation_without_onnx_and_torch(tmp_path) -> None:
    blocked = ("onnx", "onnx_ir", "torch", "ray", "onnxscript", "matplotlib", "sklearn", "pandas")
    done = run(FEDERATION, blocked, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("learned\n")
    assert (tmp_path / "all.onnx").exists()


def test_without_flower_it_is_said_what_to_install(tmp_path) -> None:
    code = """
import onnxtrain.federated
for name in onnxtrain.federated.__all__:
    try:
        getattr(onnxtrain.federated, name)
    except ImportError as error:
        assert "pip install 'onnxtrain[flower]'" in str(error), error
        print(name)
"""
    done = run(code, ("flwr",), tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"client_app", "server_app", "to_arrays", "from_arrays"} <= set(done.stdout.split())


def test_the_names_of_the_package() -> None:
    assert dir(flower) == [
        "Bundle", "Checks", "Client", "Compression", "Guarded", "LocalGrid", "RoundLimits",
        "client_app", "from_arrays", "open_artifacts", "pack", "run_locally", "server_app",
        "to_arrays",
    ]  # fmt: skip
    assert all(callable(getattr(flower, name)) for name in dir(flower))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        flower.nothing  # noqa: B018
