"""What trains by default is what torch calls parameters, whichever exporter wrote the model."""

import re
from pathlib import Path

import onnx
import pytest
import torch

import onnxtrain
from exporting import EXPORTERS, export
from onnxtrain.errors import UnknownNameError
from onnxtrain.offline.report import Report
from selection_networks import NETWORKS

FORMS = (*EXPORTERS, "torchscript-folded")  # which renames matrices as well
# Parameters that are only added to data look like the table of a positional encoding.
ADDED = {("vision", form): {"positions"} for form in FORMS if form.startswith("torchscript")}
HAS_MODES = ("convolutional", "normalized", "preactivated")
CASES = [
    (name, form, training)
    for name in NETWORKS
    for form in FORMS
    for training in ((False, True) if name in HAS_MODES and form in EXPORTERS[:2] else (False,))
]


def exported(name: str, exporter: str, training: bool) -> tuple[torch.nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    make, data = NETWORKS[name]
    net = make().train(training)
    return net, export(net, data(), exporter)


def names_in_torch(report: Report) -> set[str]:
    """Return the names of what trains, those that an exporter folded into one included."""
    return {n for w in report.weights for n in (w, *report.tensors[w].modules)}


@pytest.mark.parametrize(
    ("name", "exporter", "training"), CASES, ids=[f"{n}-{f}-{'train' * t}" for n, f, t in CASES]
)
def test_the_parameters_of_the_module_train(name: str, exporter: str, training: bool) -> None:
    net, model = exported(name, exporter, training)
    report = onnxtrain.inspect(model)
    parameters = {n for n, _ in net.named_parameters()}
    if exporter in ("dynamo-optimized", "torchscript-folded"):
        parameters = {n for n in parameters if not n.startswith("bn")}  # folded into conv
    if exporter == "torchscript-folded":
        parameters = {re.sub(r"parametrizations\.weight\..*", "weight", n) for n in parameters}
    left_out = ADDED.get((name, exporter), set())
    found = names_in_torch(report)
    assert parameters - found == left_out
    allowed = parameters | {"conv1.bias"}  # of the folded bn1
    assert all({w, *report.tensors[w].modules} & allowed for w in report.weights)
    assert not found & {n for n, _ in net.named_buffers()}
    for missing in left_out:
        assert "train=" in report.reasons[missing] and "added to data" in report.reasons[missing]
    if name != "bag" or not exporter.startswith("dynamo"):  # which write a Loop over a sequence
        assert report.can_train and report.verdict.startswith("trains wholly")


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_buffer_trains_by_name_only(exporter: str, tmp_path) -> None:
    _, model = exported("convolutional", exporter, False)
    default = onnxtrain.prepare(model, tmp_path / "a", loss="mse")
    assert "pixel_std" not in default.trainable
    named = onnxtrain.prepare(model, tmp_path / "b", loss="mse", train=["pixel_std", "fc.bias"])
    assert set(named.trainable) == {"pixel_std", "fc.bias"}


# ---- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", FORMS)
def test_patterns_find_matrices_that_were_renamed(exporter: str, tmp_path) -> None:
    net, model = exported("text", exporter, False)
    trained = onnxtrain.prepare(model, tmp_path / "a", train=["query.*", "up.*"])
    sizes = [net.query.weight.numel(), net.query.bias.numel(), net.up.weight.numel()]
    assert sorted(trained.trainable.values()) == sorted(sizes)
    exact = onnxtrain.prepare(model, tmp_path / "b", train="query.weight")
    assert list(exact.trainable.values()) == [net.query.weight.numel()]
    frozen = onnxtrain.prepare(model, tmp_path / "c", freeze=["words.*", "[!h]*"])
    assert sum(frozen.trainable.values()) == sum(p.numel() for p in net.head.parameters())


@pytest.mark.parametrize("exporter", FORMS)
def test_modules_of_recurrent_layers(exporter: str, tmp_path) -> None:
    net, model = exported("LSTM", exporter, False)
    made = onnxtrain.prepare(model, tmp_path / "a", train="rnn.*")
    assert made.parameter_count == sum(p.numel() for p in net.rnn.parameters())
    second = onnxtrain.prepare(model, tmp_path / "b", train="rnn.*_l1")
    own = [p for n, p in net.rnn.named_parameters() if n.endswith("_l1")]
    assert second.parameter_count == sum(p.numel() for p in own)


def without_scopes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Take away what tells the module of a node, as older exporters and optimizers do."""
    for number, node in enumerate(model.graph.node):
        node.name = f"node{number}"
    return model


def test_a_bias_without_its_matrix_is_an_error(tmp_path) -> None:
    net, model = exported("text", "torchscript-folded", False)
    model = without_scopes(model)
    onnxtrain.prepare(model, tmp_path / "a", train="*.bias")
    onnxtrain.prepare(model, tmp_path / "b", train=["query.bias"])
    found = onnxtrain.prepare(model, tmp_path / "c", train="query.*")
    sizes = [net.query.weight.numel(), net.query.bias.numel()]
    assert sorted(found.trainable.values()) == sorted(sizes)  # the name of the bias tells
    for tensor in model.graph.initializer:
        if tensor.name == "query.bias":
            tensor.name = "qbias"
    for node in model.graph.node:
        node.input[:] = ["qbias" if n == "query.bias" else n for n in node.input]
    with pytest.raises(UnknownNameError, match=r"'q\*' takes the bias 'qbias' .*'onnx::MatMul_"):
        onnxtrain.prepare(model, tmp_path / "d", train="q*")
    with pytest.raises(UnknownNameError, match=r"freeze='q\*' takes the bias 'qbias'"):
        onnxtrain.prepare(model, tmp_path / "d", freeze="q*")


def test_a_pattern_without_a_match_names_what_is_near(tmp_path) -> None:
    _, model = exported("text", "torchscript-folded", False)
    with pytest.raises(UnknownNameError, match=r"'qurey\.\*' cannot train: .*'query\.\w+'"):
        onnxtrain.prepare(model, tmp_path, train="qurey.*")
    with pytest.raises(UnknownNameError, match=r"nothing to freeze: 'qurey\.\*'.*'query\.\w+'"):
        onnxtrain.prepare(model, tmp_path, freeze="qurey.*")


class Tagger(torch.nn.Module):
    """A recurrent layer, whose state begins with zeros, and a factor that is learned."""

    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.last = kind(5, 6, batch_first=True), torch.nn.Linear(6, 3)
        self.factor = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(x)[0]) * self.factor


@pytest.mark.parametrize("exporter", FORMS)
@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_zeros_that_a_recurrent_layer_begins_with_are_not_in_doubt(
    kind: type[torch.nn.Module], exporter: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    given = export(Tagger(kind).eval(), torch.randn(4, 7, 5), exporter)
    made = onnxtrain.prepare(given, tmp_path, loss="mse")
    doubts = [note for note in made.notes if "may be learned" in note]
    # The older exporter does not tell what torch calls a parameter.
    expected = exporter.startswith("torchscript")
    assert len(doubts) == expected and all("train: 'factor'. If" in note for note in doubts)
