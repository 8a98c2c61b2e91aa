"""The device half finds the library, registers its kernels, and does without where it has to."""

from __future__ import annotations

import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from onnxtrain.cli import main
from onnxtrain.device.export.layout import without_functions
from onnxtrain.device.run import native
from onnxtrain.device.run.graph import Frozen, Graph
from onnxtrain.device.run.session_settings import Settings
from onnxtrain.errors import ArgumentError, TrainingWarning
from onnxtrain.format.metadata import METADATA_KEY, GraphMetadata
from onnxtrain.format.model.file import ModelFile

CPU = ["CPUExecutionProvider"]
X = np.ones((1, 1, 4, 4), np.float32)
W = np.ones((1, 1, 3, 3), np.float32)


@pytest.fixture(autouse=True)
def library(native_library: Path | None) -> Iterator[Path]:
    """The library; what was found of it is forgotten before and after each test."""
    if native_library is None:
        pytest.skip("there is no compiler to build the native library")
    native._found.clear()
    yield native_library
    native._found.clear()


def model_of(*functions: str, told: tuple[str, ...] | None = None) -> ModelFile:
    """A graph that adds the results of some functions.

    The body of a function pads the image and its kernel does not (the size of the result tells
    which one runs), unless the function has another name than a kernel.
    """
    bodies, nodes = [], []
    for name in functions:
        conv = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
        domains = [helper.make_opsetid("", 18)]
        bodies.append(
            helper.make_function("ai.onnxtrain", name, ["x", "w"], ["y"], [conv], domains)
        )
        nodes.append(helper.make_node(name, ["x", "w"], [name], domain="ai.onnxtrain"))
    graph = helper.make_graph(
        [*nodes, helper.make_node("Concat", list(functions), ["y"], axis=0)], "graph",
        [helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("x", X), ("w", W))],
        [helper.make_tensor_value_info("y", 1, None)],
    )  # fmt: skip
    domains = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnxtrain", 1)]
    model = helper.make_model(graph, functions=bodies, opset_imports=domains, ir_version=8)
    metadata = GraphMetadata(checkpoint="checkpoint", kernels=functions if told is None else told)
    model.metadata_props.add(key=METADATA_KEY, value=metadata.to_json())
    return ModelFile.read(model.SerializeToString())


def graph_of(*functions: str, settings: Settings | None = None, **more: tuple[str, ...]) -> Graph:
    return Graph(model_of(*functions, **more), settings or Settings(CPU), Frozen())


def runs_kernels(graph: Graph) -> bool:
    (y,) = graph.session.run(None, {"x": X, "w": W})
    return bool(y.shape[2] == 2)


def test_kernels_stand_in_for_functions() -> None:
    graph = graph_of("Conv_0", "Conv_17")
    assert graph.kernels == ("Conv_0", "Conv_17")
    assert runs_kernels(graph)


@pytest.mark.parametrize("value", ["0", ""])
def test_without_the_library_the_bodies_run(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, value)
    monkeypatch.setitem(__import__("sys").modules, "onnxtrain_native", None)
    graph = graph_of("Conv_0")
    assert graph.kernels == ()
    assert not runs_kernels(graph)


def test_native_false_and_other_providers_turn_it_off() -> None:
    graph = graph_of("Conv_0", settings=Settings(CPU, native=False))
    assert graph.kernels == ()
    assert not runs_kernels(graph)
    assert Settings(["CUDAExecutionProvider", *CPU]).library is None
    assert Settings([("CPUExecutionProvider", {})]).library is not None


def test_unknown_functions_and_functions_that_were_not_told_run_their_bodies() -> None:
    assert graph_of("Conv_0", "Newest_1").kernels == ("Conv_0",)
    assert not runs_kernels(graph_of("Newest_1"))
    assert not runs_kernels(graph_of("Conv_0", told=()))


def test_bodies_that_do_not_run_are_not_loaded() -> None:
    graph = graph_of("Conv_0", "Unknown_1")
    whole, loaded = map(onnx.load_from_string, (bytes(graph.model.data), graph._source({})))
    assert [function.name for function in loaded.functions] == ["Unknown_1"]
    del whole.functions[0]
    assert loaded == whole, "nothing else changes"
    of_others = model_of("Conv_0").data.tobytes().replace(b"ai.onnxtrain", b"my.own.names")
    assert without_functions(of_others, ["Conv_0"], "model") == of_others


def test_partners_are_served_together_or_not_at_all() -> None:
    served = native.native_status().library.served
    assert served(["Conv_0", "ConvGradInput_1"]) == ("Conv_0", "ConvGradInput_1")
    assert served(["Conv_0", "ConvGradNewest_1", "AdamW_2"]) == ("AdamW_2",)
    assert served(["NewestGrad_1", "Newest_0"]) == ()
    assert served(["ConvOrElse_0", "ConvGradInput_1"]) == ()
    assert not runs_kernels(graph_of("Conv_0", "ConvGradNewest_1"))


def test_options_for_several_sessions() -> None:
    settings = Settings(CPU, ort.SessionOptions())
    graphs = [
        graph_of(*names, settings=settings)
        for names in (("Conv_0",), ("Conv_1", "Conv_0"), ("Newest_5",), ("Conv_2",), ("Conv_0",))
    ]
    assert [runs_kernels(graph) for graph in graphs] == [True, True, False, True, True]
    again = graph_of("Conv_3", settings=Settings(CPU, settings.options))
    assert runs_kernels(again)
    with pytest.raises(ArgumentError, match="a function that makes new ones"):
        runs_kernels(graph_of("Conv_0", "ConvGradNewest_1", settings=settings))


def test_options_that_grow_leave_those_of_others_alone() -> None:
    library, name = native.native_status().library, "Conv_7001"
    own, shared = ort.SessionOptions(), ort.SessionOptions()
    with library.registered(own, ["Conv_0"], is_shared=False):
        pass
    for functions in (["Conv_0"], ["Conv_0", name]):
        with library.registered(shared, functions, is_shared=True):
            pass
    model = model_of(name).data.tobytes()
    for options, size in ((own, 4), (shared, 2)):
        (y,) = ort.InferenceSession(model, options, providers=CPU).run(None, {"x": X, "w": W})
        assert y.shape[2] == size


def test_a_function_that_makes_options() -> None:
    settings = Settings(CPU, ort.SessionOptions)
    assert all(runs_kernels(graph_of(f"Conv_{i}", settings=settings)) for i in range(3))


def test_sessions_in_many_threads() -> None:
    shared = Settings(CPU, ort.SessionOptions())
    wrong = []

    def work(own: int) -> None:
        for number in range(10):
            names = (f"Conv_{own}", f"Conv_{number}{own}")
            settings = shared if number % 2 else Settings(CPU)
            if not runs_kernels(graph_of(*names, settings=settings)):
                wrong.append(names)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_library_that_does_not_load_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"nothing")
    for path in (broken, tmp_path / "absent.so"):
        monkeypatch.setenv(native.VARIABLE, str(path))
        with pytest.warns(TrainingWarning, match="without native kernels: .*does not load"):
            graph = graph_of("Conv_0")
            assert graph.kernels == ()
        assert not runs_kernels(graph)  # and says so once


@pytest.mark.parametrize(
    "source", ["int onnxtrain_interface() { return 1000; }", "int other() { return 0; }"]
)
def test_a_library_of_another_version(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.c").write_text(source)
    other = tmp_path / "other.so"
    build = ["c++", "-shared", "-fPIC", "-x", "c", str(tmp_path / "other.c"), "-o", str(other)]
    subprocess.run(build, check=True)
    monkeypatch.setenv(native.VARIABLE, str(other))
    with pytest.warns(TrainingWarning, match=r"version of onnxtrain|undefined symbol"):
        assert native.native_status().library is None


def test_what_only_the_kernels_refuse_runs_plain() -> None:
    graph = graph_of("Conv_0")
    library = native.native_status().library
    real = library.path
    library.path = "/there/is/nothing.so"
    try:
        with pytest.warns(TrainingWarning, match="runs without native kernels"):
            assert not runs_kernels(graph)
        assert graph.kernels == ()
    finally:
        library.path = real


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    golden = str(Path(__file__).parents[1] / "golden" / "mlp")
    assert main(["doctor", golden]) == 0
    shown = capsys.readouterr().out
    assert "ConvGradWeight" in shown and ort.__version__ in shown and "plain operators" in shown
    monkeypatch.setenv(native.VARIABLE, "/there/is/nothing.so")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["doctor"]) == 0
    assert "off: the native library does not load" in capsys.readouterr().out


def test_the_versions_are_equal() -> None:
    import onnxtrain

    assert native.native_status().library.version == onnxtrain.__version__
