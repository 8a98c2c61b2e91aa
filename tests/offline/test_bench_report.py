"""The pages of the training benchmark: which ratios are formed, and what is said of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = Path(__file__).parents[2] / "benchmarks" / "training"


@pytest.fixture(scope="module", autouse=True)
def _modules():
    """The benchmark is a folder of scripts, not a package."""
    sys.path.insert(0, str(TRAINING))
    yield
    sys.path.remove(str(TRAINING))


def result(peer: str, step=(2.0, 1.0, 3.0), start=(1.0,), peak=100_000_000, **more) -> dict:
    return {
        "peer": peer, "setting": "default", "error": "", "step_ms": list(step), "steps": 9,
        "start_s": list(start), "cold_start_s": None, "peak": peak, "bare": 10_000_000,
        "artifacts": 1_000_000, "losses": [], "others": {}, **more,
    }  # fmt: skip


def failure(peer: str, message: str) -> dict:
    return result(peer, (), (), 0, error=message, artifacts=0)


def row(*results: dict, name: str = "mlp-1-64") -> dict:
    return {"name": name, "title": f"the {name}", "net": "MLP", "trains": "all",
            "results": list(results), "different_losses": []}  # fmt: skip


def run(*rows: dict, curves=()) -> dict:
    return {
        "date": "2026-01-02", "threads": 2, "load": [0.1, 0.2], "rows": list(rows),
        "machine": {"cpu": "a CPU", "cores": 2, "memory": 8e9, "system": "Linux"},
        "versions": {"device": "Python 3.11"}, "installed": {"onnxtrain": 5_000_000},
        "titles": {"torch": "torch eager"}, "curves": list(curves), "comparisons": [],
    }  # fmt: skip


def compared(measured: dict, reasons=None) -> dict:
    import ratios

    return {(r.quantity, r.row): r for r in ratios.compare(measured, reasons or {})}


def test_ours_is_compared_with_the_best_that_runs() -> None:
    found = compared(
        run(
            row(
                result("onnxtrain", (9.0, 1.0, 1.5)),
                result("torch", (4.0,)),
                result("torch.compile", (3.0,)),
                failure("onnxsim", "no gradient"),
            )
        )
    )
    ratio = found["step time", "mlp-1-64"]
    assert (ratio.value, ratio.against) == (0.5, "torch.compile")


def test_the_median_of_the_repeats_counts_and_a_tie_is_not_above_one() -> None:
    measured = run(row(result("onnxtrain", (1.0, 5.0, 2.0)), result("torch", (2.0, 2.0, 9.0))))
    ratio = compared(measured)["step time", "mlp-1-64"]
    assert (ratio.value, ratio.above_one) == (1.0, False)


def test_the_mean_over_rows_is_geometric() -> None:
    rows = [
        row(result("onnxtrain", (1.0,)), result("torch", (4.0,)), name="a"),
        row(result("onnxtrain", (2.0,)), result("torch", (2.0,)), name="b"),
    ]
    assert compared(run(*rows))["step time, geometric mean", "all rows"].value == pytest.approx(0.5)


def test_a_missing_figure_of_ours_is_told_and_one_of_a_peer_compares_nothing() -> None:
    lost = compared(run(row(failure("onnxtrain", "broken"), result("torch"))))
    for key in (("step time", "mlp-1-64"), ("step time, geometric mean", "all rows")):
        assert lost[key].value is None and lost[key].comparable
        assert "our figure is missing" in lost[key].reason
    alone = compared(run(row(result("onnxtrain"), failure("upstream", "broken"))))
    assert not alone["artifacts", "mlp-1-64"].comparable


def test_memory_and_start_are_compared_with_the_better_torch() -> None:
    found = compared(
        run(
            row(
                result("onnxtrain", start=(0.5,), peak=50),
                result("torch", start=(2.5,), peak=100),
                result("torch.compile", start=(2.0,), peak=200),
                result("upstream", start=(0.1,), peak=1),
            )
        )
    )
    memory = found["peak memory", "mlp-1-64"]
    start = found["start to first step", "mlp-1-64"]
    assert (memory.value, memory.against) == (0.5, "torch")
    assert (start.value, start.against) == (0.25, "torch.compile")


def test_the_smallest_artifacts_of_upstream_are_the_measure() -> None:
    other = result("upstream", artifacts=3_000_000, smallest_artifacts=500_000)
    found = compared(run(row(result("onnxtrain"), other)))
    assert found["artifacts", "mlp-1-64"].value == 2.0


def curve(ours, theirs) -> dict:
    points = [
        {"n": n, "peers": {p: {"step_ms": v, "peak": 1} for p, v in values.items() if v}}
        for n, values in zip(
            (1, 11), ({"onnxtrain": a, "torch": b} for a, b in zip(ours, theirs, strict=True)),
            strict=True,
        )
    ]  # fmt: skip
    return {"name": "batch", "title": "a net", "along": "batch size", "points": points}


def test_growth_compares_what_each_unit_adds() -> None:
    # Ours grows fivefold and torch by half, but each unit adds 0.4 here and 0.5 there.
    found = compared(run(row(result("onnxtrain")), curves=[curve((1.0, 5.0), (10.0, 15.0))]))
    assert found["growth of step time", "batch"].value == pytest.approx(0.8)
    lost = compared(run(row(result("onnxtrain")), curves=[curve((1.0, None), (1.0, 2.0))]))
    assert lost["growth of step time", "batch"].reason == "one of our points is missing"


def test_a_slower_step_is_explained_where_the_reason_is_known() -> None:
    import ratios
    import report

    measured = run(row(result("onnxtrain", (3.0,)), result("torch", (2.0,))))
    reasons = {"step time": {"mlp-1-64": "it is slow"}}
    page = report.summary(measured, ratios.compare(measured, reasons))
    assert "- the mlp-1-64, 1.50 times torch eager: it is slow.\n" in page
    assert "not explained yet" in report.summary(measured, ratios.compare(measured, {}))


def test_an_equal_step_needs_no_explanation() -> None:
    import ratios
    import report

    measured = run(row(result("onnxtrain", (1.004,)), result("torch", (1.0,))))
    page = report.summary(measured, ratios.compare(measured, {}))
    assert "Where a step takes longer" not in page
    assert "| **1.00** |" in page


def test_the_sentences_have_the_figures_of_the_run() -> None:
    import ratios
    import report

    rows = [
        row(
            result("onnxtrain", (ours,), (0.5,), peak),
            result("torch", (2.0,), (2.0,), 100_000_000),
            name=name,
        )
        for name, ours, peak in (("a", 2.1, 25_000_000), ("b", 3.0, 50_000_000))
    ]
    measured = {**run(*rows), "installed": {"onnxtrain": 5_000_000, "torch": 90_000_000}}
    memory, start, steps = report.sentences(measured, ratios.compare(measured, {}))
    assert (
        "takes 25 to 50 % of the memory" in memory
        and "5 MB of installed files instead of 90" in memory
    )
    assert "done 0.5 s after" in start and "takes 2.0 s" in start
    assert "the fastest other's time for the a. Elsewhere it takes 1.50 times as long" in steps


def test_the_published_pages_are_those_of_the_published_figures() -> None:
    import ratios
    import report

    docs = TRAINING.parents[1] / "docs"
    measured = json.loads((docs / "performance.json").read_text())
    found = ratios.compare(measured)
    for name, text in (
        ("performance.md", report.summary(measured, found, "performance.svg")),
        ("performance-method.md", report.details(measured, found, "performance-growth.svg")),
    ):
        page = (docs / name).read_text()
        assert f"{report.BEGIN}\n{text}{report.END}" in page, "python benchmarks/training --render"


def test_a_peer_that_fails_is_in_the_table_with_its_message() -> None:
    import report

    message = "no rule | for\n'LSTM' " + "x" * 300
    measured = run(row(result("onnxtrain"), result("torch"), failure("onnxsim", message)))
    line = next(line for line in report.table(measured).splitlines() if "onnxsim" in line)
    assert "fails: no rule \\| for 'LSTM'" in line and line.endswith("… | — | — | — | — | — |")
    assert "x" * 300 in report.details(measured, [])


def test_numbers_of_a_line() -> None:
    import report

    measured = run(row(result("onnxtrain", (2.0, 1.0, 3.0), (0.5, 0.4))))
    cells = [cell.strip() for cell in report.table(measured).splitlines()[2].split("|")[1:-1]]
    assert cells == ["the mlp-1-64", "onnxtrain", "2.00 (1.00\u20133.00)", "90", "100",
                     "0.45 (0.40\u20130.50)", "5", "1.00"]  # fmt: skip


def test_a_busy_machine_is_mentioned() -> None:
    import report

    measured = run(row(result("onnxtrain")))
    busy = {**measured, "load": [1.5, 2.0]}
    assert "other load" not in report.details(measured, [])
    assert "other load" in report.details(busy, [])
    assert "load 1.5 before the run" in report.summary(busy, [])


def test_the_report_replaces_what_is_between_the_markers(tmp_path: Path) -> None:
    import report

    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.insert(page, "new\n")
    assert page.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(SystemExit):
        report.insert(page, "new\n")


def test_losses_tell_who_does_other_work() -> None:
    import measure

    torch = measure.Result("torch", losses=[2.0, 1.0])
    same = measure.Result("upstream", losses=[2.0001, 1.0001])
    other = measure.Result("onnxtrain", losses=[2.0, 1.1])
    assert measure.disagreements([torch, same, other]) == ["onnxtrain: 1.10000 instead of 1.00000"]


def test_what_is_installed_is_counted_without_tools_and_compiled_code(tmp_path: Path) -> None:
    import installed

    for name, size in {"torch/a.so": 7, "torch/__pycache__/a.pyc": 100, "pip/x.py": 100,
                       "numpy/n.py": 3, "one.py": 2}.items():  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"0" * size)
    assert installed.size(tmp_path) == 12
    assert installed.size(tmp_path, ("numpy",)) == 9


def test_every_workload_survives_the_way_to_another_process() -> None:
    import plan

    for workload in (*plan.WORKLOADS, *(w for c in plan.CURVES for _, w in c.points)):
        assert plan.read_workload(plan.write_workload(workload)) == workload
        for peer in plan.PEERS:
            names = [s.name for s in plan.settings(peer, workload)]
            assert len(set(names)) == len(names) > 0


def cores_that_say(*times: float | None, patience: float = 100.0):
    from cores import Cores

    answers = iter(times)
    return Cores(patience, lambda: next(answers))


def test_a_burst_counts_only_if_the_cores_stayed_near():
    cores = cores_that_say(100.0, 300.0, 110.0, 120.0)
    taken = []
    assert cores.burst(lambda: taken.append("steps") or len(taken)) == 2
    assert cores.apart_bursts == 0 and cores.farthest == 300.0


def test_without_patience_a_burst_counts_all_the_same_and_that_is_said():
    import report

    cores = cores_that_say(100.0, 300.0, patience=0.0)
    assert cores.burst(lambda: "steps") == "steps"
    assert cores.apart_bursts == 1
    text = report.details({**run(row(result("onnxtrain"))), "cores": cores.summary()}, [])
    assert "except for 1 bursts" in text


def test_where_nothing_can_be_told_of_the_cores_nothing_is_said():
    cores = cores_that_say(None, None)
    assert cores.burst(lambda: "steps") == "steps"
    assert cores.summary() == {}


def test_the_way_between_two_cores_is_measured():
    code = f"import sys; sys.path.insert(0, {str(TRAINING)!r}); import cores; "
    code += "print(cores.handover_us() or 50)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 1 < float(answer.stdout) < 1e6, answer.stderr
