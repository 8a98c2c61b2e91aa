"""Specs of rules/index.py."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import onnxtrain
from gradcheck import Spec, check_spec, ids, vjp


def ints(numbers: object) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def bools(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.bool_)


K = ints([2])

SPECS = [
    Spec("Gather", [(5, 3), ints([[0, 4], [-1, 0]])], eps=1.0),
    Spec("Gather", [(5, 3), ints([[0, 4], [-1, 0]])], id="constant", constants=[1], eps=1.0),
    Spec("Gather", [(2, 5, 3), ints([1, 3, 1])], {"axis": 1}, id="middle-axis", eps=1.0),
    Spec("Gather", [(2, 5), ints([[1, 3], [1, -5]])], {"axis": -1}, id="last-axis", eps=1.0),
    Spec("Gather", [(2, 5, 3), ints(-2)], {"axis": 1}, id="scalar", eps=1.0),
    Spec("Gather", [(2, 5, 3), ints([[3]])], {"axis": 1}, id="one", eps=1.0),
    Spec("Gather", [(2, 5, 3), ints(-2)], {"axis": 1}, id="scalar-constant", constants=[1],
         eps=1.0),
    Spec("Gather", [(2, 5, 3), ints([3, -5, 2])], {"axis": 1}, id="different", constants=[1],
         eps=1.0),
    Spec("Gather", [(2, 5, 3), ints([3, 0])], {"axis": 1}, id="different-not-negative",
         constants=[1], eps=1.0),
    Spec("Gather", [(2, 3, 5), ints([[3, 0], [2, -1]])], {"axis": 2}, id="different-last-axis",
         constants=[1], eps=1.0),
    Spec("Gather", [(2, 5, 3), ints([2, 0, 1, 4, 3])], {"axis": 1}, id="permutation",
         constants=[1], eps=1.0),
    Spec("Gather", [(2, 5, 3), ints([1, 2, 3])], {"axis": 1}, id="neighbours", constants=[1],
         eps=1.0),
    Spec("Gather", [(5, 3), np.array([4, 4, -5], np.int32)], id="int32", eps=1.0),
    Spec("Gather", [(5,), ints([4, 4, 1])], id="vector", eps=1.0),
    Spec("Gather", [(5, 3), np.zeros((0,), np.int64)], id="nothing", eps=1.0),
    Spec("GatherElements", [(3, 4), ints([[0, 2, -1, 0], [0, 1, 2, 0]])], eps=1.0),
    Spec("GatherElements", [(2, 4), np.array([[3, -4], [3, 3]], np.int32)], {"axis": 1},
         id="int32", eps=1.0),
    # The reference evaluator takes no negative axis, nor indices smaller than x on others.
    Spec("GatherElements", [(2, 3, 4), ints([[[0, 3], [-4, 3]]])], {"axis": -1}, id="smaller",
         second_opinion=False, eps=1.0),
    Spec("GatherND", [(3, 4, 2), ints([[0, 1], [2, -1], [0, 1]])], eps=1.0),
    Spec("GatherND", [(3, 4, 2), ints([[0, 1], [2, -1], [0, 1]])], id="constant", constants=[1],
         eps=1.0),
    Spec("GatherND", [(3, 4), ints([[0, 1], [2, -1], [0, 1]])], id="elements", eps=1.0),
    Spec("GatherND", [(3, 4, 2), ints([[[0], [2]], [[-3], [1]]])], id="rows", eps=1.0),
    Spec("GatherND", [(2, 3, 4), ints([[[0], [2]], [[-1], [2]]])], {"batch_dims": 1}, id="batch",
         eps=1.0),
    Spec("GatherND", [(2, 2, 4), ints([[[0], [2]], [[-1], [2]]])], {"batch_dims": 2},
         id="two-batch-axes", eps=1.0),
    Spec("GatherND", [(3, 4, 2), np.zeros((0, 1), np.int64)], id="nothing", eps=1.0),
    Spec("TopK", [(3, 5), K], outputs=2, apart=0.2),
    Spec("TopK", [(5, 3), K], {"axis": 0, "largest": 0}, id="smallest", constants=[1], outputs=2,
         apart=0.2),
    Spec("TopK", [(2, 5, 2), K], {"axis": 1, "sorted": 0}, id="unsorted", outputs=2, apart=0.1),
    Spec("Unique", [(2, 4)], apart=0.2),
    # The reference evaluator indexes the sorted result with positions in x, and fails.
    Spec("Unique", [(2, 4)], {"sorted": 0}, id="unsorted", second_opinion=False, apart=0.2),
    Spec("Unique", [(2, 4)], {"axis": 1}, id="axis", apart=0.2),
    Spec("Unique", [(2, 4)], {"axis": -2}, id="all-outputs", outputs=4, apart=0.2),
    Spec("Compress", [(3, 4), bools(0, 1, 1)], {"axis": 0}, eps=1.0),
    Spec("Compress", [(3, 4), bools(0, 1, 0, 1)], {"axis": -1}, id="last-axis", eps=1.0),
    Spec("Compress", [(2, 4, 3), bools(1, 0, 1)], {"axis": 1}, id="short-condition", eps=1.0),
    Spec("Compress", [(2, 3), bools(1, 0, 0, 1, 1)], id="flat", eps=1.0),
    Spec("Compress", [(3, 4), bools(0, 0, 0)], {"axis": 0}, id="nothing", eps=1.0),
    Spec("OneHot", [ints([[0, 2], [-1, 5]]), ints(4), (2,)], eps=1.0),
    Spec("OneHot", [ints([0, 2, 1]), ints(3), (2,)], {"axis": 0}, id="axis-0", eps=1.0),
    Spec("OneHot", [np.array([0, 2, 1], np.float32), np.array(3, np.float32), (2,)], wrt=[2],
         id="float-indices", eps=1.0),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 18]>\n' + text)


EMBEDDING = model_of("g (float[10,64] w, int64[n] i) => (float[n,64] y) { y = Gather(w, i) }")


def test_embedding_is_what_torch_says() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((10, 64)).astype(np.float32)
    index = rng.integers(0, 10, 40)
    ct = rng.standard_normal((40, 64)).astype(np.float32)
    (dw,) = vjp(EMBEDDING, {"w": w, "i": index}, ["w"], ct)
    leaf = torch.tensor(w, requires_grad=True)
    torch.nn.functional.embedding(torch.tensor(index), leaf).backward(torch.tensor(ct))
    np.testing.assert_allclose(dw, leaf.grad, rtol=1e-5, atol=1e-5)


BY_POINT = "{ one = Constant<value_ints = [1]>() j = Unsqueeze(i, one) y = GatherND(w, j) }"


@pytest.mark.parametrize("body", ["{ y = Gather(w, i) }", BY_POINT], ids=["Gather", "GatherND"])
def test_no_update_is_lost_between_threads(body: str) -> None:
    model = model_of(f"g (float[10,8] w, int64[n] i) => (float[n,8] y) {body}")
    extended = onnxtrain.gradient(model, "w")
    assert "ScatterND" not in {n.op_type for n in extended.graph.node}, "it loses updates at times"
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    session = ort.InferenceSession(
        extended.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    index = np.random.default_rng(0).integers(0, 10, 100000)
    feeds = {"w": np.zeros((10, 8), np.float32), "i": index}
    for _ in range(5):
        (dw,) = session.run(["w_grad"], {**feeds, "y_grad": np.ones((100000, 8), np.float32)})
        np.testing.assert_array_equal(dw, np.repeat(np.bincount(index)[:, None], 8, axis=1))


def test_half_precision_adds_up_in_single() -> None:
    text = "g (float16[2,3] w, int64[n] i) => (float16[n,3] y) { y = Gather(w, i) }"
    ct = np.full((4097, 3), 1.0, np.float16)  # in half precision, 2048 + 1 is 2048
    index = np.zeros(4097, np.int64)
    (dw,) = vjp(model_of(text), {"w": np.zeros((2, 3), np.float16), "i": index}, ["w"], ct)
    np.testing.assert_array_equal(dw, np.array([[4097] * 3, [0] * 3]).astype(np.float16))


def test_unique_gives_the_gradient_to_the_first_of_equals() -> None:
    model = model_of("g (float[5] x) => (float[j] y) { y = Unique(x) }")
    x = np.array([3, 1, 3, 2, 1], np.float32)
    (dx,) = vjp(model, {"x": x}, ["x"], np.array([5, 6, 7], np.float32))
    np.testing.assert_array_equal(dx, [7, 5, 0, 6, 0])
