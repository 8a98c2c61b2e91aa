"""The arguments of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from onnxtrain import __version__
from onnxtrain.cli.interrupt import ends_at_once
from onnxtrain.cli.shared_options import (
    add_batch_size,
    add_checkpoint,
    add_data,
    add_metrics,
    add_reading,
)
from onnxtrain.cli.shared_options import count as _count
from onnxtrain.cli.shared_options import file_name as _file
from onnxtrain.cli.shared_options import seed as _seed
from onnxtrain.errors import printable


class Named(tuple[str, ...]):
    """Names that settings may follow, "huber:delta=0.5"; "none" and files are taken as well."""

    def __contains__(self, text: object) -> bool:
        name = str(text).partition(":")[0].replace("_", "-")
        return name == "none" or name in tuple(self) or Path(str(text)).is_file()


LOSSES = Named(
    ("cross-entropy", "next-token", "mse", "l1", "bce", "huber", "smooth-l1", "nll", "kl")
)
OPTIMIZERS = Named(("adamw", "adam", "sgd", "rmsprop", "adagrad", "lion", "mezo"))
SCHEDULES = ("linear", "cosine", "constant", "exponential", "step", "onecycle", "plateau")
SHELLS = ("bash", "zsh", "fish")


def _classes(text: str) -> int | list[str]:
    """Take a number of classes, or their names."""
    return text.split(",") if "," in text else _count(text)


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
        self.exit(2, printable(f"{self.prog}: {message}; see {self.prog} --help\n"))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; what no command knows is an error of the command."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.prog = f"onnxtrain {getattr(options, 'command', '')}".strip()
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options


def make_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="onnxtrain", description="Train ONNX models on the stock onnxruntime.",
        epilog="onnxtrain COMMAND --help says more about each.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"onnxtrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (
        _inspect, _prepare, _train, _eval, _export, _predict, _compare, _checkpoint, _adapter,
        _gradient, _ops, _demo, _doctor, _completion,
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


_LIMIT = "how much a model that you trust may ask for, such as inlined_nodes=1000000"


def _inspect(commands: Any) -> None:
    add = _command(
        commands, "inspect", "workstation",
        "show whether a model trains, what of it and why, and the memory of a step",
    ).add_argument  # fmt: skip
    add("model", type=_file, help="an .onnx file")
    add("--of", metavar="OUTPUT", help="the output that the loss reads")
    add("--weights", action="store_true", help="list every weight by name, and why it is one")
    add("--all", action="store_true", help="list every tensor, and why it trains or does not")
    add("--train", action="append", metavar="WORD", help="tell what this choice takes: lora, bias")
    add("--choices", action="store_true", help="tell what each word for --train takes")
    add("--quantize", metavar="WORD", help="tell which operators will run on integers: int8")
    add("--size", action="append", metavar="NAME=N", help="size of a symbolic dimension")
    add("--bn", choices=("batch", "frozen"), help="the mode of BatchNormalization")
    add("--limit", action="append", metavar="NAME=N", help=_LIMIT)


def _prepare(commands: Any) -> None:
    parser = _command(
        commands, "prepare", "workstation", "write the artifacts that a device trains from"
    )
    add = parser.add_argument
    add("model", type=_file, help="an .onnx file")
    add("--output", "-o", type=_file, required=True, metavar="FOLDER", help="the folder to write")
    add(
        "--loss", choices=LOSSES, default="cross-entropy",
        help="default: cross-entropy; with settings huber:delta=0.5; none: the output is the loss",
    )  # fmt: skip
    add(
        "--optimizer", choices=OPTIMIZERS, default="adamw",
        help="default: adamw; with settings sgd:nesterov=True,momentum=0.9; or none",
    )  # fmt: skip
    add(
        "--train", action="append", metavar="WORD",
        help="what to train: lora, lora:rank=8,alpha=16, bias, norm, head, last:3, sparse:200MB, "
             "'encoder.*'",
    )  # fmt: skip
    add("--freeze", action="append", metavar="PATTERN", help="weights to freeze")
    add(
        "--classes", type=_classes, metavar="N",
        help="replace the last layer for N classes, or for those named: cat,dog",
    )  # fmt: skip
    add("--after", metavar="NAME", help="the value that the new layer reads")
    add("--of", action="append", metavar="NAME", help="a value that the loss reads")
    add("--outputs", action="append", metavar="NAME", help="a value to return beside the loss")
    add(
        "--dynamic-batch", action="store_true",
        help="let a model that was exported for one batch size take any, if it can",
    )  # fmt: skip
    add(
        "--bn", choices=("auto", "batch", "frozen", "model"), default="auto",
        help="statistics of BatchNormalization; auto: stored ones where its weights are frozen",
    )  # fmt: skip
    add(
        "--no-tie-weights", dest="tie_weights", action="store_false",
        help="train matrices of equal values apart",
    )  # fmt: skip
    add("--target", choices=("cpu", "cuda", "webgpu"), default="cpu", help="where the graphs run")
    add(
        "--no-native", dest="native", action="store_false",
        help="write plain graphs, without functions for native kernels",
    )  # fmt: skip
    add(
        "--precision", choices=("float32", "bf16"), default="float32",
        help="what native kernels multiply in",
    )  # fmt: skip
    add("--quantize", metavar="WORD", help="train for int8, int8:method=mse or int4-weights")
    add_data(parser, "--calibration", help="samples that the ranges of integers come from")
    add_reading(parser.add_argument_group("how --calibration is read"))
    add("--weight-decay", type=_rate, metavar="X")
    add("--momentum", type=_rate, metavar="X", help="of sgd and rmsprop")
    add("--clip-norm", type=_rate, metavar="X", help="clip the norm of the gradients")
    add("--memory-budget", metavar="X", help="memory of a step: 300MB, or 50%% of the default")
    add("--size", action="append", metavar="NAME=N", help="a dimension, for the budget")
    add("--proximal", action="store_true", help="updates have FedProx's proximal term")
    add("--sample-weight", action="store_true", help="samples and classes can have weights")
    add("--prefix", default="", metavar="TEXT", help="what the names of the files begin with")
    add("--nominal-checkpoint", action="store_true", help="write a checkpoint without data too")
    add("--ort-format", action="store_true", help="write .ort files too")
    add("--custom-op-library", type=_file, metavar="FILE", help="the model's own operators")
    add(
        "--no-verify", dest="verify", action="store_false",
        help="do not load the graphs in onnxruntime before they are written",
    )  # fmt: skip
    add("--limit", action="append", metavar="NAME=N", help=_LIMIT)


def _train(commands: Any) -> None:
    parser = _command(
        commands, "train", "device", "train from a folder of artifacts",
        text="Train from a folder of artifacts. The run is saved after each epoch and on Ctrl-C; "
        "--resume goes on with it.",
    )  # fmt: skip
    add = parser.add_argument
    add("artifacts", type=_file, help="the folder that prepare wrote")
    add_data(parser, "--data", required=True, help="what to train with")
    add_data(parser, "--validation", "--eval", help="what to evaluate with after each epoch")
    add("--epochs", type=_count, default=1, metavar="N")
    add_batch_size(parser)
    add("--lr", type=_rate, metavar="X", help="the learning rate; 0.001 unless given")
    add("--schedule", choices=SCHEDULES, help="how the learning rate changes")
    add("--warmup", type=_rate, metavar="X", help="the part of all steps that warms up, such as .1")
    add("--accumulate", type=_count, metavar="N", help="batches to one update")
    add("--max-steps", type=_count, metavar="N", help="end the run after N updates")
    add(
        "--class-weight", metavar="X", help="'balanced', or a weight for each class, such as "
        "1,2.5,1; needs prepare --sample-weight",
    )  # fmt: skip
    add(
        "--nonfinite", choices=("stop", "skip"), default="stop",
        help="what to do with batches whose loss or gradients are infinite or NaN",
    )  # fmt: skip
    add("--tensorboard", type=_file, metavar="FOLDER", help="write event files for TensorBoard")
    add("--cache-features", action="store_true", help="run frozen layers once over the data")
    add("--replay", metavar="N", help="keep N old samples, or 5MB of them, and mix them in")
    add(
        "--head", choices=("ridge", "class-means"),
        help="take no steps: compute the last layer from one pass over the data",
    )  # fmt: skip
    add("--add", action="store_true", help="let class means keep the samples of earlier calls")
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
    add(
        "--no-native", dest="native", action="store_false",
        help="do not use the kernels of onnxtrain-native",
    )  # fmt: skip
    add_reading(parser)
    add_metrics(parser)


def _eval(commands: Any) -> None:
    parser = _command(commands, "eval", "device", "loss and metrics of a trained model")
    parser.add_argument("artifacts", type=_file, help="the folder that prepare wrote")
    add_data(parser, "--data", required=True, help="what to evaluate with")
    add_batch_size(parser)
    add_checkpoint(parser)
    add_reading(parser)
    add_metrics(parser)


def _export(commands: Any) -> None:
    parser = _command(commands, "export", "device", "write a model for inference")
    add = parser.add_argument
    add("artifacts", type=_file, help="the folder that prepare wrote")
    add("--output", "-o", type=_file, required=True, metavar="FILE", help="the model to write")
    add("--outputs", action="append", metavar="NAME", help="values that the model is to give out")
    add("--format", choices=("onnx", "ort"), default="onnx")
    add("--optimize", action="store_true", help="save what onnxruntime's optimisations make of it")
    add("--allow-nonfinite", action="store_true", help="write infinite and NaN parameters too")
    add_checkpoint(parser)


def _predict(commands: Any) -> None:
    parser = _command(commands, "predict", "predict", "classes of images, or other outputs")
    add = parser.add_argument
    add("model", type=_file, help="an .onnx or .ort file, or the folder that prepare wrote")
    add(
        "inputs", nargs="+", type=_file, metavar="INPUT",
        help="images and folders of images; or one .npz or .csv; or .npy files",
    )  # fmt: skip
    add("--top", type=_count, default=3, metavar="N", help="how many classes to show; default: 3")
    add("--of", metavar="OUTPUT", help="the output to show")
    add("--output", "-o", type=_file, metavar="FILE", help="write the outputs to an .npz file too")
    add("--batch-size", type=_count, default=32, metavar="N")
    add_reading(parser)


def _compare(commands: Any) -> None:
    parser = _command(
        commands, "compare", "compare", "two models: accuracy, size, speed, error of each layer"
    )
    add = parser.add_argument
    add("first", type=_file, help="the .onnx file to measure against, such as the model of floats")
    add("second", type=_file, help="the other .onnx file, such as the model of integers")
    add_data(parser, "--data", required=True, help="what both run on, with labels or without")
    add_batch_size(parser)
    add("--layers", type=_seed, default=10, metavar="N", help="show the N worst; default: 10")
    add("--threads", type=_seed, default=0, metavar="N", help="default: as onnxruntime chooses")
    add("--no-latency", dest="latency", action="store_false", help="do not measure the time")
    add_reading(parser)
    add_metrics(parser)


def _checkpoint(commands: Any) -> None:
    parser = commands.add_parser("checkpoint", help="look into a checkpoint")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = _command(
        actions, "show", "device", "parameters, optimizer and properties of a checkpoint",
        function="checkpoint_command",
    )  # fmt: skip
    show.add_argument("checkpoint", type=_file, help="a checkpoint, or a folder of artifacts")


def _adapter(commands: Any) -> None:
    parser = commands.add_parser("adapter", help="show, convert, stack and merge adapters of LoRA")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(action: str, help: str, *inputs: tuple[str, str], output: str = "") -> Parser:
        made = _command(actions, action, "adapter", help, function=f"{action}_command")
        for name, what in inputs:
            more: dict[str, Any] = {"nargs": "+"} if name == "adapters" else {}
            made.add_argument(name, type=_file, help=what, **more)
        if output:
            made.add_argument(
                "--output", "-o", type=_file, required=True, metavar="FILE", help=output
            )
        return made

    file = "an .onnx_adapter file, or a folder of PEFT"
    add("show", "layers, rank and size of an adapter", ("adapter", file)).add_argument(
        "--fits", type=_file, metavar="MODEL", help="say whether it fits this model with slots"
    )
    written = "the .onnx_adapter file to write, or another name for a folder of PEFT"
    folder = "the folder that prepare wrote, with train lora"
    export = add("export", "the adapter of a run", ("artifacts", folder), output=written)
    add_checkpoint(export)
    export.add_argument("--allow-nonfinite", action="store_true", help="infinite factors too")
    convert = add("convert", "between formats and types", ("adapter", file), output=written)
    convert.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    stack = add("stack", "several adapters in one", ("adapters", file), output=written)
    stack.add_argument(
        "--weight", type=float, action="append", metavar="X", help="of each, in their order"
    )
    merge = add(
        "merge", "put an adapter into its model", ("model", "the model that it was trained on"),
        ("adapter", file), output="the model to write",
    )  # fmt: skip
    merge.add_argument(
        "--merge", choices=("auto", "float", "quantized", "factors"), default="auto",
        help="auto: float weights are changed, quantized ones keep the factors beside them",
    )  # fmt: skip


def _gradient(commands: Any) -> None:
    add = _command(
        commands, "gradient", "workstation", "add gradients to a model, as further outputs"
    ).add_argument
    add("model", type=_file, help="an .onnx file")
    add("--wrt", action="append", required=True, metavar="NAME", help="input or weight")
    add("--of", metavar="OUTPUT", help="the output to differentiate; default: the first")
    add(
        "--straight-through", action="append", default=[], metavar="OP",
        help="an operator to treat as the identity, such as Round",
    )  # fmt: skip
    add("--bn", choices=("batch", "frozen"), help="the mode of BatchNormalization")
    add("--limit", action="append", metavar="NAME=N", help=_LIMIT)
    add("--output", "-o", type=_file, required=True, metavar="FILE", help="the model to write")


def _ops(commands: Any) -> None:
    add = _command(
        commands, "ops", "workstation", "list the ONNX operators and how each is differentiated"
    ).add_argument
    add("op", nargs="*", help="only these operators")
    add("--how", choices=("rule", "expanded", "rewritten", "zero", "refused"))


def _demo(commands: Any) -> None:
    does = "pretrain, personalize on a device, export: handwritten digits"
    add = _command(commands, "demo", "demo.story", does).add_argument
    add(
        "--output", "-o", type=_file, default="onnxtrain-demo", metavar="FOLDER",
        help="the folder to write",
    )  # fmt: skip
    add("--seed", type=_seed, default=0, metavar="N")


def _doctor(commands: Any) -> None:
    add = _command(
        commands, "doctor", "doctor",
        "show what training runs on: onnxruntime, the processor, native kernels",
    ).add_argument  # fmt: skip
    add("artifacts", nargs="?", type=_file, help="show which kernels run for this folder, too")


def _completion(commands: Any) -> None:
    parser = _command(
        commands, "completion", "completion", "print the completion script of a shell",
        text='Print the completion script of a shell. bash: eval "$(onnxtrain completion bash)" in '
        "~/.bashrc; zsh: the same in ~/.zshrc; fish: onnxtrain completion fish | source.",
    )  # fmt: skip
    parser.add_argument("shell", choices=SHELLS)
