"""Options that several commands have, and the kinds of what is given to them."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup
from functools import partial


def file_name(text: str) -> str:
    """Take the name of a file or folder."""
    if not text.strip():
        raise ArgumentTypeError("the name is empty")
    return text


def whole(text: str, least: int) -> int:
    """Take a whole number."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return number


count, seed = partial(whole, least=1), partial(whole, least=0)


def add_data(parser: ArgumentParser, *names: str, required: bool = False, help: str = "") -> None:
    """Add an option that takes data files."""
    parser.add_argument(
        *names, nargs="+", type=file_name, required=required, metavar="FILE",
        help=f"{help}: one .npz, .csv or folder of images; or .npy files, in the order of the "
        "model's inputs or as NAME=FILE",
    )  # fmt: skip


def add_batch_size(parser: ArgumentParser) -> None:
    """Add the size of batches."""
    parser.add_argument(
        "--batch-size", type=count, metavar="N", help="default: 32, or the batch of the model"
    )


def add_reading(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add how files of data are read."""
    add = parser.add_argument
    add("--map", action="append", default=[], metavar="INPUT=ARRAY", help="names inside an .npz")
    add("--label", metavar="COLUMN", help="the column of a CSV that holds labels")
    add("--columns", metavar="A,B,C", help="the columns of a CSV that are fed to the model")
    add("--class-names", metavar="A,B,C", help="the names of the classes, from label 0 on")
    add("--image-size", type=count, metavar="N", help="where the model takes images of any size")
    add("--mean", metavar="X,Y,Z", help="subtracted from pixels, which are from 0 to 1")
    add("--std", metavar="X,Y,Z", help="pixels are divided by it afterwards")


def add_metrics(parser: ArgumentParser) -> None:
    """Add the metrics."""
    add = parser.add_argument
    add("--metric", action="append", metavar="NAME", help="accuracy, top5, f1, confusion, mae ...")
    add("--metric-output", metavar="NAME", help="the output that metrics look at")


def add_checkpoint(parser: ArgumentParser) -> None:
    """Add which parameters are taken."""
    parser.add_argument(
        "--checkpoint", type=file_name, metavar="FILE",
        help="the parameters to take; FOLDER/trained, if it is there, or FOLDER/checkpoint",
    )  # fmt: skip
