"""`onnxtrain.compat`: scripts written for `onnxruntime.training` find onnxtrain instead."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain.compat import _RENAMED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = Path(
    os.environ.get("ONNXTRAIN_UPSTREAM_PYTHON", ROOT / ".venv-upstream" / "bin" / "python")
)


INSTALL = "import onnxtrain.compat; onnxtrain.compat.install(); "


def python(*arguments: object, cwd: Path, interpreter: object = sys.executable):
    return subprocess.run(
        [str(interpreter), *map(str, arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


SAME = """
import onnxruntime.training.onnxblock as onnxblock
import onnxruntime.training.artifacts
import onnxruntime.training.onnxblock.loss
import onnxruntime.training.onnxblock.optim as optim
from onnxruntime import training
from onnxruntime.training import api, artifacts
from onnxruntime.training.artifacts import LossType, OptimType, generate_artifacts
from onnxruntime.training.onnxblock import blocks, Block
from onnxruntime.training.onnxblock.blocks import Add
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxruntime.training.api.checkpoint_state import CheckpointState as again
from onnxruntime.training.api.lr_scheduler import LinearLRScheduler as scheduler
from onnxruntime.training.api.module import Module as module

import onnxtrain.api
import onnxtrain.artifacts
import onnxtrain.onnxblock

pairs = [
    (onnxblock, onnxtrain.onnxblock), (artifacts, onnxtrain.artifacts), (api, onnxtrain.api),
    (optim, onnxtrain.onnxblock.optim), (blocks, onnxtrain.onnxblock.blocks),
    (onnxruntime.training.onnxblock.loss, onnxtrain.onnxblock.loss),
    (training.artifacts, onnxtrain.artifacts), (Block, onnxtrain.onnxblock.Block),
    (Add, onnxtrain.onnxblock.blocks.Add), (LossType, onnxtrain.artifacts.LossType),
    (CheckpointState, onnxtrain.api.CheckpointState), (again, onnxtrain.api.CheckpointState),
    (LinearLRScheduler, onnxtrain.api.LinearLRScheduler), (scheduler, LinearLRScheduler),
    (Module, onnxtrain.api.Module), (module, Module), (Optimizer, onnxtrain.api.Optimizer),
]
assert all(theirs is ours for theirs, ours in pairs)
assert onnxblock.__name__ == onnxblock.__spec__.name == "onnxtrain.onnxblock"
assert training.__all__ and not training.is_ortmodule_available()
assert onnxruntime.InferenceSession  # the runtime itself is the stock one
print("same")
"""


@pytest.mark.parametrize("way", ["install", "run"])
def test_upstreams_names_are_our_objects(way: str, tmp_path: Path) -> None:
    if way == "install":
        result = python(script(tmp_path, f"{INSTALL}\n{SAME}"), cwd=tmp_path)
    else:
        result = python("-m", "onnxtrain.compat", script(tmp_path, SAME), cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "same\n"), result.stderr


def test_every_renamed_submodule_is_found(tmp_path: Path) -> None:
    lines = [f"import onnxruntime.training.{name}" for name in _RENAMED]
    result = python("-m", "onnxtrain.compat", script(tmp_path, "\n".join(lines)), cwd=tmp_path)
    assert lines and result.returncode == 0, result.stderr


@pytest.mark.parametrize("module", ["onnxtrain", "onnxtrain.compat", "onnxtrain.compat.__main__"])
def test_an_import_has_no_effect(module: str, tmp_path: Path) -> None:
    result = python("-c", f"import {module}, onnxruntime.training", cwd=tmp_path)
    assert result.returncode == 1 and "No module named 'onnxruntime.training'" in result.stderr


def test_a_device_needs_no_onnx_for_the_api(tmp_path: Path) -> None:
    code = (
        f"{INSTALL}import sys, onnxruntime.training.api as api; api.Module; "
        "print([m for m in ('onnx', 'google.protobuf', 'onnxtrain.artifacts') if m in sys.modules])"
    )
    assert python("-c", code, cwd=tmp_path).stdout == "[]\n"


def test_without_onnx_the_offline_half_says_what_to_install(tmp_path: Path) -> None:
    blocked = f"{INSTALL}import sys; sys.modules['onnx'] = None; "
    result = python("-c", f"{blocked} from onnxruntime.training import artifacts", cwd=tmp_path)
    assert "pip install 'onnxtrain[offline]'" in result.stderr.splitlines()[-1]


NOT_PROVIDED = {
    "from onnxruntime.training import ORTModule": "'ORTModule': it runs torch modules",
    "from onnxruntime.training.ortmodule import ORTModule": "'ortmodule': it runs torch modules",
    "import onnxruntime.training.optim": "onnxblock.optim",
    "from onnxruntime.training import amp": "'amp'",
    "import onnxruntime.training as t; t.amp": "'amp'",
    "import onnxruntime.training.experimental": "onnxtrain.gradient",
    "import onnxruntime.training.onnxblock._graph_utils": "'onnxblock._graph_utils'",
}


@pytest.mark.parametrize("statement", NOT_PROVIDED)
def test_what_is_not_provided_is_said(statement: str, tmp_path: Path) -> None:
    result = python("-m", "onnxtrain.compat", script(tmp_path, statement), cwd=tmp_path)
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and NOT_PROVIDED[statement] in last
    assert "onnxtrain stands in for onnxruntime.training" in last


def test_scripts_that_try_ortmodule_first_go_on(tmp_path: Path) -> None:
    text = (
        "try:\n    from onnxruntime.training.ortmodule import ORTModule\n"
        "except ImportError:\n    print('without')\n"
    )
    result = python("-m", "onnxtrain.compat", script(tmp_path, text), cwd=tmp_path)
    assert result.stdout == "without\n"


# ---- python -m onnxtrain.compat ------------------------------------------------------------------

AS_PYTHON_DOES = """
import os, pickle, sys
import beside

class Mine:
    pass

assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
assert vars(sys.modules["__main__"])["Mine"] is Mine
print(__name__, os.path.basename(__file__), os.path.isabs(__file__), sys.argv[1:])
print(os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("runner", [(), ("-m", "onnxtrain.compat")], ids=["python", "compat"])
def test_a_script_is_run_as_python_does(runner: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    script(folder, "", "beside.py")
    path = script(folder, AS_PYTHON_DOES).relative_to(tmp_path)
    result = python(*runner, path, "3", "-x", "--help", cwd=tmp_path)
    expected = "__main__ script.py True ['3', '-x', '--help']\nTrue\n"
    assert (result.returncode, result.stdout) == (3, expected), result.stderr


@pytest.mark.parametrize("runner", [(), ("-m", "onnxtrain.compat")], ids=["python", "compat"])
def test_a_module_is_run_as_python_does(runner: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    script(folder, "", "__init__.py")
    script(folder, "")
    script(folder, "name = 'beside'", "beside.py")
    script(folder, "import sys; from . import beside; print(__name__, beside.name, sys.argv[1:])",
           "main.py")  # fmt: skip
    result = python(*runner, "-m", "package.main", "-x", cwd=tmp_path)
    assert result.stdout == "__main__ beside ['-x']\n", result.stderr


@pytest.mark.parametrize("way", ["script", "module"])
def test_a_traceback_begins_in_the_script(way: str, tmp_path: Path) -> None:
    path = script(tmp_path, "def fail():\n    raise ValueError('mine')\n\nfail()\n", "broken.py")
    given = [path] if way == "script" else ["-m", "broken"]
    result = python("-m", "onnxtrain.compat", *given, cwd=tmp_path)
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: mine"
    files = [line.split('"')[1] for line in lines if line.startswith("  File")]
    assert files == [str(path)] * 2


def test_a_syntax_error_is_shown_as_one(tmp_path: Path) -> None:
    result = python("-m", "onnxtrain.compat", script(tmp_path, "def\n"), cwd=tmp_path)
    lines = result.stderr.splitlines()
    assert lines[0].endswith('script.py", line 1') and lines[-1].startswith("SyntaxError")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["missing.py"], "cannot open the script"),
        (["-m", "missing_module"], "No module named missing_module"),
        (["-m"], "usage:"),
        (["-z"], "unknown option '-z'"),
    ],
)
def test_nothing_to_run(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = python("-m", "onnxtrain.compat", *arguments, cwd=tmp_path)
    assert result.returncode and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.skipif(
    not UPSTREAM.exists(), reason=f"no environment with onnxruntime-training-cpu at {UPSTREAM}"
)
@pytest.mark.parametrize("before", ["", "import onnxruntime.training.artifacts", "import torch"])
def test_upstreams_own_package_is_hidden_with_a_warning(before: str, tmp_path: Path) -> None:
    """Also the test with numpy 1, which that environment has."""
    code = (
        f"{before}\nimport numpy, onnxtrain.api\n{INSTALL}\n"
        "from onnxruntime.training.api import Module\n"
        "print(Module is onnxtrain.api.Module, numpy.__version__[:2])"
    )
    result = python("-c", code, cwd=tmp_path, interpreter=UPSTREAM)
    assert result.stdout.splitlines()[-1:] == ["True 1."], result.stderr
    assert "onnxtrain.compat hides it" in result.stderr
