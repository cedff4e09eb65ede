"""What is read from a trace: busy time, kinds, nesting, allocations."""

import os
import subprocess
import sys

import pytest
import torch

from graphopt.bench.trace import device_time, host_time, peak_allocated, record


def event(name, ts, dur, cat="kernel", tid=1):
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


def allocation(ts, size, device=0):
    return {"name": "[memory]", "ts": ts, "args": {"Bytes": size, "Device Type": device}}


def test_kernels_that_overlap_are_busy_once():
    found = device_time([event("ampere_sgemm", 0, 100), event("norm_fwd", 50, 100)], 1, 1.0)
    assert found.busy_ms == pytest.approx(0.15)
    assert found.kinds["gemm"] == found.kinds["fused"] == pytest.approx(0.1)


def test_what_no_kernel_fills_is_idle():
    assert device_time([event("norm_fwd", 0, 400)], 2, 1.0).idle_ms == pytest.approx(0.8)


def test_annotations_and_host_calls_are_no_kernels():
    events = [
        event("Optimizer.step#AdamW.step", 0, 900, "gpu_user_annotation"),
        event("cudaLaunchKernel", 0, 900, "cuda_runtime"),
    ]
    assert device_time(events, 1, 1.0) is None


def test_copies_of_the_driver_count():
    found = device_time([event("Memset (Device)", 0, 10, "gpu_memset")], 1, 1.0)
    assert found.kinds["copies"] == pytest.approx(0.01)


def test_kernels_are_listed_by_name_the_longest_first():
    events = [event("a_kernel", 0, 10), event("b_kernel", 20, 30), event("a_kernel", 60, 10)]
    rows = device_time(events, 2, 1.0).kernels
    assert [(r.name, r.calls, r.ms) for r in rows] == [
        ("b_kernel", 0.5, 0.015),
        ("a_kernel", 1.0, 0.01),
    ]


def test_what_runs_inside_a_fused_op_is_fused():
    events = [
        event("graphopt::layer_norm", 0, 100, "cpu_op"),
        event("aten::native_layer_norm", 10, 60, "cpu_op"),
        event("aten::mm", 120, 50, "cpu_op"),
        event("aten::mm", 20, 50, "cpu_op", tid=2),  # another thread is not inside
    ]
    kinds = host_time(events, 1, 1.0, 1.0).kinds
    assert kinds["fused"] == pytest.approx(0.1)
    assert kinds["gemm"] == pytest.approx(0.1)
    assert kinds["other"] == 0


def test_times_under_the_profiler_are_scaled_to_those_without():
    found = host_time([event("aten::mm", 0, 1000, "cpu_op")], 1, 2.0, 1.0)
    assert (found.kinds["gemm"], found.idle_ms) == (pytest.approx(0.5), pytest.approx(0.5))


def test_the_peak_is_of_what_is_held_at_once():
    events = [allocation(1, 100), allocation(3, -100), allocation(2, 50), allocation(4, 80)]
    assert peak_allocated(events) == 150


def test_memory_of_another_device_is_not_counted():
    assert peak_allocated([allocation(1, 100), allocation(2, 900, device=1)]) == 100


def test_a_trace_without_allocations_has_no_peak():
    assert peak_allocated([event("aten::mm", 0, 1, "cpu_op")]) is None


def test_the_profilers_own_log_is_left_out_and_nothing_else(capfd):
    def run():
        os.write(2, b"meant for the user\n")
        torch.ones(2).relu()

    names = {e["name"] for e in record(run, cuda=False)}
    assert "aten::relu" in names
    assert capfd.readouterr().err == "meant for the user\n"


def test_a_run_that_raises_leaves_standard_error_as_it_was(capfd):
    with pytest.raises(ZeroDivisionError):
        record(lambda: 1 / 0, cuda=False)
    os.write(2, b"still there\n")
    assert capfd.readouterr().err == "still there\n"


def test_the_users_own_profile_logs_as_before(tmp_path):
    code = (
        "import torch\nfrom graphopt.bench.trace import record\n"
        "def own():\n    with torch.profiler.profile(): torch.ones(2).relu()\n"
        "own()\nrecord(lambda: torch.ones(2).relu(), cuda=False)\nown()\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert run.stderr.count("profiler_start") in (0, 2)  # torch 2.13 has such a line for each


def test_standard_error_that_is_closed_hinders_nothing(tmp_path):
    code = (
        "import torch\nfrom graphopt.bench.trace import record\n"
        "print(len(record(lambda: torch.ones(2).relu(), cuda=False)) > 0)"
    )
    run = subprocess.run(
        f'exec 2>&-; "{sys.executable}" -c "$CODE"',
        shell=True,
        env={**os.environ, "CODE": code},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert run.stdout == "True\n"
