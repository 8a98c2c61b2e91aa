"""The ways to make integers of a model: by onnxruntime.quantization, by onnxtrain, by torch.

Each returns the file of a model that onnxruntime runs, but torch's, which returns its accuracy.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import onnxtrain
from data import Array, Data
from onnxtrain import Quantize, optim
from onnxtrain.device.run.session_settings import default_options


@dataclass(frozen=True)
class Trained:
    """A network that was trained in floats, and how it goes on."""

    model: Path  # in floats
    net: Callable[[], Any]  # the same in torch
    data: Data
    epochs: int  # to train on for integers
    rate: float
    seed: int
    keeps_statistics: bool = False  # of BatchNorm

    def beside(self, name: str) -> Path:
        """Return a path for something that is made of the model."""
        return self.model.parent / name


def one_thread() -> Any:
    """Return options of onnxruntime that are the same for all."""
    options = default_options()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return options


def open_model(path: Path, is_expanded: bool = False) -> ort.InferenceSession:
    """Open a model as stock onnxruntime does; integers may become floats when it is loaded."""
    options = ort.SessionOptions()
    if is_expanded:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def accuracy(path: Path, data: Data) -> float:
    """Return the part of the test samples that a model gets right."""
    run, (x, labels) = open_model(path), data.test
    found = [run.run(None, {"x": x[i : i + 250]})[0].argmax(1) for i in range(0, len(x), 250)]
    return float(np.mean(np.concatenate(found) == labels))


# ---- onnxruntime.quantization --------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what onnxruntime.quantization tells and warns of."""
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


class Reader:
    """Calibration data as onnxruntime.quantization takes them."""

    def __init__(self, batches: list[Array]) -> None:
        self._batches: Iterator[Array] = iter(batches)

    def get_next(self) -> dict[str, Array] | None:
        """Return the next batch."""
        batch = next(self._batches, None)
        return None if batch is None else {"x": batch}


def static(given: Trained, name: str, **how: Any) -> Path:
    """Quantize by onnxruntime.quantization, with weights and activations of integers."""
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready, target = given.beside("preprocessed.onnx"), given.beside(f"{name}.onnx")
    with quiet():
        if not ready.exists():
            quant_pre_process(given.model, ready, skip_symbolic_shape=True)
        quantize_static(ready, target, Reader(given.data.calibration()), **how)
    return target


def theirs_default(given: Trained) -> list[Path]:
    """Quantize with the settings that onnxruntime.quantization has by itself."""
    return [static(given, "theirs-default")]


def theirs(given: Trained) -> list[Path]:
    """Quantize with a scale for each channel, by each of the calibrators."""
    from onnxruntime.quantization import CalibrationMethod, QuantType

    methods = (CalibrationMethod.MinMax, CalibrationMethod.Entropy, CalibrationMethod.Percentile)
    return [
        static(given, f"theirs-{method.name}", per_channel=True, calibrate_method=method,
               activation_type=QuantType.QUInt8)
        for method in methods
    ]  # fmt: skip


def theirs_int4(given: Trained) -> list[Path]:
    """Quantize weights to 4 bits: those of all layers (activations to 8), or of MatMul alone."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    made = [
        static(given, "theirs-int4", per_channel=True, activation_type=QuantType.QUInt8,
               weight_type=QuantType.QInt4)
    ]  # fmt: skip
    if any(node.op_type == "MatMul" for node in onnx.load(given.model).graph.node):
        for symmetric in (True, False):
            model = onnx.load(given.model)  # which is changed
            with quiet():
                quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=symmetric)
                quantizer.process()
            made.append(given.beside(f"theirs-nbits-{symmetric}.onnx"))
            quantizer.model.save_model_to_file(str(made[-1]))
    return made


# ---- onnxtrain -----------------------------------------------------------------------------------


def trained(
    given: Trained, name: str, quantize: str | Quantize | None, epochs: float, rate: float = 1.0
) -> Path:
    """Train on for some epochs, or not at all, and export."""
    target, folder = given.beside(f"{name}.onnx"), given.beside(name)
    onnxtrain.prepare(
        given.model, folder, quantize=quantize,
        calibration=given.data.calibration() if quantize is not None else None,
        optimizer=optim.AdamW(weight_decay=0.0),
    )  # fmt: skip
    session = onnxtrain.TrainingSession(folder, session_options=one_thread)
    if epochs:
        session.set_learning_rate(given.rate * rate)
        onnxtrain.fit(
            session, given.data.train, max(1, round(epochs * given.epochs)), seed=given.seed,
            schedule="linear", progress=False,
        )  # fmt: skip
    session.export_model_for_inferencing(target, ["y"])
    return target


def ours(given: Trained) -> list[Path]:
    """Quantize without training, by each of the ways to calibrate."""
    return [
        trained(given, f"ours-{method}", Quantize(scales="fixed", method=method), 0)  # type: ignore[arg-type]
        for method in ("minmax", "percentile", "entropy", "mse")
    ]


def ours_int4(given: Trained) -> list[Path]:
    """Quantize weights to 4 bits without training."""
    return [trained(given, "ours-int4", "int4-weights", 0)]


def in_floats(given: Trained) -> list[Path]:
    """Train on as others do, in floats, to see what of a gain is due to training alone."""
    return [trained(given, "floats", None, 1)]


def average(given: Trained) -> list[Path]:
    """Train for 8 bits, with moving averages of ranges."""
    return [trained(given, "average", "int8", 1)]


def learned(given: Trained) -> list[Path]:
    """Train for 8 bits, with learned scales."""
    return [trained(given, "learned", "int8:scales=learned", 1)]


def learned_int4(given: Trained) -> list[Path]:
    """Train for 4 bits, with learned scales."""
    return [trained(given, "learned-int4", "int4-weights", 2)]


# ---- torch ---------------------------------------------------------------------------------------


def torch_int8(given: Trained) -> float:
    """Train by torch.ao.quantization for 8 bits, convert, and return the accuracy."""
    import networks
    import torch
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_qat_fx

    torch.backends.quantized.engine = "onednn"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sample = torch.from_numpy(given.data.train[0][:2])
        mapping = get_default_qat_qconfig_mapping("onednn")
        net = prepare_qat_fx(given.net().train(), mapping, (sample,))
        if given.keeps_statistics:
            net.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)
        networks.train(net, given.data, given.epochs, given.rate, given.seed, freeze=freeze_torch)
        return networks.accuracy(convert_fx(net.eval()), given.data)


def freeze_torch(net: Any) -> None:
    """Let ranges and the statistics of BatchNorm stay, as torch's documentation advises."""
    import torch

    net.apply(torch.ao.quantization.disable_observer)
    net.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)


def torch_int4(given: Trained) -> float:
    """Train by torch.ao.quantization for weights of 4 bits, which it rounds but cannot convert."""
    import networks
    import torch
    from torch.ao import quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = networks.folded(given.net().eval()).train()
        weight = quantization.FakeQuantize.with_args(
            observer=quantization.MovingAveragePerChannelMinMaxObserver, quant_min=-8, quant_max=7,
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric,
        )  # fmt: skip
        net.qconfig = quantization.QConfig(activation=torch.nn.Identity, weight=weight)
        quantization.prepare_qat(net, inplace=True)
        networks.train(
            net, given.data, 2 * given.epochs, given.rate, given.seed, freeze=freeze_torch
        )
        net.eval()
        return networks.accuracy(net, given.data)


# ---- all of them ---------------------------------------------------------------------------------

FLOAT, INT8, INT4 = 32, 8, 4
Way = Callable[[Trained], "list[Path] | float"]
WAYS: dict[str, tuple[int, Way]] = {
    "float": (FLOAT, lambda given: [given.model]),
    "float, trained on": (FLOAT, in_floats),
    "int8: onnxruntime.quantization, as it comes": (INT8, theirs_default),
    "int8: onnxruntime.quantization, best calibrator": (INT8, theirs),
    "int8: onnxtrain, not trained, best calibrator": (INT8, ours),
    "int8: torch, trained": (INT8, torch_int8),
    "int8: onnxtrain, trained, moving averages": (INT8, average),
    "int8: onnxtrain, trained, learned scales": (INT8, learned),
    "int4: onnxruntime.quantization, best": (INT4, theirs_int4),
    "int4: onnxtrain, not trained": (INT4, ours_int4),
    "int4: torch, trained": (INT4, torch_int4),
    "int4: onnxtrain, trained, learned scales": (INT4, learned_int4),
}


def measure(way: Way, given: Trained) -> dict[str, Any]:
    """Make a model in a way, and return its accuracy, size and the time that it took."""
    began = time.process_time()
    made = way(given)
    seconds = time.process_time() - began
    if isinstance(made, float):
        return {"accuracy": made, "seconds": seconds}
    found = {path: accuracy(path, given.data) for path in made}
    best = max(made, key=lambda path: found[path])
    return {
        "accuracy": found[best], "seconds": seconds, "file": best.name,
        "bytes": best.stat().st_size,
    }  # fmt: skip
