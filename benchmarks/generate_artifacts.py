"""How long it takes to make training artifacts, and how much memory.

Run as `python benchmarks/generate_artifacts.py`. Each case runs in a process of its own, so that
the peak memory is its own; a Markdown table is printed. The export by torch is not counted.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "models"), str(TESTS / "offline")]

# What is made, and the seconds that it may take on two cores where that was promised.
CASES = {
    "MLP 784-500-10": None,
    "ResNet-18, 32 pixels, batch statistics": None,
    "MobileNetV2, 224 pixels": 5,
    "MobileNetV2, head alone": None,
    "BERT, 4 layers, width 128, 30,522 words": 3,
    "2.5 GB by path, head alone": None,
}


def network(case: str):
    import torch

    import zoo

    torch.manual_seed(0)
    if case.startswith("MLP"):
        layers = torch.nn.Linear(784, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10)
        return torch.nn.Sequential(*layers), torch.randn(2, 784)
    if case.startswith("ResNet"):
        return zoo.ResNet18(64).train(), torch.randn(2, 3, 32, 32)
    if case.startswith("Mobile"):
        return zoo.MobileNetV2(slim=1, classes=1000).eval(), torch.randn(2, 3, 224, 224)
    return zoo.Bert(4, 128, 4, 30522), torch.randint(0, 30522, (2, 64))


def model(case: str, folder: Path):
    if case.startswith("2.5 GB"):
        import large_model

        return large_model.save(folder)
    from exporting import export

    return export(*network(case), "torchscript")


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(case: str, folder: Path) -> None:
    import onnx

    from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

    given = model(case, folder)
    proto = onnx.load(given, load_external_data=False) if isinstance(given, Path) else given
    trains = (
        {"Mobile": ["classifier.*"], "2.5 GB": ["head"]}.get(case[:6]) if "head" in case else None
    )
    before, start, cpu = peak(), time.perf_counter(), time.process_time()
    written = generate_artifacts(
        given,
        requires_grad=trains,
        loss=LossType.CrossEntropyLoss,
        optimizer=OptimType.AdamW,
        artifact_directory=folder / "artifacts",
    )
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    graphs = sum(size for name, size in written.files.items() if name.endswith(".onnx"))
    limit = CASES[case]
    print(
        f"| {case} | {len(proto.graph.node):,} | {written.parameter_count:,} | {seconds:.2f} | "
        f"{cpu:.2f} | {'' if limit is None else limit} | {graphs / 1e6:.2f} | "
        f"{sum(written.files.values()) / 1e6:,.0f} | {before:.0f} | {peak():.0f} |"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with tempfile.TemporaryDirectory() as name:
            measure(sys.argv[1], Path(name))
    else:
        print("| model | nodes | trains | seconds | of the CPU | at most | MB of graphs | "
              "MB in all | MB before | MB at peak |")  # fmt: skip
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for case in CASES:
            subprocess.run([sys.executable, "-W", "ignore", __file__, case], check=True)
