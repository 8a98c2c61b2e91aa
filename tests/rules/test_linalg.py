"""Specs of rules/linalg.py."""

import numpy as np
import pytest

from gradcheck import Spec, check_spec, ids

SPECS = [
    Spec("MatMul", [(2, 3), (3, 4)], eps=1.0),
    Spec("MatMul", [(5, 2, 3), (3, 4)], id="batch-by-matrix", eps=1.0),
    Spec("MatMul", [(2, 3), (5, 3, 4)], id="matrix-by-batch", eps=1.0),
    Spec("MatMul", [(5, 2, 3), (5, 3, 4)], id="batched", eps=1.0),
    Spec("MatMul", [(6, 1, 2, 3), (5, 3, 4)], id="broadcast-batches", eps=1.0),
    Spec("MatMul", [(2, 3), (3,)], id="matrix-by-vector", eps=1.0),
    Spec("MatMul", [(3,), (3, 4)], id="vector-by-matrix", eps=1.0),
    Spec("MatMul", [(3,), (3,)], id="vector-by-vector", eps=1.0),
    Spec("MatMul", [(5, 2, 3), (3,)], id="batch-by-vector", eps=1.0),
    Spec("MatMul", [(3,), (5, 3, 4)], id="vector-by-batch", eps=1.0),
    Spec("Gemm", [(2, 3), (3, 4)], id="no-bias", eps=1.0),
    Spec("Gemm", [(2, 3), (3, 4), (4,)], {"alpha": 0.5, "beta": 2.0}, eps=1.0),
    Spec("Gemm", [(3, 2), (3, 4), (2, 1)], {"transA": 1, "alpha": 0.5}, id="tn", eps=1.0),
    Spec("Gemm", [(2, 3), (4, 3), ()], {"transB": 1}, id="nt", eps=1.0),
    Spec("Gemm", [(3, 2), (4, 3), (2, 4)], {"transA": 1, "transB": 1}, id="tt", eps=1.0),
    Spec("Einsum", [(2, 3), (3, 4)], {"equation": "ij,jk->ik"}, id="matmul", eps=1.0),
    Spec("Einsum", [(2, 3), (3, 4)], {"equation": "ij, jk"}, id="implicit", eps=1.0),
    Spec("Einsum", [(2, 3)], {"equation": "ij->ji"}, id="transpose", eps=1.0),
    Spec("Einsum", [(2, 3)], {"equation": "ij->i"}, id="row-sum", eps=1.0),
    Spec("Einsum", [(2, 3)], {"equation": "ij->"}, id="sum", eps=1.0),
    Spec("Einsum", [(3, 3)], {"equation": "ii->i"}, id="diagonal", eps=1.0),
    Spec("Einsum", [(3, 3)], {"equation": "ii->"}, id="trace", eps=1.0),
    Spec("Einsum", [(3,), (4,)], {"equation": "i,j->ij"}, id="outer", eps=1.0),
    Spec("Einsum", [(2, 3, 4), (2, 5, 4)], {"equation": "bid,bjd->bij"}, id="batched", eps=1.0),
    Spec("Einsum", [(2, 4, 3), (3, 5)], {"equation": "...ij,jk->...ik"}, id="ellipsis", eps=1.0),
    Spec("Einsum", [(2, 3, 4), (1, 4, 5)], {"equation": "...ij,...jk->...ik"},
         id="ellipsis-broadcast", eps=1.0),
    Spec("Einsum", [(2, 3), (3, 4), (4, 2)], {"equation": "ij,jk,ki->i"}, id="three", eps=1.0),
    Spec("Einsum", [(2, 3), (4,)], {"equation": "ij,k->i"}, id="summed-away", eps=1.0),
    Spec("Einsum", [(2, 3, 3)], {"equation": "bii->b"}, id="batched-trace", eps=1.0),
    # The size of a matrix must be static for Det.
    Spec("Det", [(3, 3)], eps=1e-3, symbolic=False),
    Spec("Det", [(2, 4, 4)], id="batched", symbolic=False),
    Spec("Det", [(2, 1, 1)], id="one", eps=1.0, symbolic=False),
    Spec("Det", [np.array([[1, 2], [2, 4]], np.float32)], id="singular", symbolic=False),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=ids)
def test_gradient(spec: Spec) -> None:
    check_spec(spec)


@pytest.mark.parametrize("spec", [s for s in SPECS if s.symbolic], ids=ids)
def test_gradient_with_symbolic_dimensions(spec: Spec) -> None:
    check_spec(spec, symbolic=True)
