"""Feeds hostile models to the functions that read models, each in a process with limits.

Run as `python hostile_program.py CALL CASE...`; a case may be a seed of `any_operator`, and `-`
reads the cases from stdin. Prints a line of JSON for each: the outcome, the seconds of CPU time
and the bytes of memory.
"""

import json
import os
import resource
import sys
import tempfile
import warnings

import hostile_models
import onnxtrain
from onnxtrain.errors import OnnxTrainError
from onnxtrain.offline.passes.replace_classifier import replace_classifier

MEMORY = 3 << 30  # of address space beyond what the program itself takes
CPU = 20


def call(kind: str, given: object, folder: str) -> None:
    if kind == "gradient":
        onnxtrain.gradient(given, "w")
    elif kind == "inspect":
        onnxtrain.inspect(given)
    elif kind == "prepare":
        onnxtrain.prepare(given, os.path.join(folder, "out"), loss="mse", of="y", optimizer="sgd")
    elif kind == "classes":
        replace_classifier(given, 3)
    else:
        replace_classifier(given, 3, after="z")


def outcome(kind: str, case: str, folder: str) -> str:
    if case.isdigit():
        given = hostile_models.any_operator(int(case))
    else:
        given = hostile_models.CASES[case]()
    if isinstance(given, bytes):
        path = os.path.join(folder, "model.onnx")
        with open(path, "wb") as file:
            file.write(given)
        given = path
    try:
        call(kind, given, folder)
    except OnnxTrainError as error:
        return f"refused: {type(error).__name__}: {error}"[:400]
    except BaseException as error:
        return f"foreign: {type(error).__name__}: {error}"[:400]
    return "accepted"


def limited(kind: str, case: str) -> dict:
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if not child:
            with open("/proc/self/statm") as file:
                own = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (own + MEMORY, own + MEMORY))
            resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
            os.write(writer, outcome(kind, case, folder).encode(errors="replace"))
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as file:
            text = file.read().decode(errors="replace")
        _, status, usage = os.wait4(child, 0)
    if status:
        text = f"died: signal {status & 127}, code {status >> 8}"
    seconds = usage.ru_utime + usage.ru_stime
    return {"case": case, "outcome": text, "seconds": seconds, "bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    onnxtrain.gradient(hostile_models.scored([], "x"), "w")  # imports what the calls need
    cases = sys.stdin.read().split("\n") if sys.argv[2:] == ["-"] else sys.argv[2:]
    for case in filter(None, cases):
        print(json.dumps(limited(sys.argv[1], case)), flush=True)
