"""The benchmark's mode async: its parts, and one quick run of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from mpwriter.bench import async_mode, checkpoint_process
from mpwriter.bench.async_mode import AsyncFigures, failure_text, measure_async
from mpwriter.bench.async_report import (
    async_figures_as_json,
    async_findings,
    async_rows,
    async_state_report,
    best_stock_row,
)
from mpwriter.bench.async_subjects import AsyncSubject, Saver, Started, choose_async_subjects
from mpwriter.bench.async_timing import AsyncSample, timed_async_save
from mpwriter.bench.neighbours import Neighbours
from mpwriter.bench.options import parse_options
from mpwriter.bench.places import open_place
from mpwriter.bench.plot import plot_lost
from mpwriter.bench.references import CopyTimes, measure_copies
from mpwriter.bench.states import build_state, measure_state, nested, on_device
from mpwriter.bench.training import LOOPS, MatmulLoop, StillRunningError, TrainingLoop, percentile

REPOSITORY = Path(__file__).resolve().parents[2]

OURS, IN_PROCESS = AsyncSubject("ours", "thread", 2), AsyncSubject("ours", "process", 2)
OVERLAPPED = AsyncSubject("ours", "thread", 2, "async")
STOCK, KEPT = AsyncSubject("fsspec", "thread", 1), AsyncSubject("fsspec", "thread", 4, "kept")
STOCK_PROCESS, FLOOR = AsyncSubject("fsspec", "process", 1), AsyncSubject("planning", "thread")


def sample(
    stall_s: float, steps_s: list[float], idle_s: float = 0.01, staged_s: float = 0
) -> AsyncSample:
    window_s = sum(steps_s)
    staged_s = staged_s or stall_s
    return AsyncSample(stall_s, staged_s, stall_s + window_s, window_s, steps_s, [idle_s] * 10)


@pytest.fixture
def figures() -> AsyncFigures:
    return AsyncFigures(
        "small",
        20_000,
        80 * 2**20,
        samples={
            STOCK: [sample(0.4, [0.1] * 20), sample(0.4, [0.1] * 20), sample(0.4, [0.1] * 20)],
            KEPT: [sample(0.2, [0.1] * 10)],
            OURS: [sample(0.06, [0.02] * 10), sample(0.06, [0.02] * 9 + [0.05])],
            OVERLAPPED: [sample(0.01, [0.02] * 10, staged_s=0.07)],
            IN_PROCESS: [sample(0.06, [0.01] * 20)],
            FLOOR: [sample(0.05, [0.03])],
        },
        failures={STOCK_PROCESS: "failed: OSError: [Errno 24] Too many open files"},
        copies=[CopyTimes(0.03, 0.05, 0.01, 0.055), CopyTimes(0.05, 0.06, 0.02, 0.06)],
    )


# -- figures -----------------------------------------------------------------------------


def test_lost_time_is_the_stall_and_the_steps_that_did_not_happen() -> None:
    one = sample(0.5, [0.04] * 10)
    assert one.share == pytest.approx(0.25)
    assert one.lost_s == pytest.approx(0.5 + 0.4 * 0.75)
    assert one.longest_gap_s == 0.04
    assert sample(0.5, [0.01] * 40).lost_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.99, 99), (0.5, 50), (0.995, 100), (0, 1), (1, 100)]
)
def test_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected
    assert percentile([7.0], share) == 7.0


def test_percentile_raises_when_nothing_was_measured() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


def test_rows_come_in_order_with_medians(figures: AsyncFigures) -> None:
    rows = async_rows(figures)
    assert [row.subject for row in rows] == [OURS, OVERLAPPED, IN_PROCESS, STOCK, KEPT, FLOOR]
    assert rows[0].longest_gap.median == pytest.approx(0.035)
    assert rows[0].p99_s == 0.05
    assert rows[3].lost == pytest.approx((2.2, 2.2, 2.2, 3))


def test_best_stock_is_the_row_that_loses_the_least(figures: AsyncFigures) -> None:
    best = best_stock_row(async_rows(figures))
    assert best is not None
    assert best.subject == KEPT
    plain = best_stock_row(async_rows(figures), as_it_comes=True)
    assert plain is not None
    assert plain.subject == STOCK
    assert best_stock_row(async_rows(figures), "process") is None


def test_report_compares_with_the_best_stock_row(figures: AsyncFigures) -> None:
    text = async_state_report(figures)
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert "small: 20,000 tensors, 80.00 MiB" in text
    assert lines["MPFsspecWriter n=2 process"][3:] == [
        "60.0", "1.50x", "-", "0.260", "100", "10.0", "10.0", "0.060", "0.060", "0.060", "18.33x",
    ]  # fmt: skip
    assert "70.0" in lines["MPFsspecWriter n=2 thread, async staging"]
    assert lines["FsspecWriter n=1 process"][3] == "failed"
    assert lines["writes nothing thread"][-1] == "-"
    assert "FsspecWriter n=1 process: failed: OSError: [Errno 24] Too many open files" in text
    assert "copy_ tensor by tensor" in text


def test_disturbed_saves_count_only_where_there_are_no_others(figures: AsyncFigures) -> None:
    assert "disturbed" not in async_state_report(figures)
    for subject in (OURS, FLOOR):
        figures.samples[subject][0] = replace(figures.samples[subject][0], others=0.5)
    rows = {row.subject: row for row in async_rows(figures)}
    assert rows[OURS].longest_gap == (0.05, 0.05, 0.05, 1)
    assert not rows[OURS].disturbed
    assert rows[FLOOR].disturbed
    text = async_state_report(figures)
    assert "2 of 9 saves were disturbed by other programs" in text
    assert "writes nothing thread *" in text
    assert "MPFsspecWriter n=2 thread *" not in text


def test_report_is_complete_when_everything_failed() -> None:
    figures = AsyncFigures("small", 1, 1, failures={OURS: "failed: OSError: x"})
    assert "failed: OSError: x" in async_state_report(figures)
    assert async_findings([figures]) == ["small: MPFsspecWriter n=2 thread failed: OSError: x"]


def test_findings_answer_what_a_reader_asks(figures: AsyncFigures) -> None:
    text = "\n".join(async_findings([figures]))
    assert "the call takes 60.0 ms, 1.50x a plain copy" in text
    assert "best stock in a thread 1.100 s (FsspecWriter n=4 thread, stager kept)" in text
    assert "best stock writer in a thread 2.200 s (FsspecWriter n=1 thread), ratio" in text
    assert "best stock writer in a process: none that works" in text
    assert "longest gap 10.0 ms (MPFsspecWriter n=2 process), writes nothing thread 30.0 ms" in text


def test_figures_survive_json_with_every_step(figures: AsyncFigures) -> None:
    found = json.loads(json.dumps(async_figures_as_json(figures)))
    assert found["saves"][OURS.label]["samples"][1]["steps_us"] == [20_000] * 9 + [50_000]
    assert found["saves"][STOCK.label]["lost"]["median"] == pytest.approx(2.2)
    assert found["failures"][STOCK_PROCESS.label].startswith("failed: ")
    assert len(found["copies"]) == 2


@pytest.fixture(scope="module")
def _matplotlib_fonts() -> None:
    """Matplotlib keeps the files of its fonts open, which is no leak of a test."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "text")
    figure.savefig(io.BytesIO())


@pytest.mark.usefixtures("_matplotlib_fonts")
def test_plot_writes_a_picture(figures: AsyncFigures, tmp_path: Path) -> None:
    plot_lost([figures], str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    plot_lost([], str(tmp_path / "none.png"))
    assert not (tmp_path / "none.png").exists()


# -- subjects and options ----------------------------------------------------------------


def test_subjects_are_those_of_the_modes_asked_for() -> None:
    families = ["ours", "fsspec", "filesystem", "plain", "planning"]
    subjects = choose_async_subjects(families, ["thread", "process"], [1, 2], [1, 4], local=True)
    labels = [subject.label for subject in subjects]
    assert len(set(labels)) == len(labels)
    assert {"MPFsspecWriter n=1 thread", "MPFsspecWriter n=2 process", "writes nothing process",
            "FileSystemWriter n=4 process"} < set(labels)  # fmt: skip
    assert "MPFsspecWriter n=1 process" not in labels
    remote = choose_async_subjects(families, ["thread"], [2], [4], local=False)
    assert {subject.family for subject in remote} == {"ours", "fsspec", "planning"}
    assert {subject.checkpointer for subject in remote} == {"thread"}


def test_options_have_numbers_of_their_own_in_each_mode() -> None:
    modes = ["sync", "async"]
    full, quick = (parse_options(["--mode", "async", *more], modes) for more in ([], ["--quick"]))
    assert (list(full.states), list(full.workers), list(full.threads)) == (
        ["large", "small", "model"], [1, 2], [1, 4],
    )  # fmt: skip
    assert (full.num_rounds, quick.num_rounds, list(quick.workers)) == (5, 1, [2])
    assert list(parse_options([], modes).workers) == [1, 2, 4]
    assert list(parse_options(["--workers", "3"], modes).workers) == [3]


# -- states and references ---------------------------------------------------------------


def test_state_is_nested_once() -> None:
    small = build_state("small", quick=True)
    found = nested(small)
    assert list(found.state_dict) == ["model"]
    assert (found.num_tensors, found.nbytes) == (small.num_tensors, small.nbytes)
    assert nested(found) is found
    model = build_state("model", quick=True)
    assert nested(model) is model


def test_state_moves_to_a_device_with_all_its_tensors() -> None:
    state = measure_state("mine", {"model": {"a": torch.ones(3), "n": 1}})
    assert on_device(state, "cpu") is state
    moved = on_device(state, "meta")
    assert [tensor.device.type for tensor in moved.tensors()] == ["meta"]
    assert moved.state_dict["model"]["n"] == 1


def test_copies_are_measured_and_their_memory_goes_back(tmp_path: Path) -> None:
    state = measure_state(
        "mine", {"m": {"a": torch.ones(1000), "none": torch.empty(0), "b": torch.ones(3).bool()}}
    )
    trained: list[int] = []
    with open_place(str(tmp_path), {}) as place:
        copies = measure_copies(state, place, 1, lambda: trained.append(1))
    assert len(trained) == 4, "before each copy"
    assert min(copies.loop_s, copies.flat_s, copies.stage_s) > 0
    assert copies.shared_loop_s


# -- measuring ---------------------------------------------------------------------------


class CountingLoop(TrainingLoop):
    """Steps that take no time worth mentioning."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1


def test_loop_trains_until_it_is_told_to_stop() -> None:
    loop = CountingLoop()
    steps = loop.run_until(lambda: loop.num_steps >= 5)
    assert len(steps.steps_s) == 5
    assert steps.window_s == pytest.approx(sum(steps.steps_s))
    assert len(loop.run_for(0).steps_s) == 1
    with pytest.raises(StillRunningError):
        loop.run_until(lambda: False, limit_s=0)


def test_loop_takes_real_steps() -> None:
    loop = TrainingLoop()
    assert loop.run_for(0).window_s > 0


def test_matmul_loop_takes_real_steps() -> None:
    loop = LOOPS["matmul"]("cpu")
    assert isinstance(loop, MatmulLoop)
    loop.step()
    assert torch.equal(loop.product, loop.left @ loop.right)


def test_torch_threads_are_as_before_after_a_run(tmp_path: Path) -> None:
    """C13: a loop of one thread on two cores leaves one to the workers."""
    argv = ["--mode", "async", "--states", "small", "--families", "planning", "--quick"]
    argv += ["--checkpointers", "thread", "--loop", "matmul", "--torch-threads", "1"]
    seen: list[int] = []
    before = torch.get_num_threads()
    with open_place(str(tmp_path), {}) as place:
        measure_async(
            parse_options(argv, ["sync", "async"]),
            place,
            lambda figures: seen.append(torch.get_num_threads()),
        )
    assert seen == [1]
    assert torch.get_num_threads() == before


class FakeSaver(Saver):
    """Saves that end as the test says; the steps of `loop` drive them on."""

    def __init__(self, staged: Future[Any] | None, saved: Future[Any]) -> None:
        super().__init__(measure_state("mine", {"a": torch.ones(1)}), None)  # type: ignore[arg-type]
        self._started = Started(staged, saved)

    def start(self, subject: AsyncSubject, url: str) -> Started:
        return self._started


def after(loop: CountingLoop, num_steps: int, result: Any) -> Future[Any]:
    """A future that is done after so many steps from now on."""
    future: Future[Any] = Future()
    inner, until = loop.step, loop.num_steps + num_steps

    def step() -> None:
        inner()
        if loop.num_steps == until:
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    loop.step = step  # type: ignore[method-assign]
    return future


def test_save_is_measured_from_the_call_to_its_end() -> None:
    loop = CountingLoop()
    saver = FakeSaver(after(loop, 4, None), after(loop, 8, None))
    one = timed_async_save(OVERLAPPED, saver, "", loop, idle_s=0)
    assert len(one.idle_steps_s) == 1
    assert len(one.steps_s) == 7
    assert one.stall_s < one.staged_s < one.save_s


def test_save_is_measured_when_it_ends_within_the_call() -> None:
    done: Future[Any] = Future()
    done.set_result(None)
    one = timed_async_save(OURS, FakeSaver(None, done), "", CountingLoop(), idle_s=0)
    assert len(one.steps_s) == 1
    assert one.staged_s == one.stall_s <= one.save_s


@pytest.mark.parametrize("error", [OSError(24, "Too many"), CheckpointException("x", {})])
def test_save_raises_what_the_future_holds(error: BaseException) -> None:
    loop = CountingLoop()
    with pytest.raises(type(error)):
        timed_async_save(OURS, FakeSaver(None, after(loop, 2, error)), "", loop, idle_s=0)


def test_failure_names_the_rank_s_own_error_and_no_credentials() -> None:
    wrapped = CheckpointException("all", {0: (ValueError("s3://me:pw@host/x\nmore"), None)})  # type: ignore[dict-item]
    text = failure_text(wrapped)
    assert text.startswith("failed: ValueError: s3://***@host/x")
    assert "more" not in text
    assert len(failure_text(ValueError("x" * 500))) <= 100


def test_measure_leaves_a_subject_out_once_it_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[AsyncSubject] = []

    def save(subject: AsyncSubject, saver: Saver, *_: Any, **__: Any) -> AsyncSample:
        calls.append(subject)
        if subject.family == "fsspec":
            raise OSError(24, "Too many open files")
        return sample(0.1, [0.01])

    monkeypatch.setattr(async_mode, "timed_async_save", save)
    monkeypatch.setitem(async_mode.LOOPS, "training", lambda device: CountingLoop())
    options = parse_options(
        ["--mode", "async", "--quick", "--rounds", "3", "--states", "small",
         "--families", "fsspec", "planning", "--checkpointers", "thread"],
        ["sync", "async"],
    )  # fmt: skip
    reported: list[AsyncFigures] = []
    with open_place(str(tmp_path), {}) as place:
        (found,) = measure_async(options, place, reported.append)
    assert reported == [found]
    assert [len(samples) for samples in found.samples.values()] == [3]
    assert {subject.family for subject in found.failures} == {"fsspec"}
    assert sum(subject.family == "fsspec" for subject in calls) == len(found.failures)


def test_measure_repeats_a_save_that_was_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([0.0, 0.9, 0.5, 0.7, 0.0, 0.9, 0.1])

    def save(*_: Any, **__: Any) -> AsyncSample:
        return replace(sample(0.1, [0.01]), others=next(others))

    monkeypatch.setattr(async_mode, "timed_async_save", save)
    monkeypatch.setitem(async_mode.LOOPS, "training", lambda device: CountingLoop())
    monkeypatch.setattr(async_mode, "measure_copies", lambda *_: CopyTimes(1, 1, 1, 1))
    options = parse_options(
        ["--mode", "async", "--rounds", "3", "--states", "tiny", "--families", "planning",
         "--checkpointers", "thread"],
        ["sync", "async"],
    )  # fmt: skip
    with open_place(str(tmp_path), {}) as place:
        (found,) = measure_async(options, place, lambda figures: None)
    assert [one.others for one in found.samples[FLOOR]] == [0.5, 0.0, 0.1]


def test_neighbours_count_what_others_use_only() -> None:
    meter = Neighbours()
    sum(range(1_000_000))
    assert 0 <= meter.num_cores() <= (os.cpu_count() or 1) + 1


def test_release_closes_what_waits_for_a_receiver() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ForkingPickler(io.BytesIO()).dump(torch.ones(3))
    assert len(os.listdir("/proc/self/fd")) > before
    checkpoint_process.release_descriptors()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if "serve" in t.name]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_benchmark_runs_every_mode_when_quick(tmp_path: Path) -> None:
    """In a process of its own, since DCP starts its checkpoint process from the main module."""
    place, json_path = tmp_path / "place", tmp_path / "out.json"
    place.mkdir()
    argv = ["--mode", "async", "--quick", "--verify", "--url", str(place), "--json", str(json_path),
            "--states", "small", "--families", "ours", "fsspec", "planning"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "scripts/benchmark.py", *argv],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=170, check=False,
        # Two threads of torch that wait for each other are slow on a machine that others use.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert list(place.iterdir()) == []
    (state,) = json.loads(json_path.read_text())["states"]
    assert state["failures"] == {}
    assert {"MPFsspecWriter n=2 process", "FsspecWriter n=1 thread", "writes nothing thread"} < set(
        state["saves"]
    )
