"""The code of docs/training.md runs."""

import re
import shutil
from pathlib import Path

import pytest
from small_runs import GOLDEN

from onnxtrain import TrainingSession

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.slow
def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capfd) -> None:
    pytest.importorskip(
        "matplotlib", reason="the picture is drawn with matplotlib, which is in an extra"
    )
    shutil.copytree(GOLDEN / "mlp", tmp_path / "artifacts")
    monkeypatch.chdir(tmp_path)
    TrainingSession("artifacts").export_model_for_inferencing("model.onnx", ["output"])
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)
    shown = capfd.readouterr()
    assert "epoch 5/5  loss " in shown.err
    assert "the first in sample 123 of the data" in shown.out
    assert (tmp_path / "training.png").stat().st_size > 1000
    assert (tmp_path / "run").exists()
