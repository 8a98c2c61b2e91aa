"""What ONNX Runtime's training 1.19.2 failed on or got wrong, case by case.

The tables follow how its gradients failed: the artifacts could not be generated, they could not be
loaded or run, or the numbers were wrong without a word.
"""

import numpy as np
import pytest

from gradcheck import Spec, check_spec, ids

F32, I64 = np.float32, np.int64
LABELS = np.array([1, 0, 3])
GENERATION_FAILED = [
    Spec("Pow", [(2, 3), np.array(3, I64)], id="int-exponent"),
    Spec("Pow", [(2, 3), (2, 3)], id="of-the-exponent", domain=(0.5, 2), wrt=[1]),
    Spec("MatMul", [(2, 3), (3,)], id="matrix-vector", eps=1.0),
    Spec("MatMul", [(3,), (3,)], id="vector-vector", eps=1.0),
    Spec("Transpose", [(2, 3, 4)], id="no-perm", eps=1.0),
    *(
        Spec(op, [(2, 3, 4)], {"axes": [1], "keepdims": 0}, id=f"attribute-{opset}", opset=opset)
        for op in ("ReduceL2", "ReduceLogSumExp")
        for opset in (13, 17)
    ),
    Spec("ReduceL2", [(2, 3)], {"keepdims": 0}, id="no-axes"),
    Spec("ReduceLogSumExp", [(2, 3)], {"keepdims": 0}, id="no-axes"),
    *(
        Spec("Pad", [(3, 4), np.array([1, 2, 1, 1])], {"mode": mode}, id=mode, eps=1.0,
             constants=(1,), opset=19)
        for mode in ("reflect", "edge", "wrap")
    ),
    Spec("LSTM", [(4, 2, 3), (1, 20, 3), (1, 20, 5)], {"hidden_size": 5}, id="three-inputs",
         domain=(-1, 1), second_opinion=False),  # its gradient is a Scan that runs backwards
    Spec("GRU", [(4, 2, 3), (1, 15, 3), (1, 15, 5)], {"hidden_size": 5}, id="three-inputs",
         domain=(-1, 1), second_opinion=False),
    Spec("LayerNormalization", [(2, 3, 4), (4,)], id="no-bias", opset=17),
    Spec("LayerNormalization", [(2, 3, 4), (4,), (4,)], id="one-output", opset=17),
    Spec("Dropout", [(2, 3)], id="no-mask", eps=1.0),
    Spec("SoftmaxCrossEntropyLoss", [(3, 5), LABELS], id="one-output"),
]  # fmt: skip
LOADING_OR_RUNNING_FAILED = [
    *(
        Spec(op, [(4, 2, 3), (n, 5 * g, 3), (n, 5 * g, 5)], {"hidden_size": 5, "direction": way},
             id=way, domain=(-1, 1), second_opinion=False)
        for op, g in (("LSTM", 4), ("GRU", 3))
        for way, n in (("reverse", 1), ("bidirectional", 2))
    ),
    Spec("Slice", [(5, 4), np.array([4]), np.array([-6]), np.array([0]), np.array([-2])],
         id="negative-step", eps=1.0, constants=(1, 2, 3, 4)),
    Spec("Pad", [(3, 4), np.array([1, 2]), None, np.array([1])], id="axes", eps=1.0,
         constants=(1, 3)),
    Spec("ConvTranspose", [(2, 3, 5, 4), (3, 2, 3, 3)], {"strides": [2, 2], "kernel_shape": [3, 3]},
         eps=1.0),
    Spec("Resize", [(1, 2, 3, 4), None, np.array([1, 1, 2, 2], F32)], {"mode": "linear"}, eps=1.0,
         wrt=[0], constants=(2,), single=(2,)),
    Spec("MaxPool", [(1, 2, 5, 5)], {"kernel_shape": [2, 2], "strides": [1, 1]},
         id="of-an-input", apart=0.4, domain=(-10, 10),
         second_opinion=False),  # it gets indices wrong at stride 1
    Spec("AveragePool", [(1, 2, 5, 5)], {"kernel_shape": [2, 2]}, id="of-an-input", eps=1.0),
]  # fmt: skip
SILENTLY_WRONG = [
    *(
        Spec("Conv", [(2, 3, 6, 5), (4, 3, 3, 2)],
             {"auto_pad": mode, "strides": [2, 2], "kernel_shape": [3, 2]}, id=mode, eps=1.0)
        for mode in ("SAME_UPPER", "SAME_LOWER")
    ),
    Spec("Where", [np.array([[True, False, True]]), (2, 3), (2, 1)], id="broadcast", eps=1.0),
    Spec("Pow", [(3,), (2, 3)], id="broadcast-base", domain=(0.5, 2)),
    Spec("Split", [(6, 2)], {"axis": 0, "num_outputs": 3}, id="one-of-three", outputs=3, of=1,
         eps=1.0),
    Spec("ScatterND", [(4, 3), np.array([[1], [3]]), (2, 3)], {"reduction": "add"}, eps=1.0),
    Spec("ScatterElements", [(4, 3), np.array([[1, 0, 1]]), (1, 3)], {"reduction": "add"}, eps=1.0),
    Spec("Dropout", [(2, 3), np.array(0.4, F32), np.array(False)], id="off", wrt=[0],
         constants=(1, 2), eps=1.0),
    Spec("LeakyRelu", [(3, 4)], {"alpha": -0.5}, away_from=(0,)),
    Spec("BatchNormalization", [(4, 3, 2), (3,), (3,), (3,), np.array([0.5, 1, 2], F32)],
         id="inference"),
]  # fmt: skip
SPECS = [*GENERATION_FAILED, *LOADING_OR_RUNNING_FAILED, *SILENTLY_WRONG]


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


@pytest.mark.parametrize("op", ["Add", "Mul", "MatMul", "Concat"])
def test_a_value_used_twice_by_one_node(op: str) -> None:
    attrs = {"axis": 0} if op == "Concat" else {}
    check_spec(Spec(op, [(3, 3)], attrs, id="twice"), repeat_first_input=True)
