"""Saves what the onnxruntime of this interpreter makes of the graphs of an artifact folder.

`python optimize_program.py <folder> <target>`: each graph is written once for each level of
optimisation, as `<graph>.<level>.onnx`. It needs onnxruntime alone.
"""

import sys
from pathlib import Path

import onnxruntime as ort

LEVELS = ("EXTENDED", "ALL")


def optimize(folder: Path, target: Path) -> None:
    for file in sorted(folder.glob("*.onnx")):
        for level in LEVELS:
            options = ort.SessionOptions()
            options.log_severity_level = 3  # it warns that the result is for this machine
            options.graph_optimization_level = getattr(
                ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}"
            )
            options.optimized_model_filepath = str(target / f"{file.stem}.{level}.onnx")
            ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    optimize(Path(sys.argv[1]), Path(sys.argv[2]))
    print(ort.__version__)
