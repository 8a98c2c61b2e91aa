"""Data for the command line: .npz and .npy files, CSV files, and folders of images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtrain.cli.images import decode, image_files, is_image, read_images, room
from onnxtrain.cli.reading import Array, Data, Reading
from onnxtrain.cli.tables import has_label_column, read_features, read_table
from onnxtrain.device.loop.weights import without_weights
from onnxtrain.errors import InputError
from onnxtrain.format.element_types import ELEMENT_TYPES
from onnxtrain.format.npy import map_npy, npz_names, read_npz

if TYPE_CHECKING:
    from onnxtrain.device.session import TrainingSession
    from onnxtrain.format.model.file import ValueType

_LOOKED_AT = 10**7  # elements; larger arrays are checked batch by batch
# Common names of features and labels, for arrays that are not named after the inputs.
_USUAL = (("x", "y"), ("x", "labels"), ("images", "labels"), ("data", "target"), ("arr_0", "arr_1"),
          ("x_train", "y_train"), ("x_test", "y_test"))  # fmt: skip


def load(paths: Sequence[str], session: TrainingSession, reading: Reading, option: str) -> Data:
    """Read the files of an option and check the arrays against the inputs of training."""
    data = load_inputs(paths, without_weights(session.input_types()), reading, option)
    _check_labels(data.arrays, session, option)
    return data


def load_inputs(
    paths: Sequence[str], inputs: Sequence[ValueType], reading: Reading, option: str
) -> Data:
    """Read the files of an option: an array for each input, the last of which are labels."""
    files = _files(paths, option)
    first = files[0][1]
    where = f"{option}: {first}"
    if len(files) > 1:
        arrays: dict[str, Array] | None = _read_npy(files, inputs, option)
    else:
        arrays = _read_arrays(files, inputs, reading, option)
    if arrays is not None:
        data = Data(arrays, reading)
    elif first.is_dir() or first.suffix.lower() in (".csv", ".tsv"):
        if len(inputs) != 2:
            names = ", ".join(value.name for value in inputs)
            raise InputError(f"{where}: the model has the inputs {names}: use an .npz file")
        read = read_images if first.is_dir() else read_table
        data = read(first, inputs, reading, where)
    else:
        raise InputError(
            f"{option}: {str(first)!r} is neither .npz, .npy, .csv nor a folder of images"
        )
    return replace(data, arrays=_fitting(data.arrays, inputs, where))


def has_labels(
    paths: Sequence[str], inputs: Sequence[ValueType], reading: Reading, option: str
) -> bool:
    """Whether files hold labels beside the inputs of a model."""
    files = _files(paths, option)
    name, first = files[0]
    if name is not None or first.suffix == ".npy":
        return len(files) > len(inputs)
    if first.suffix == ".npz" and first.is_file():
        with _of_option(option):
            return len(npz_names(first)) > len(inputs)
    if first.is_dir():
        return any(inner.is_dir() for inner in first.iterdir())
    return first.suffix.lower() in (".csv", ".tsv") and has_label_column(first, reading, option)


def load_samples(
    paths: Sequence[str], inputs: Sequence[ValueType], reading: Reading, option: str = "INPUT"
) -> tuple[list[str], dict[str, Array]]:
    """Read what a model is to be applied to: the names of the samples, and arrays by input."""
    files = _files(paths, option)
    first = files[0][1]
    where = str(first) if option == "INPUT" else f"{option}: {first}"
    arrays = _read_arrays(files, inputs, reading, option)
    if arrays is not None:
        arrays = _fitting(arrays, inputs, where)
        count = len(next(iter(arrays.values())))
        return [f"{first.name}[{i}]" for i in range(count)], arrays
    is_table = len(files) == 1 and first.suffix.lower() in (".csv", ".tsv")
    images = [path for _, path in files if path.is_dir() or is_image(path)]
    if not is_table and len(images) < len(files):
        other = next(path for _, path in files if path not in images)
        raise InputError(
            f"{str(other)!r} is not an image: give images and folders of them, or one .npz or .csv"
        )
    if len(inputs) != 1:
        listed = ", ".join(value.name for value in inputs)
        raise InputError(f"{where}: the model has the inputs {listed}: use an .npz file")
    if is_table:
        array = read_features(first, reading, where)
        names = [f"{first.name}, row {i + 2}" for i in range(len(array))]
    else:
        found = image_files(images, where)
        array = decode(found, inputs[0], reading.about, where)
        names = [str(path) for path in found]
    return names, _fitting({inputs[0].name: array}, inputs, where)


def _files(paths: Sequence[str], option: str) -> list[tuple[str | None, Path]]:
    """Split NAME=FILE, and check that the files are there."""
    files = [_named(text) for text in paths]
    for _, path in files:
        if not path.exists():
            raise InputError(f"{option}: {str(path)!r} does not exist")
    return files


# ---- arrays in files -----------------------------------------------------------------------------


def _read_arrays(
    files: Sequence[tuple[str | None, Path]],
    inputs: Sequence[ValueType],
    reading: Reading,
    option: str,
) -> dict[str, Array] | None:
    """Read .npz and .npy files; None if these are no such files."""
    name, first = files[0]
    if name is not None or first.suffix == ".npy":
        return _read_npy(files, inputs, option)
    if first.suffix == ".npz" and first.is_file() and len(files) == 1:
        return _read_npz(first, inputs, reading.names, option)
    return None


def _read_npy(
    files: Sequence[tuple[str | None, Path]], inputs: Sequence[ValueType], option: str
) -> dict[str, Array]:
    """Memory-map one array per file; only the rows of a batch are read."""
    names = [value.name for value in inputs]
    if len(files) != len(inputs):
        raise InputError(
            f"{option}: the model has the inputs {', '.join(names)}: give one .npy for each, not "
            f"{len(files)}"
        )
    given = [name for name, _ in files if name is not None]
    if given and sorted(given) != sorted(names):
        raise InputError(f"{option}: the inputs of the model are {', '.join(names)}")
    found = {}
    for position, (name, path) in enumerate(files):
        with _of_option(option):
            found[name if name is not None else names[position]] = map_npy(path)
    return found


def _read_npz(
    path: Path, inputs: Sequence[ValueType], given: Mapping[str, str], option: str
) -> dict[str, Array]:
    with _of_option(option):
        arrays = read_npz(path)
    names = [value.name for value in inputs]
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise InputError(f"--map: the model has no input {unknown!r}; it has {', '.join(names)}")
    chosen = {name: given.get(name, name) for name in names}
    if not all(array in arrays for array in chosen.values()):
        chosen = _usual(arrays, names) or chosen
    missing = next((name for name in names if chosen[name] not in arrays), None)
    if missing is not None:
        raise InputError(
            f"{option}: {str(path)!r} has no array {chosen[missing]!r} for the input {missing!r}; "
            f"it has {', '.join(arrays) or 'none'}: name it with --map {missing}=ARRAY"
        )
    return {name: arrays[chosen[name]] for name in names}


@contextmanager
def _of_option(option: str) -> Iterator[None]:
    """Say which option gave a file that cannot be read."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _usual(arrays: Mapping[str, Array], names: Sequence[str]) -> dict[str, str] | None:
    """Match arrays with common names to an input, and to labels if there are any."""
    if len(names) == 1 == len(arrays):
        return dict(zip(names, arrays, strict=True))
    lower = {name.lower(): name for name in arrays}
    for pair in _USUAL:
        if len(names) <= 2 and all(name in lower for name in pair[: len(names)]):
            return {name: lower[usual] for name, usual in zip(names, pair, strict=False)}
    return None


def _named(text: str) -> tuple[str | None, Path]:
    name, equals, path = text.partition("=")
    return (name, Path(path)) if equals and not Path(text).exists() else (None, Path(text))


# ---- checks --------------------------------------------------------------------------------------


def _fitting(
    arrays: Mapping[str, Array], inputs: Sequence[ValueType], where: str
) -> dict[str, Array]:
    """Return the array of each input in its shape, and in a type that it takes."""
    found = {value.name: fitting(arrays[value.name], value, where) for value in inputs}
    for value in inputs:
        _check_type(found[value.name], value, where)
    return {value.name: _rounded(found[value.name], value, where) for value in inputs}


def fitting(array: Array, value: ValueType, where: str) -> Array:
    """Return an array in the shape of an input, if a sample has the same number of elements."""
    if array.ndim == 0:
        raise InputError(
            f"{where}: the array for {value.name!r} is a scalar: give one row per sample"
        )
    if not len(array):
        raise InputError(f"{where}: the array for {value.name!r} is empty")
    dims = value.dims
    if dims is None or _matches(array.shape, dims):
        return array
    sample = [dim for dim in dims[1:] if isinstance(dim, int)]
    if len(sample) == len(dims) - 1 and math.prod(array.shape[1:]) == math.prod(sample):
        return array.reshape([len(array), *sample])
    hint = "; the first axis is the samples"
    if len(dims) == 1 and array.ndim == 2:  # one-hot labels
        hint = ": give the class index of each sample, such as array.argmax(axis=1)"
    raise InputError(
        f"{where}: the array for {value.name!r} has the shape {_shape(array.shape)}, and the model "
        f"takes {_shape(dims)}{hint}"
    )


def _dtype(value: ValueType) -> np.dtype[Any] | None:
    element = ELEMENT_TYPES.get(value.element_type)
    return None if element is None else element.dtype


def _check_type(array: Array, value: ValueType, where: str) -> None:
    """Refuse elements that cannot be converted to the type of an input."""
    wanted = _dtype(value)
    if wanted is None or wanted.kind not in "fiub":
        return
    if array.dtype.kind not in "fiub":
        what = {"U": "text", "S": "text", "c": "complex numbers", "M": "dates", "m": "durations"}
        found = what.get(array.dtype.kind, f"{array.dtype}")
        raise InputError(
            f"{where}: the array for {value.name!r} holds {found}, and the model takes {wanted}; "
            "only the labels of a CSV file may be words"
        )
    if wanted.kind in "iu" and array.dtype.kind == "f" and array.size < _LOOKED_AT:
        whole = np.isfinite(array) & (array == np.trunc(array))
        if not whole.all():
            sample = int(np.argwhere(~whole)[0][0])
            raise InputError(
                f"{where}: the array for {value.name!r} has {array[sample]!s} for sample {sample}, "
                f"and the model takes integers ({wanted})"
            )


def _rounded(array: Array, value: ValueType, where: str) -> Array:
    """Round float64 to float32, as a CSV file is read, unless numbers become others."""
    if array.dtype != np.float64 or _dtype(value) != np.float32:
        return array
    result = room(array.shape)
    rows = max(1, _LOOKED_AT // max(1, math.prod(array.shape[1:])))
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        with np.errstate(over="ignore"):
            rounded = part.astype(np.float32)
        # Whole numbers are counts, codes or times: one that changes is another one.
        lost = (np.isinf(rounded) & np.isfinite(part)) | (
            (part == np.trunc(part)) & (rounded != part) & np.isfinite(part)
        )
        if lost.any():
            place = tuple(np.argwhere(lost)[0])
            raise InputError(
                f"{where}: the array for {value.name!r} has {part[place]!s} for sample "
                f"{start + place[0]}, which float32, the type of the model, does not hold: scale "
                "the feature, or subtract its mean"
            )
        result[start : start + rows] = rounded
    warnings.warn(f"{where}: {value.name!r} was rounded from float64 to float32", stacklevel=2)
    return result


def _matches(shape: Sequence[int], dims: Sequence[int | str | None]) -> bool:
    same_rank = len(shape) == len(dims)
    pairs = zip(shape[1:], dims[1:], strict=False)
    return same_rank and all(not isinstance(dim, int) or dim == size for size, dim in pairs)


def _shape(dims: Sequence[Any]) -> str:
    return f"({', '.join('?' if dim is None else str(dim) for dim in dims)})"


def _check_labels(arrays: Mapping[str, Array], session: TrainingSession, option: str) -> None:
    """Refuse labels outside the classes of the model, if their number is known."""
    name, labels = list(arrays.items())[-1]
    declared = _dtype(without_weights(session.input_types())[-1])
    if len(arrays) < 2 or not labels.size or declared is None or declared.kind not in "iu":
        return
    count = _class_count(session)
    if labels.dtype.kind not in "iuf" or count is None:
        return
    mark = session.metadata.labels.get("ignore_index")
    counted = labels if mark is None else labels[labels != mark]
    if not counted.size:
        return
    low, high = counted.min(), counted.max()
    if low < 0 or high >= count:
        more = f"prepare it with --classes {int(high) + 1}, or " if 0 <= low < high < 10**6 else ""
        raise InputError(
            f"{option}: the labels {name!r} range from {low:g} to {high:g}, and the model has "
            f"{count} classes, 0 to {count - 1}: {more}number the labels from 0"
        )


def _class_count(session: TrainingSession) -> int | None:
    evaluation = session.module.evaluation_executor
    beside = session.output_names(training=False)[1:]
    if evaluation is None or not beside:
        return None
    dims = evaluation.graph.model.output_dims(beside[-1]) or ()
    return dims[1] if len(dims) == 2 and isinstance(dims[1], int) else None
