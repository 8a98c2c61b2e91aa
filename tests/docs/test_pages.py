"""The code of README and documents runs, and their links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain import moved
from onnxtrain.cli.demo.network import network
from onnxtrain.device.loop import old_keywords

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Pages whose code is run by other tests.
ELSEWHERE = {
    "training.md": "tests/device/test_training_page.py",
    "federated.md": "tests/federated/test_page.py",
    **{f"tutorials/{path.stem.replace('_', '-')}.md": "tests/docs/test_examples.py"
       for path in (ROOT / "examples").glob("[0-9]*.py")},
}  # fmt: skip
# What a page takes for granted, where it shows a part of something.
BEFORE = {
    "concepts.md": "import onnxtrain\n",
    "how-it-works.md": "from onnxtrain.offline.autodiff import rule\n",
}


def pages() -> list[str]:
    return sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def blocks(path: Path) -> list[str]:
    return PYTHON.findall(path.read_text(encoding="utf-8"))


# torch's exporters warn about themselves.
WITH_WARNINGS = {"exporting.md"}


def execute(code: str, folder: Path, warnings: str = "error") -> str:
    """Run code in a process of its own: what a page registers stays there."""
    (folder / "page.py").write_text(code, encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", warnings, "page.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def classifier(path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {"body.weight": (8, 16), "classifier.weight": (16, 3), "classifier.bias": (3,)}
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["input", "axes"], ["mean"], keepdims=0),
            helper.make_node("MatMul", ["mean", "body.weight"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "classifier.weight"], ["m"]),
            helper.make_node("Add", ["m", "classifier.bias"], ["output"]),
        ],
        "classifier",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", "sequence", 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 3])],
        [
            numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
            for name, shape in tensors.items()
        ]
        + [numpy_helper.from_array(np.array([1]), "axes")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


def two_inputs(path: Path) -> None:
    """A model of numbers and of an index into a table."""
    rng = np.random.default_rng(0)
    tensors = {"table": (2, 4), "classifier.weight": (12, 3), "classifier.bias": (3,)}
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "country"], ["place"]),
            helper.make_node("Concat", ["image", "place"], ["both"], axis=1),
            helper.make_node("Gemm", ["both", "classifier.weight", "classifier.bias"], ["output"]),
        ],
        "two_inputs",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 8]),
            helper.make_tensor_value_info("country", TensorProto.INT64, ["batch"]),
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 3])],
        [
            numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
            for name, shape in tensors.items()
        ],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


def tagger(path: Path) -> None:
    """A model of scores of classes for each position."""
    weight = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "weight"], ["scores"])],
        "tagger",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", "positions", 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", "positions", 3])],
        [numpy_helper.from_array(weight, "weight")],
    )
    opset = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@pytest.mark.slow
def test_the_example_of_the_readme_runs_and_has_fifteen_lines(tmp_path) -> None:
    offline, device = blocks(ROOT / "README.md")
    assert sum(len(block.splitlines()) for block in (offline, device)) <= 15
    onnx.save(network(), tmp_path / "model.onnx")
    rng = np.random.default_rng(0)
    image = rng.random((200, 1, 8, 8), np.float32)
    np.savez(tmp_path / "user.npz", image=image, labels=image[:, 0, 0, :3].argmax(axis=1))
    execute(offline, tmp_path)
    (tmp_path / "model.onnx").unlink()
    assert "History(5 epochs, 35 steps, loss " in execute(device, tmp_path)
    assert (tmp_path / "trained").exists()
    assert (tmp_path / "personal.onnx").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in pages() if p not in ELSEWHERE and blocks(DOCS / p)])
def test_the_code_of_a_page_runs(page, tmp_path) -> None:
    classifier(tmp_path / "model.onnx")
    two_inputs(tmp_path / "two_inputs.onnx")
    tagger(tmp_path / "tagger.onnx")
    warnings = "default" if page in WITH_WARNINGS else "error"
    execute("\n".join([BEFORE.get(page, ""), *blocks(DOCS / page)]), tmp_path, warnings)


@pytest.mark.slow
def test_the_walks_of_contributing_run(tmp_path) -> None:
    classifier(tmp_path / "model.onnx")
    execute("\n".join(blocks(ROOT / "CONTRIBUTING.md")), tmp_path)


# Pages that name files, and the folders that their names are relative to.
NAMES_FILES = {
    "CONTRIBUTING.md": ROOT / "src" / "onnxtrain",
    "docs/add-a-rule.md": ROOT / "src" / "onnxtrain" / "offline",
    "docs/how-it-works.md": ROOT / "src" / "onnxtrain" / "offline",
    **{f"docs/decisions/{path.name}": ROOT / "src" / "onnxtrain"
       for path in (DOCS / "decisions").glob("*.md")},
}  # fmt: skip


@pytest.mark.parametrize("page", NAMES_FILES)
def test_the_files_that_a_page_names_are_there(page) -> None:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    for name in re.findall(r"`([\w./-]+(?:/|\.py|\.toml))`", text):
        alone = "/" not in name and any(NAMES_FILES[page].rglob(name))
        assert alone or any((f / name).exists() for f in (NAMES_FILES[page], ROOT)), name


def test_a_walk_reads_five_files_at_most() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    walks = re.findall(r"^## Add (?:an?) .*?(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert len(walks) == 4
    for walk in walks:
        assert 3 <= len(re.findall(r"^\d\. `", walk, re.MULTILINE)) <= 5


def test_pages_that_others_run_are_run() -> None:
    for page, test in ELSEWHERE.items():
        assert (ROOT / test).exists(), page


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            for heading in headings}  # fmt: skip


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p}" for p in pages())])
def test_links_lead_somewhere(page) -> None:
    path = ROOT / page
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path if not file else (path.parent / file)
        assert linked.exists(), f"{page}: {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{page}: {target}"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p}" for p in pages())])
def test_pages_give_figures_and_reasons_not_our_goals(page) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.search(r"\bFAIL\b|\b[Gg]oals?\b|\bmeans? little\b|not explained yet", text)
    assert found is None, found


def test_the_site_lists_every_page() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert listed == set(pages())


def test_the_reference_lists_the_names_that_a_user_starts_with() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^(?:::: |      heading: )onnxtrain\.(\w+)", text, re.MULTILINE)
    assert set(onnxtrain.__all__) - {"__version__", "OnnxTrainError"} <= set(shown)
    assert "::: onnxtrain.errors" in text


def test_old_names_are_listed_for_those_who_come_from_an_earlier_version() -> None:
    _, _, text = (DOCS / "migrating.md").read_text(encoding="utf-8").partition("## From onnxtrain")
    keywords = {key for call in re.findall(r"`fit\((.*?)\)`", text.replace("[", "("))
                for key in re.findall(r"(\w+)=", call)}  # fmt: skip
    assert keywords >= old_keywords._OLD.keys()
    for name in moved.MOVED:
        parents = [name, name.rpartition(".")[0]]
        assert any(f"`{parent}`" in text for parent in parents), name


def test_the_comparison_counts_operators_as_their_table_does() -> None:
    table = (DOCS / "ops.md").read_text(encoding="utf-8")
    counts = {
        how: int(count) for how, count in re.findall(r"^\| (\w+) \| (\d+) \|", table, re.MULTILINE)
    }
    flows = counts["rule"] + counts["expanded"] + counts["rewritten"]
    assert f"gradients of {flows} operators" in (DOCS / "compare.md").read_text(encoding="utf-8")
