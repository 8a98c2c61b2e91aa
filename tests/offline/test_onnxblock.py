"""The contexts that blocks are called in, what is checked there, and checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphs import model, value
from onnxtrain import onnxblock
from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.blocks import accessor as accessor_module
from onnxtrain.offline.graph.infer import infer_proto
from onnxtrain.onnxblock import blocks
from onnxtrain.onnxblock import loss as losses
from two_heads import (
    B,
    Forward,
    Training,
    W,
    X,
    Y,
    input_names,
    rng,
    run,
    two_heads,
)

# ---- contexts ------------------------------------------------------------------------------------


def test_the_given_model_is_not_touched() -> None:
    given = two_heads()
    before = given.SerializeToString(deterministic=True)
    with onnxblock.base(given) as accessor:
        blocks.Add()("y", "z")
        assert len(accessor.model.graph.node) == 3
        assert not accessor.has_path
        with pytest.raises(RuntimeError, match="path"):
            _ = accessor.path
    assert given.SerializeToString(deterministic=True) == before


def test_empty_base() -> None:
    with onnxblock.empty_base(opset_version=14) as accessor:
        built = accessor.model
        built.graph.input.append(value("x", [2]))
        name = blocks.Mul()("x", blocks.Constant(3.0)())
        assert [(o.domain, o.version) for o in built.opset_import] == [("", 14)]
    built.graph.output.append(value(name, [2]))
    assert run(built, {"x": np.ones(2, np.float32)})[name].tolist() == [3, 3]


def test_contexts_are_not_nested() -> None:
    with onnxblock.base(two_heads()):
        for nested in (lambda: onnxblock.base(two_heads()), onnxblock.empty_base):
            with pytest.raises(RuntimeError, match="nested"), nested():
                pass
        blocks.Add()("y", "z")  # the outer context still stands
    with onnxblock.empty_base():
        pass


def test_a_failure_leaves_the_context() -> None:
    with pytest.raises(ZeroDivisionError), onnxblock.base(two_heads()):
        raise ZeroDivisionError
    with onnxblock.empty_base():
        pass


def test_outside_of_contexts() -> None:
    block = blocks.Add()
    assert block.base is None
    with pytest.raises(RuntimeError, match="inside 'with"):
        block("a", "b")


def test_base_wants_a_model() -> None:
    with pytest.raises(RuntimeError, match="ModelProto"), onnxblock.base(None):  # type: ignore[arg-type]
        pass


def test_custom_op_library(tmp_path: Path) -> None:
    library = tmp_path / "ops.so"
    missing = pytest.raises(RuntimeError, match="no custom operator library")
    with missing, onnxblock.custom_op_library(library):
        pass
    library.touch()
    with onnxblock.custom_op_library(library) as path:
        assert path == library
        with pytest.raises(RuntimeError, match="nested"), onnxblock.custom_op_library(library):
            pass


def test_absolute_temporary_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="temp_file_name"):
        blocks.PassThrough(str(tmp_path / "temp.onnx"))


def test_names_differ_from_those_of_a_model_that_blocks_built() -> None:
    with onnxblock.base(two_heads()) as accessor:
        number = int(blocks.Add()("y", "z").split("::")[-1])
        for ahead in range(1, 5):
            node = helper.make_node("Neg", ["y"], [f"onnx::add_output::{number + ahead}"])
            accessor.model.graph.node.append(node)
        built = accessor.model
    with onnxblock.base(built):
        assert int(blocks.Add()("y", "z").split("::")[-1]) > number + 4


def test_two_threads_build_at_once() -> None:
    together, results, failures = threading.Barrier(2), {}, []
    shared = losses.MSELoss()

    def work(name: str) -> None:
        try:
            base = two_heads()
            base.graph.name = name
            forward = Forward(lambda y: blocks.Mul()(shared(y, name), blocks.Constant(2.0)()))
            for _ in range(5):
                with onnxblock.base(base) as accessor:
                    together.wait(10)
                    forward("y")
                    together.wait(10)
                    assert accessor.model.graph.name == name
            results[name] = forward.to_model_proto()
        except BaseException as failure:
            failures.append(failure)
            together.abort()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for name, built in results.items():
        assert input_names(built) == ["x", name]
        target = rng.random((4, 2), dtype=np.float32)
        (found,) = run(built, {"x": X, name: target}).values()
        np.testing.assert_allclose(found, 2 * ((Y - target) ** 2).mean(), rtol=1e-5)


def test_what_blocks_added_can_be_told_from_weights() -> None:
    with onnxblock.base(two_heads()) as accessor:
        assert accessor.added_initializers == []
        losses.CrossEntropyLoss(weight=[1.0, 2.0])("y")
        added = accessor.added_initializers
        assert "loss/weight" in added
        assert not {"w", "b"} & set(added)
        assert {t.name for t in accessor.model.graph.initializer} == {"w", "b", *added}


def test_types_are_inferred_again_only_when_the_model_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = []

    def counted(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
        count.append(model)
        return infer_proto(model, **options)

    monkeypatch.setattr(accessor_module, "infer_proto", counted)
    with onnxblock.base(two_heads()) as accessor:
        assert accessor.type_of("y") == accessor.type_of("y") == value("y", ["batch", 2]).type
        assert accessor.type_of("w").tensor_type.shape.dim[0].dim_value == 3
        assert len(count) == 1
        accessor.model.graph.node[1].op_type = "Exp"  # by hand, and nothing but a word
        accessor.type_of("y")
        assert len(count) == 2


# ---- checks --------------------------------------------------------------------------------------


class Broken(onnxblock.Block):
    def build(self, name: str) -> str:
        self.base.graph.node.append(helper.make_node("Add", [name, "nothing"], ["sum"]))
        return "sum"


def test_a_wrong_graph_is_an_error() -> None:
    with onnxblock.base(two_heads()), pytest.raises(RuntimeError, match="nothing"):
        Broken()("y")


def test_types_that_do_not_fit_are_an_error() -> None:
    with onnxblock.base(two_heads()), pytest.raises(RuntimeError, match="contradict"):
        blocks.Add()("y", blocks.Cast(TensorProto.INT64)("z"))


@pytest.mark.parametrize("returned", [None, 3, (), ["y", None]])
def test_what_build_returns_is_names(returned: Any) -> None:
    for kind in (onnxblock.ForwardBlock, onnxblock.TrainingBlock):
        block = type("Odd", (kind,), {"build": lambda self, name: returned})()
        with onnxblock.base(two_heads()), pytest.raises(RuntimeError, match="name"):
            block("y")


def test_an_output_that_does_not_exist() -> None:
    with onnxblock.base(two_heads()), pytest.raises(LookupError, match=r"'yy'.*did you mean"):
        Forward(blocks.PassThrough())("yy")


def test_forward_block_before_its_build() -> None:
    with pytest.raises(RuntimeError, match="build the model first"):
        Forward(None).to_model_proto()


def test_a_forward_model_is_as_it_was_built() -> None:
    first, second = Forward(blocks.Abs()), Forward(blocks.Neg())
    with onnxblock.base(two_heads()):
        second(first("y"))
    assert len(first.to_model_proto().graph.node) == 3
    assert len(second.to_model_proto().graph.node) == 4


def test_infer_shapes_on_base() -> None:
    class Looks(onnxblock.Block):
        def build(self, name: str) -> str:
            self.base.graph.node.append(helper.make_node("Exp", [name], ["e"]))
            inferred = self.infer_shapes_on_base()
            assert value("e", ["batch", 2]) in inferred.graph.value_info
            return "e"

    with onnxblock.base(two_heads()):
        assert Looks()("y") == "e"


# ---- models with their weights in files ----------------------------------------------------------


WIDE = rng.standard_normal((3, 4096)).astype(np.float32)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a model with its tensors in a file, somewhere else than we are."""
    path = tmp_path / "folder" / "model.onnx"
    path.parent.mkdir()
    base = model(
        [
            helper.make_node("MatMul", ["x", "wide"], ["h"]),
            helper.make_node("Reshape", ["h", "shape"], ["h2"]),
            helper.make_node("Mul", ["h2", "scale"], ["y"]),
        ],
        [value("x", ["batch", 3])],
        [value("y", None)],
        {"wide": WIDE, "shape": np.array([-1, 2048]), "scale": np.ones(2048, np.float32)},
    )
    onnx.save(base, path, save_as_external_data=True, location="weights", size_threshold=0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return path


@pytest.mark.parametrize("trains", ["wide", "scale"])
def test_weights_stay_in_their_file(stored: Path, trains: str) -> None:
    block = Training(losses.MSELoss())
    block.requires_grad("scale", trains == "scale")
    block.requires_grad("wide", trains == "wide")
    loaded = onnx.load(stored, load_external_data=False)
    with onnxblock.base(loaded, str(stored)) as accessor:
        assert accessor.has_path
        assert accessor.path == str(stored)
        assert accessor.model.ByteSize() < 2000
        loss = block("y")
    assert not list(Path.cwd().iterdir())
    training, evaluation = block.to_model_proto()
    assert training.ByteSize() < 20_000

    # Frozen tensors are where they were: the models are to be saved beside the given one.
    feeds = {"x": X, "target": np.zeros((8, 2048), np.float32)}
    feeds[trains] = WIDE if trains == "wide" else np.ones(2048, np.float32)
    onnx.save(evaluation, stored.with_name("eval.onnx"))
    session = onnxruntime.InferenceSession(
        stored.with_name("eval.onnx"), providers=["CPUExecutionProvider"]
    )
    found = session.run([loss], feeds)[0]
    np.testing.assert_allclose(found, ((X @ WIDE) ** 2).mean(), rtol=1e-4)

    onnxblock.save_checkpoint(block.parameters(), "checkpoint")
    fresh = onnx.load(stored)
    for tensor in fresh.graph.initializer:
        if tensor.name in ("wide", "scale"):
            tensor.raw_data = bytes(len(tensor.raw_data))
    onnxblock.load_checkpoint_to_model("checkpoint", fresh)
    np.testing.assert_array_equal(numpy_helper.to_array(fresh.graph.initializer[0]), WIDE)


@pytest.mark.parametrize("name", ["wide", "shape"])
@pytest.mark.parametrize("location", ["../secret", "nowhere"])
def test_weights_in_other_files(stored: Path, name: str, location: str) -> None:
    (stored.parents[1] / "secret").write_bytes(bytes(100_000))
    loaded = onnx.load(stored, load_external_data=False)
    for tensor in loaded.graph.initializer:
        if tensor.name == name:
            next(e for e in tensor.external_data if e.key == "location").value = location
    block = Training(losses.MSELoss())
    block.requires_grad("wide")
    with pytest.raises(OnnxTrainError, match=name), onnxblock.base(loaded, stored):
        block("y")


# ---- checkpoints ---------------------------------------------------------------------------------


def tensors(**arrays: Any) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()]


def test_checkpoint_to_model(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    onnxblock.save_checkpoint((tensors(w=W * 2, other=B), tensors(b=B * 3)), path)
    target = two_heads()
    onnxblock.load_checkpoint_to_model(path, target)
    found = {t.name: numpy_helper.to_array(t) for t in target.graph.initializer}
    assert found.keys() == {"w", "b"}
    np.testing.assert_array_equal(found["w"], W * 2)
    np.testing.assert_array_equal(found["b"], B * 3)


def test_checkpoints_of_every_type(tmp_path: Path) -> None:
    kinds = [TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.INT4, TensorProto.FLOAT8E5M2]
    given = [helper.make_tensor(f"t{kind}", kind, [3], [1, 2, 3]) for kind in kinds]
    given.append(helper.make_tensor("text", TensorProto.STRING, [2], ["a", "ö"]))
    given.append(helper.make_tensor("flags", TensorProto.BOOL, [2], [True, False]))
    onnxblock.save_checkpoint(([], given), tmp_path / "checkpoint")
    target = two_heads()
    target.graph.initializer.extend(given)
    for tensor in target.graph.initializer[2:]:
        for field in ("int32_data", "raw_data", "string_data"):
            tensor.ClearField(field)
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", target)
    for tensor, expected in zip(target.graph.initializer[2:], given, strict=True):
        assert numpy_helper.to_array(tensor).tolist() == numpy_helper.to_array(expected).tolist()


def test_wrong_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(RuntimeError, match="no parameters"):
        onnxblock.save_checkpoint(None, path)
    with pytest.raises(RuntimeError, match="twice: w"):
        onnxblock.save_checkpoint((tensors(w=W), tensors(w=W)), path)
    assert not path.exists()
    onnxblock.save_checkpoint((tensors(w=W), []), path, nominal_checkpoint=True)
    with pytest.raises(RuntimeError, match="nominal"):
        onnxblock.load_checkpoint_to_model(path, two_heads())
    onnxblock.save_checkpoint((tensors(w=W.T), []), path)
    with pytest.raises(RuntimeError, match="not of one model"):
        onnxblock.load_checkpoint_to_model(path, two_heads())


def test_public_names() -> None:
    assert set(onnxblock.__all__) == {
        "Block", "ForwardBlock", "TrainingBlock", "base", "blocks", "custom_op_library",
        "empty_base", "load_checkpoint_to_model", "loss", "optim", "save_checkpoint",
    }  # fmt: skip
    for name in onnxblock.__all__:
        assert getattr(onnxblock, name) is not None
