"""Programs in C and C++: the examples, and one that calls all of upstream's C++ interface.

C++ needs onnxruntime's own headers, which its wheels lack: in `build/onnxruntime-headers`, where
`make native-headers` puts them, or in the folder that the variable `ONNXRUNTIME_HEADERS` names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from small_runs import GOLDEN
from upstream_table import library_of_the_wheel

from onnxtrain import TrainingSession

ROOT = Path(__file__).parents[2]
INCLUDE, EXAMPLES = ROOT / "native" / "include", ROOT / "native" / "examples"
STEPS, SAMPLES = 5, 96
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


@pytest.fixture(scope="module")
def headers() -> Path:
    given = Path(os.environ.get("ONNXRUNTIME_HEADERS", ROOT / "build" / "onnxruntime-headers"))
    if not (given / "onnxruntime_cxx_api.h").is_file():
        pytest.skip(f"onnxruntime's headers are not in {given}: make native-headers fetches them")
    return given


def run(*words: object) -> str:
    made = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def linked(folder: Path, runtime: Path | None = None) -> list[str]:
    """What a program is linked with, to use onnxruntime's library of a wheel."""
    folder.mkdir(exist_ok=True)
    link = folder / "libonnxruntime.so.1"
    link.symlink_to(runtime or library_of_the_wheel())
    return [str(link), f"-Wl,-rpath,{folder}"]


@pytest.fixture
def in_c(library: Path, tmp_path: Path):
    """A function that compiles an example in C, without a header of onnxruntime."""

    def compile_example(name: str, *library_options: object) -> Path:
        program, options = tmp_path / name, library_options or (library,)
        run(
            "cc", "-std=c11", *WARNINGS, f"-I{INCLUDE}", EXAMPLES / f"{name}.c", "-o", program,
            *options, *linked(tmp_path / "runtime"), f"-Wl,-rpath,{library.parent}",
        )  # fmt: skip
        return program

    return compile_example


@pytest.fixture
def in_cpp(headers: Path, library: Path, tmp_path: Path):
    """A function that compiles a program in C++."""

    def compile_program(source: Path, runtime: Path | None = None) -> Path:
        program = tmp_path / source.stem
        run(
            "c++", "-std=c++17", *WARNINGS, f"-I{INCLUDE}", "-isystem", headers, source, "-o",
            program, library, *linked(tmp_path / "runtime", runtime),
            f"-Wl,-rpath,{library.parent}",
        )  # fmt: skip
        return program

    return compile_program


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Python made for digits, and the data of the programs."""
    datasets = pytest.importorskip("sklearn.datasets")
    from onnxtrain import prepare

    folder = tmp_path_factory.mktemp("digits")
    data = datasets.load_digits()
    (data.data[:SAMPLES] / 16).astype(np.float32).tofile(folder / "inputs")
    data.target[:SAMPLES].astype(np.int64).tofile(folder / "labels")
    random = np.random.default_rng(0)
    sizes = {"w1": (64, 32), "b1": (32,), "w2": (32, 10), "b2": (10,)}
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[batch, 64] input) => '
        "(float[batch, 10] logits) { h = Gemm(input, w1, b1) r = Relu(h) "
        "logits = Gemm(r, w2, b2) }"
    )
    for name, dims in sizes.items():
        values = random.normal(0, 0.2, dims).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(model, folder / "model.onnx")
    prepare(folder / "model.onnx", folder / "artifacts", loss="cross_entropy")
    return folder


def in_python(digits: Path, steps: int) -> tuple[list[float], TrainingSession]:
    inputs = np.fromfile(digits / "inputs", np.float32).reshape(SAMPLES, 64)
    labels = np.fromfile(digits / "labels", np.int64)
    session = TrainingSession.from_folder(digits / "artifacts")
    session.set_learning_rate(float(np.float32(0.01)))
    losses = []
    for step in range(steps):
        rows = slice(step % 3 * 32, step % 3 * 32 + 32)
        losses.append(float(np.ravel(session.step(inputs[rows], labels[rows])[0])[0]))
    return losses, session


def train_twice(program: Path, digits: Path, folder: Path) -> None:
    """A program trains, trains on from what it saved, and exports: as Python does."""
    words = [digits / "artifacts", digits / "inputs", digits / "labels", SAMPLES, STEPS]
    found = run(program, *words, folder / "state")
    found += run(program, *words, folder / "state", folder / "model.onnx", "logits")
    expected, session = in_python(digits, 2 * STEPS)
    np.testing.assert_allclose(list(map(float, found.split())), expected, rtol=0, atol=1e-6)
    session.export_model_for_inferencing(folder / "python.onnx", ["logits"])
    inputs = np.fromfile(digits / "inputs", np.float32).reshape(SAMPLES, 64)
    outputs = [
        ort.InferenceSession(folder / name).run(None, {"input": inputs})[0]
        for name in ("model.onnx", "python.onnx")
    ]
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-5)
    resumed = TrainingSession.from_folder(digits / "artifacts", checkpoint=folder / "state")
    assert resumed.optimizer is not None and resumed.optimizer.step_count == 2 * STEPS


def test_the_page_shows_parts_of_the_examples() -> None:
    page = (ROOT / "docs" / "c-api.md").read_text(encoding="utf-8")
    for name, suffix in (("cpp", "cpp"), ("c", "c")):
        example = (EXAMPLES / f"train.{suffix}").read_text(encoding="utf-8")
        shown = re.findall(rf"^```{name}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        assert len(shown) == 2 and all(part in example for part in shown)


def test_a_program_in_c(in_c, digits, tmp_path) -> None:
    train_twice(in_c("train"), digits, tmp_path)


def test_a_program_in_upstreams_style(in_cpp, digits, tmp_path) -> None:
    train_twice(in_cpp(EXAMPLES / "train.cpp"), digits, tmp_path)


def test_a_static_program_for_a_board(in_c, library, tmp_path) -> None:
    archive = library.with_suffix(".a")
    program = in_c("embedded", archive, "-lstdc++", "-lm", "-pthread")
    assert "libonnxtrain" not in run("readelf", "-d", program)
    shown = run(program, GOLDEN / "mlp", 300, 1_000_000, tmp_path / "state")
    found = re.search(r"loss ([\d.]+), (\d+) bytes of tensors, (\d+) at most", shown)
    assert found is not None and float(found[1]) < 1.0 and int(found[3]) < 1_000_000
    held = TrainingSession.from_folder(GOLDEN / "mlp", checkpoint=tmp_path / "state")
    assert held.optimizer is not None and held.optimizer.step_count == 300


def oldest_runtime() -> Path | None:
    python = os.environ.get("ONNXTRAIN_OLDEST_PYTHON")
    if not python:
        return None
    pattern = "lib/python*/site-packages/onnxruntime/capi/libonnxruntime.so*"
    return next(Path(python).parents[1].glob(pattern), None)


@pytest.mark.parametrize("version", ["newest", "oldest"])
def test_all_of_upstreams_interface(in_cpp, tmp_path, version) -> None:
    runtime = oldest_runtime() if version == "oldest" else library_of_the_wheel()
    if runtime is None:
        pytest.skip("ONNXTRAIN_OLDEST_PYTHON does not name the Python of the oldest onnxruntime")
    program = in_cpp(ROOT / "native" / "tests" / "upstream_program.cpp", runtime)
    assert run(program, GOLDEN / "mlp", tmp_path).strip() in runtime.name


def test_the_header_is_c_and_cpp(tmp_path) -> None:
    for compiler, name, standard in (("cc", "a.c", "c99"), ("c++", "a.cpp", "c++11")):
        (tmp_path / name).write_text('#include "onnxtrain.h"\nint main(void) { return 0; }\n')
        run(compiler, f"-std={standard}", *WARNINGS, f"-I{INCLUDE}", "-c", tmp_path / name,
            "-o", tmp_path / "a.o")  # fmt: skip


def test_only_our_names_are_exported(library) -> None:
    declared = (INCLUDE / "onnxtrain.h").read_text(encoding="utf-8")
    ours = set(re.findall(r"^ONNXTRAIN_API .*?(onnxtrain_\w+)\(", declared, re.MULTILINE))
    found = {line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()}
    assert found == ours | {"onnxtrain_training_api"}


def test_the_library_is_small_and_needs_little(library) -> None:
    assert library.stat().st_size < 1_000_000
    needed = re.findall(r"NEEDED.*\[(.*?)\]", run("readelf", "-d", library))
    assert all(re.match(r"lib(c|m|gcc_s|pthread)\.so|ld-linux", name) for name in needed), needed


CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(user LANGUAGES C CXX)
find_package(onnxtrain REQUIRED)
foreach(kind onnxtrain onnxtrain_static)
  add_executable(with_${kind} "%(source)s")
  set_target_properties(with_${kind} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(with_${kind} PRIVATE onnxtrain::${kind} "%(runtime)s")
endforeach()
"""


def test_the_cmake_package_and_pkg_config(built, digits, tmp_path) -> None:
    target = tmp_path / "installed"
    run("cmake", "--install", built, "--component", "device", "--prefix", target)
    runtime = linked(tmp_path / "runtime")
    source = EXAMPLES / "train.c"
    (tmp_path / "CMakeLists.txt").write_text(CMAKE % {"source": source, "runtime": runtime[0]})
    run("cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={target}")
    run("cmake", "--build", tmp_path / "b")
    programs = [tmp_path / "b" / f"with_{kind}" for kind in ("onnxtrain", "onnxtrain_static")]
    if shutil.which("pkg-config") is not None:
        found = next(target.rglob("onnxtrain.pc"))
        os_path = {**os.environ, "PKG_CONFIG_PATH": str(found.parent)}
        for kind, link in (("shared", []), ("static", ["--static"])):
            words = ["pkg-config", "--cflags", "--libs", *link, "onnxtrain"]
            flags = subprocess.run(words, env=os_path, capture_output=True, text=True)
            assert flags.returncode == 0, flags.stderr
            chosen = flags.stdout.split()
            if link:
                chosen = [f"-l:lib{f[2:]}.a" if f == "-lonnxtrain" else f for f in chosen]
            programs.append(tmp_path / kind)
            run("cc", source, "-o", programs[-1], *chosen, *runtime,
                f"-Wl,-rpath,{found.parents[1]}")  # fmt: skip
    for program in programs:
        words = [digits / "artifacts", digits / "inputs", digits / "labels", SAMPLES, 1]
        assert len(run(program, *words, tmp_path / f"{program.name}.state").split()) == 1
