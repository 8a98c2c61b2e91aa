"""The arguments of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from onnxtrain import __version__
from onnxtrain.cli.interrupt import ends_at_once

LOSSES = {
    "cross-entropy": "CrossEntropyLoss",
    "mse": "MSELoss",
    "l1": "L1Loss",
    "bce": "BCEWithLogitsLoss",
    "huber": "HuberLoss",
    "smooth-l1": "SmoothL1Loss",
    "nll": "NLLLoss",
    "kl": "KLDivLoss",
}
OPTIMIZERS = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "lion": "Lion",
}
SCHEDULES = ("linear", "cosine", "constant", "exponential", "step", "onecycle", "plateau")
SHELLS = ("bash", "zsh", "fish")


def _file(text: str) -> str:
    """Take the name of a file or folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def _count(text: str) -> int:
    """Take a whole number of at least 1."""
    return _whole(text, 1)


def _seed(text: str) -> int:
    """Take a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return number


def _rate(text: str) -> float:
    """Take a finite number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="onnxtrain", description="Train ONNX models on the stock onnxruntime.",
        epilog="onnxtrain COMMAND --help says more about each.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"onnxtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _inspect, _prepare, _train, _eval, _export, _checkpoint, _gradient, _ops, _demo,
        _completion,
    ):  # fmt: skip
        add(commands)
    return parser


def _calls(module: str, function: str) -> Callable[..., int]:
    """Return a function that imports a command and runs it."""

    def run(*given: Any) -> int:
        with ends_at_once():
            command = getattr(import_module(f"onnxtrain.cli.{module}"), function)
        code: int = command(*given)
        return code

    return run


def _command(
    commands: Any, name: str, module: str, help: str, *, function: str = "", text: str = ""
) -> Parser:
    parser: Parser = commands.add_parser(name, help=help, description=text or help)
    parser.add_argument("--json", action="store_true", help="write the result as JSON")
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress, no report")
    parser.set_defaults(run=_calls(module, function or f"{name}_command"))
    return parser


def _inspect(commands: Any) -> None:
    add = _command(
        commands, "inspect", "workstation",
        "what of a model would train, what has no gradient, sizes and memory",
    ).add_argument  # fmt: skip
    add("model", type=_file, help="an .onnx file")
    add("--of", metavar="OUTPUT", help="the output that the loss will be computed from")
    add("--weights", action="store_true", help="list every weight by name")
    add("--size", action="append", default=[], metavar="NAME=N", help="a symbolic dimension")
    add("--bn", choices=("batch", "frozen"), help="the mode of BatchNormalization")


def _prepare(commands: Any) -> None:
    add = _command(
        commands, "prepare", "workstation", "write the artifacts that a device trains from"
    ).add_argument
    add("model", type=_file, help="an .onnx file")
    add("--output", "-o", type=_file, required=True, metavar="FOLDER", help="where to write them")
    add("--loss", choices=LOSSES, default="cross-entropy", help="cross-entropy unless given")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="adamw unless given")
    add("--train", action="append", metavar="PATTERN", help="what trains, such as 'head.*'")
    add("--freeze", action="append", metavar="PATTERN", help="what does not train")
    add("--classes", type=_count, metavar="N", help="replace the last layer by one for N classes")
    add("--after", metavar="NAME", help="the value to put that new layer behind")
    add("--of", metavar="NAME", help="the value that the loss is computed from")
    add("--bn", choices=("batch", "frozen"), help="the mode of BatchNormalization")
    add("--target", choices=("cpu", "webgpu"), default="cpu", help="what the graphs are to run on")
    add("--weight-decay", type=_rate, default=0.0, metavar="X")
    add("--momentum", type=_rate, metavar="X", help="of sgd and rmsprop")
    add("--clip-norm", type=_rate, metavar="X", help="clip the norm of the gradients")
    add("--memory-budget", metavar="X", help="what a step may take: 300MB, or 50%% of what it does")
    add("--size", action="append", default=[], metavar="NAME=N", help="a dimension it is meant for")
    add("--ort-format", action="store_true", help="write .ort files too")


def _train(commands: Any) -> None:
    parser = _command(
        commands, "train", "device", "train from a folder of artifacts",
        text="Train from a folder of artifacts. The run is saved after each epoch and on Ctrl-C; "
        "--resume goes on with it.",
    )  # fmt: skip
    add = parser.add_argument
    add("artifacts", type=_file, help="the folder that prepare wrote")
    _data(parser, "--data", required=True, help="what to train with")
    _data(parser, "--validation", "--eval", help="what to evaluate with after each epoch")
    add("--epochs", type=_count, default=1, metavar="N")
    add("--batch-size", type=_count, default=32, metavar="N")
    add("--lr", type=_rate, metavar="X", help="the learning rate; 0.001 unless given")
    add("--schedule", choices=SCHEDULES, help="how the learning rate changes")
    add("--warmup", type=_rate, metavar="X", help="the part of all steps that warms up, such as .1")
    add("--accumulate", type=_count, default=1, metavar="N", help="batches to one update")
    add("--cache-features", action="store_true", help="run frozen layers once over the data")
    add(
        "--early-stopping", type=_count, metavar="N",
        help="stop after N epochs without improvement",
    )  # fmt: skip
    add(
        "--checkpoint", type=_file, metavar="FILE",
        help="where to save the run; FOLDER/trained unless given",
    )  # fmt: skip
    add("--checkpoint-every", type=_count, metavar="N", help="save each N steps as well")
    add("--from", dest="start", type=_file, metavar="FILE", help="a checkpoint to start from")
    again = parser.add_mutually_exclusive_group().add_argument
    again("--resume", action="store_true", help="go on with the run, if there is one")
    again("--restart", action="store_true", help="begin anew, and replace the run that is there")
    add("--plot", type=_file, metavar="PICTURE", help="draw loss and metrics (.png, .svg, .pdf)")
    add("--seed", type=_seed, default=0, metavar="N")
    _how_to_read(parser)
    _metrics(parser)


def _eval(commands: Any) -> None:
    parser = _command(commands, "eval", "device", "loss and metrics of a trained model")
    parser.add_argument("artifacts", type=_file, help="the folder that prepare wrote")
    _data(parser, "--data", required=True, help="what to evaluate with")
    parser.add_argument("--batch-size", type=_count, default=32, metavar="N")
    _which_checkpoint(parser)
    _how_to_read(parser)
    _metrics(parser)


def _export(commands: Any) -> None:
    parser = _command(commands, "export", "device", "write a model for inference")
    add = parser.add_argument
    add("artifacts", type=_file, help="the folder that prepare wrote")
    add("--output", "-o", type=_file, required=True, metavar="FILE", help="the model to write")
    add("--outputs", action="append", metavar="NAME", help="values that the model is to give out")
    add("--format", choices=("onnx", "ort"), default="onnx")
    add("--optimize", action="store_true", help="save what onnxruntime's optimisations make of it")
    _which_checkpoint(parser)


def _checkpoint(commands: Any) -> None:
    parser = commands.add_parser("checkpoint", help="look into a checkpoint")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = _command(
        actions, "show", "device", "parameters, optimizer and properties of a checkpoint",
        function="checkpoint_command",
    )  # fmt: skip
    show.add_argument("checkpoint", type=_file, help="a checkpoint, or a folder of artifacts")


def _gradient(commands: Any) -> None:
    add = _command(
        commands, "gradient", "workstation", "extend a model by the gradient of an output"
    ).add_argument
    add("model", type=_file, help="an .onnx file")
    add("--wrt", action="append", required=True, metavar="NAME", help="an input or a weight")
    add("--of", metavar="OUTPUT", help="the output to differentiate; the first unless given")
    add("--straight-through", action="append", default=[], metavar="OP", help="such as Round")
    add("--bn", choices=("batch", "frozen"), help="the mode of BatchNormalization")
    add("--output", "-o", type=_file, required=True, metavar="FILE", help="the model to write")


def _ops(commands: Any) -> None:
    add = _command(
        commands, "ops", "workstation", "how each operator of ONNX is differentiated"
    ).add_argument
    add("op", nargs="*", help="these operators alone")
    add("--how", choices=("rule", "expanded", "rewritten", "zero", "refused"))


def _demo(commands: Any) -> None:
    add = _command(
        commands, "demo", "demo.command", "the whole story on handwritten digits"
    ).add_argument
    add(
        "--output", "-o", type=_file, default="onnxtrain-demo", metavar="FOLDER",
        help="where files go",
    )  # fmt: skip
    add("--seed", type=_seed, default=0, metavar="N")


def _completion(commands: Any) -> None:
    parser = _command(
        commands, "completion", "completion", "the completion of these commands for a shell",
        text='Write the completion for a shell: eval "$(onnxtrain completion bash)" in ~/.bashrc, '
        "the same with zsh in ~/.zshrc; onnxtrain completion fish | source.",
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS)


# ---- what several commands have ------------------------------------------------------------------


def _data(parser: Parser, *names: str, required: bool = False, help: str = "") -> None:
    parser.add_argument(
        *names, nargs="+", type=_file, required=required, metavar="FILE",
        help=f"{help}: one .npz, .csv or folder of images; or .npy files, in the order of the "
        "model's inputs or as NAME=FILE",
    )  # fmt: skip


def _how_to_read(parser: Parser) -> None:
    add = parser.add_argument
    add("--map", action="append", default=[], metavar="INPUT=ARRAY", help="names inside an .npz")
    add("--label", metavar="COLUMN", help="the column of a CSV that holds labels")
    add("--columns", metavar="A,B,C", help="the columns of a CSV that are fed to the model")
    add("--image-size", type=_count, metavar="N", help="where the model takes images of any size")
    add("--mean", metavar="X,Y,Z", help="subtracted from pixels, which are from 0 to 1")
    add("--std", metavar="X,Y,Z", help="pixels are divided by it afterwards")


def _metrics(parser: Parser) -> None:
    add = parser.add_argument
    add("--metric", action="append", metavar="NAME", help="accuracy, top5, f1, confusion, mae ...")
    add("--metric-output", metavar="NAME", help="the output that metrics look at")


def _which_checkpoint(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint", type=_file, metavar="FILE",
        help="the parameters to take; FOLDER/trained, if it is there, or FOLDER/checkpoint",
    )  # fmt: skip
