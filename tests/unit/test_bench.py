"""The benchmark's own parts, and one quick run of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from mpwriter.bench import discard, process_tree
from mpwriter.bench.load_mode import LOADERS, LoadFigures, LoadSample
from mpwriter.bench.load_report import load_figures_as_json, load_findings, load_report
from mpwriter.bench.machine import redact_command, redact_url
from mpwriter.bench.main import main
from mpwriter.bench.options import parse_options
from mpwriter.bench.peer import PEER, peer_environment
from mpwriter.bench.places import Place, open_place, parse_storage_options
from mpwriter.bench.plot import plot_timing
from mpwriter.bench.progress import ProgressBar
from mpwriter.bench.states import STATE_NAMES, build_state, gpt2_shapes, measure_state
from mpwriter.bench.stats import ratio, summarize
from mpwriter.bench.subjects import FAMILIES, Subject, choose_subjects
from mpwriter.bench.sync_mode import StateFigures
from mpwriter.bench.sync_report import (
    best_row,
    figures_as_json,
    findings,
    state_report,
    timing_rows,
)
from mpwriter.bench.table import format_bytes, format_seconds, render_table, time_unit
from mpwriter.bench.timing import Sample, timed_rounds
from mpwriter.bench.verify import differences, verify_checkpoint

STOCK_ONLY = ["fsspec", "filesystem", "plain", "planning", "metadata"]
OURS, STOCK, SLOW_STOCK = Subject("ours", 2), Subject("fsspec", 2), Subject("filesystem", 1)
PLANNING, METADATA = Subject("planning"), Subject("metadata")


def _samples(*walls_s: float, cpu_s: float = 0.5, pickle_s: float = 0.0) -> list[Sample]:
    return [Sample(wall_s, cpu_s, 0.25, pickle_s) for wall_s in walls_s]


@pytest.fixture
def figures() -> StateFigures:
    return StateFigures(
        "large",
        32,
        2**30,
        timing={
            OURS: _samples(1.6, 1.5, 1.7, cpu_s=0.1),
            STOCK: _samples(4.0, 3.0, 5.0),
            SLOW_STOCK: _samples(8.0, 8.0, 8.0),
            PLANNING: _samples(1.0, 1.0, 1.1),
            METADATA: _samples(1.4, 1.4, 1.4, pickle_s=0.25),
        },
    )


def test_summarize_gives_median_and_range_when_values_are_unordered() -> None:
    assert summarize([3.0, 1.0, 10.0]) == (3.0, 1.0, 10.0, 3)
    assert summarize([1.0, 2.0]).median == 1.5


def test_summarize_raises_when_nothing_was_measured() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        summarize([])


@pytest.mark.parametrize("pair", [(None, 1.0), (1.0, None), (1.0, 0.0), (1.0, -0.1), (-1.0, 1.0)])
def test_ratio_is_none_when_a_figure_says_nothing(pair: tuple[float | None, float | None]) -> None:
    assert ratio(*pair) is None
    assert ratio(3.0, 1.5) == 2.0


def test_table_aligns_columns_when_cells_differ_in_length() -> None:
    text = render_table(["name", "s"], [["a", "10.5"], ["longer", "9"]])
    assert text.splitlines() == ["name       s", "------  ----", "a       10.5", "longer     9"]


def test_table_raises_when_a_row_is_short() -> None:
    with pytest.raises(ValueError, match="1 cells under 2 headers"):
        render_table(["a", "b"], [["x"]])


def test_figures_get_the_unit_that_fits_when_formatted() -> None:
    assert [format_seconds(s) for s in (None, 0.0123, 0.5, 12.34)] == [
        "-",
        "12.3 ms",
        "0.500 s",
        "12.3 s",
    ]
    assert [format_bytes(n) for n in (None, 5, 4096, 3 * 2**20, 2**30)] == [
        "-", "5 B", "4.00 KiB", "3.00 MiB", "1.00 GiB",
    ]  # fmt: skip
    assert time_unit([0.1, 0.05]).format(0.0123) == "12.3"
    assert time_unit([0.1, 5.0]).format(0.0123) == "0.012"


def test_gpt2_shapes_are_those_of_the_published_model() -> None:
    shapes = gpt2_shapes()
    assert len(shapes) == 148
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 124_439_808
    assert shapes["wte.weight"] == (50257, 768)
    assert shapes["wpe.weight"] == (1024, 768)
    assert shapes["h.11.attn.c_attn.weight"] == (768, 2304)
    assert shapes["h.11.mlp.c_proj.bias"] == (768,)


@pytest.mark.parametrize(
    ("name", "num_tensors", "nbytes"),
    [
        ("large", 32, 32 * 2**20),
        ("medium", 32, 8 * 2**20),
        ("small", 500, 500 * 4096),
        ("tiny", 1, 8),
    ],
)
def test_state_has_its_size_when_quick(name: str, num_tensors: int, nbytes: int) -> None:
    state = build_state(name, quick=True)
    assert (state.num_tensors, state.nbytes) == (num_tensors, nbytes)
    assert len(list(state.tensors())) == num_tensors


def test_small_state_has_its_size_when_full() -> None:
    state = build_state("small")
    assert (state.num_tensors, state.nbytes) == (20_000, 20_000 * 4096)


def test_model_state_has_moments_for_every_parameter() -> None:
    state = build_state("model", quick=True)
    parameters = state.state_dict["model"]
    assert parameters.keys() == state.state_dict["optim"]["state"].keys()
    assert state.num_tensors == 4 * len(parameters)
    assert state.nbytes == 3 * 4 * sum(p.numel() for p in parameters.values()) + 4 * len(parameters)


def test_state_tensors_differ_and_own_their_storage() -> None:
    tensors = list(build_state("large", quick=True).tensors())
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert not torch.equal(tensors[0], tensors[1])
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)


def test_build_state_raises_when_the_name_is_unknown() -> None:
    with pytest.raises(ValueError, match="large, medium, small, model, tiny"):
        build_state("huge")


def test_storage_options_nest_and_keep_types_when_parsed() -> None:
    pairs = ["anon=false", "key=a=b", "client_kwargs.endpoint_url=http://x:1", "client_kwargs.n=3"]
    assert parse_storage_options(pairs) == {
        "anon": False,
        "key": "a=b",
        "client_kwargs": {"endpoint_url": "http://x:1", "n": 3},
    }


@pytest.mark.parametrize("pairs", [["secret"], ["=x"], ["a=1", "a.b=2"]])
def test_storage_options_raise_when_malformed(pairs: list[str]) -> None:
    with pytest.raises(ValueError, match="storage option"):
        parse_storage_options(pairs)


def test_command_line_exits_without_the_value_when_an_option_is_malformed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--storage-option", "s3cr3t"], ["sync"])
    assert "storage option" in capsys.readouterr().err


def test_command_is_printed_without_secrets_when_it_has_some() -> None:
    argv = ["--url", "s3://me:pw@h/b?k=pw", "--url=ftp://u:pw@h/x",
            "--storage-option", "secret=pw", "--storage-option=key=pw"]  # fmt: skip
    shown = redact_command(argv)
    assert "pw" not in shown
    assert "secret=***" in shown.replace("'", "")
    assert redact_url("s3://me:pw@host/b/c?k=v#f") == "s3://host/b/c"
    assert redact_url("/tmp/a@b") == "/tmp/a@b"


def test_options_are_small_when_quick() -> None:
    quick, full = parse_options(["--quick"], ["sync"]), parse_options([], ["sync"])
    assert (quick.num_rounds, list(quick.passes)) == (2, ["timing"])
    assert (full.num_rounds, list(full.passes)) == (5, ["timing", "cold", "memory"])
    assert {*STATE_NAMES} - {*full.states} == {"medium"}
    assert parse_options(["--quick", "--rounds", "9"], ["sync"]).num_rounds == 9


def test_subjects_leave_out_the_local_writer_when_the_place_is_remote() -> None:
    local = choose_subjects(FAMILIES, [1, 2], [4], local=True)
    remote = choose_subjects(FAMILIES, [1, 2], [4], local=False)
    assert [s.label for s in local] == [
        "MPFsspecWriter n=1", "MPFsspecWriter n=2", "FsspecWriter n=4", "FileSystemWriter n=4",
        "plain write, fsync", "writes nothing", "pickles .metadata",
    ]  # fmt: skip
    assert {s.family for s in local} - {s.family for s in remote} == {"filesystem"}
    on_s3 = choose_subjects(FAMILIES, [1, 2], [4], local=False, url="s3://bucket/x")
    assert {s.family for s in on_s3} - {s.family for s in remote} == {PEER}


def test_peer_has_a_row_that_says_why_when_it_is_not_installed(
    figures: StateFigures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    peer = Subject(PEER, 2)
    why = peer.missing()
    assert why is not None and "pip install" in why
    assert Subject("ours", 2).missing() is None
    figures.missing[peer] = why
    (line,) = [line for line in state_report(figures).splitlines() if line.startswith(PEER)]
    assert line == f"{peer.label}  {why}"
    assert figures_as_json(figures)["missing"] == {peer.label: why}


def test_peer_gets_its_keys_by_the_environment_and_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    with peer_environment({"key": "k", "secret": "s", "anon": False}):
        assert (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]) == ("k", "s")
        assert "AWS_SESSION_TOKEN" not in os.environ
    assert os.environ["AWS_ACCESS_KEY_ID"] == "other"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ


def test_own_share_takes_planning_and_pickle_off_when_both_were_measured(
    figures: StateFigures,
) -> None:
    rows = {row.subject: row for row in timing_rows(figures.timing)}
    assert rows[OURS].over_planning_s == pytest.approx(0.6)
    assert rows[OURS].own_s == pytest.approx(0.35)
    assert rows[STOCK].own_s == pytest.approx(2.75)
    assert rows[PLANNING].own_s is None
    del figures.timing[METADATA]
    assert all(row.own_s is None for row in timing_rows(figures.timing))


def test_best_row_is_the_lowest_median_when_several_are_stock(figures: StateFigures) -> None:
    best = best_row(timing_rows(figures.timing), ["fsspec", "filesystem"])
    assert best is not None
    assert best.subject == STOCK
    assert best_row([], ["fsspec"]) is None


def test_report_compares_with_the_best_stock_setting(figures: StateFigures) -> None:
    text = state_report(figures)
    assert "large: 32 tensors, 1.00 GiB" in text
    (line,) = (line for line in text.splitlines() if line.startswith("MPFsspecWriter n=2"))
    assert line.split()[2:] == [
        "1.600", "1.500", "1.700", "0.62", "2.50x", "0.350", "7.86x", "0.100", "0.250",
    ]  # fmt: skip
    assert any(
        "dcp.save ours 1.600 s, stock 4.000 s, ratio 2.50x" in line for line in findings([figures])
    )


def test_report_says_nothing_of_rates_when_the_state_is_almost_empty(figures: StateFigures) -> None:
    figures.nbytes = 8
    assert "CPU s/GiB" not in state_report(figures)
    assert any("over a writer that writes nothing" in line for line in findings([figures]))


def test_figures_survive_json(figures: StateFigures) -> None:
    found = json.loads(json.dumps(figures_as_json(figures)))
    assert found["timing"][OURS.label]["wall_s"]["median"] == 1.6
    assert len(found["timing"][STOCK.label]["samples"]) == 3


@pytest.fixture(scope="module")
def _matplotlib_fonts() -> None:
    """Matplotlib keeps the files of its fonts open, which is no leak of a test."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "text")
    figure.savefig(io.BytesIO())


@pytest.mark.usefixtures("_matplotlib_fonts")
def test_plot_writes_a_picture(figures: StateFigures, tmp_path: Path) -> None:
    plot_timing([figures], str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_benchmark_refuses_at_once_when_it_cannot_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mpwriter.bench.main.can_plot", lambda: False)
    assert main(["--plot", "x.png"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "mpwriter[bench]" in captured.err


def test_rounds_run_everybody_once_a_round_when_shuffled(tmp_path: Path) -> None:
    subjects, order = [Subject("fsspec", 1), PLANNING, METADATA], []
    state = measure_state("mine", {"a": torch.arange(3)})
    with open_place(str(tmp_path), {}) as place:
        samples = timed_rounds(
            state, subjects, place, 4, after=lambda subject, url: order.append(subject)
        )
        assert os.listdir(place.url) == []
    assert [len(samples[subject]) for subject in subjects] == [4, 4, 4]
    rounds = [order[start : start + 3] for start in range(0, 15, 3)]
    assert all(set(one) == set(subjects) for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    assert all(sample.pickle_s > 0 for sample in samples[METADATA])


def test_place_is_removed_when_a_save_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with open_place(str(tmp_path), {}) as place:
            Path(place.url, "left").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["ours", "fsspec", "plain"])
def test_discarding_place_takes_whole_saves_and_keeps_nothing(family: str) -> None:
    discard.register()
    state = build_state("tiny", quick=True)
    with open_place("discard://", {}) as place:
        assert place.local_path is None
        url = place.fresh_url()
        assert url.startswith("discard://mpwriter-bench-")
        Subject(family, 0 if family == "plain" else 1).save(state, place, url)
        fs = fsspec.filesystem("discard")
        assert fs.ls(url) == []
        with pytest.raises(FileNotFoundError, match="nothing is kept"):
            fs.open(f"{url}/.metadata")


def test_discarding_file_counts_what_it_was_given() -> None:
    discard.register()
    with fsspec.filesystem("discard").open("discard://x", "wb") as stream:
        assert stream.write(memoryview(bytes(10))) == 10
        assert stream.seek(-4, os.SEEK_END) == 6
        stream.write(b"abc")
        assert stream.seek(0, os.SEEK_END) == 10


def test_place_knows_no_local_path_when_remote() -> None:
    with open_place("memory://bench", {}) as place:
        assert place.local_path is None
        assert "secret" not in repr(Place(place.url, {"secret": "x"}))


@pytest.mark.parametrize("family", ["fsspec", "filesystem"])
def test_verify_passes_when_nothing_was_changed(family: str, tmp_path: Path) -> None:
    state = build_state("model", quick=True)
    with open_place(str(tmp_path), {}) as place:
        url = place.fresh_url()
        Subject(family, 2).save(state, place, url)
        verify_checkpoint(state, place, url)
        state.state_dict["model"]["wpe.weight"][3, 4] += 1
        with pytest.raises(RuntimeError, match=r"model\.wpe\.weight"):
            verify_checkpoint(state, place, url)


def test_plain_write_holds_exactly_the_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5), "none": torch.empty(0), "b": torch.ones(2, 3)}
    with open_place(str(tmp_path), {}) as place:
        url = place.fresh_url()
        Subject("plain").save(measure_state("mine", tensors), place, url)
        expected = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
        assert Path(url).read_bytes() == expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}, ["a"]),
        ({"a": torch.tensor(float("nan"))}, {"a": torch.tensor(float("nan"))}, []),
        ({"a": {"b": [torch.ones(2)]}}, {"a": {"b": [torch.zeros(2)]}}, ["a.b.0"]),
        ({"a": torch.ones(2)}, {"a": torch.ones(2, dtype=torch.float64)}, ["a"]),
        ({"a": 1, "b": (1, 2)}, {"a": 1.0, "b": (1, 3)}, ["a", "b.1"]),
        ({"a": {"x": 1}}, {"a": {}}, ["a"]),
    ],
)
def test_differences_name_the_keys_when_bits_differ(
    left: Any, right: Any, expected: list[str]
) -> None:
    assert differences(left, right) == expected


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_only_when_it_goes_to_a_terminal() -> None:
    terminal, pipe = _Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with ProgressBar(2, stream) as bar:
            bar.show("first")
            bar.step()
            bar.show("second")
    assert "1/2" in terminal.getvalue()
    assert "second" in terminal.getvalue()
    assert pipe.getvalue() == ""


@pytest.mark.skipif(not process_tree.available(), reason="needs /proc")
def test_process_tree_counts_children_and_shared_memory() -> None:
    script = (
        "import os, sys; fd = os.memfd_create('x'); os.posix_fallocate(fd, 0, 1 << 20);"
        "print('up', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert child.pid in process_tree.descendants(os.getpid())
        found = process_tree.footprint(child.pid)
        assert found.pss_bytes > 0
        assert found.shared_memory_bytes == 1 << 20
    finally:
        child.communicate()
    assert child.pid not in process_tree.descendants(os.getpid())
    assert process_tree.footprint(child.pid) == (0, 0)


@pytest.mark.slow
def test_benchmark_runs_all_passes_when_only_stock_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _run_quick(tmp_path, capsys, ["tiny"], STOCK_ONLY, PASSES)
    assert {entry["family"] for entry in result["timing"].values()} == set(STOCK_ONLY)
    assert set(result["cold"]) == {"FsspecWriter n=2", "writes nothing"}
    if process_tree.available():
        assert result["memory"]["FsspecWriter n=2"]["num_samples"] >= 1


@pytest.mark.slow
def test_benchmark_runs_everything_when_quick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _run_quick(tmp_path, capsys, ["small"], list(FAMILIES), PASSES)
    assert result["timing"]["MPFsspecWriter n=2"]["own_s"] is not None
    assert "MPFsspecWriter n=2" in result["cold"]


PASSES = ["timing", "cold", "memory"]


def _run_quick(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    states: list[str],
    families: list[str],
    passes: list[str],
) -> Any:
    place, json_path = folder / "place", folder / "out.json"
    place.mkdir()
    argv = ["--quick", "--verify", "--rounds", "1", "--url", str(place), "--json", str(json_path),
            "--workers", "2", "--threads", "2", "--states", *states, "--families", *families,
            "--passes", *passes]  # fmt: skip
    assert main(argv) == 0
    assert list(place.iterdir()) == []
    printed = capsys.readouterr()
    assert "FsspecWriter n=2" in printed.out
    assert "machine:" in printed.out
    assert printed.err == ""
    (state,) = json.loads(json_path.read_text())["states"]
    return state


# -- loads --------------------------------------------------------------------------------------


def test_load_report_tells_own_share_and_verification() -> None:
    walls_s = {
        "FsspecReader (ours)": 1.5,
        "ours, verify=False": 1.25,
        "stock FsspecReader": 4.0,
        "FileSystemReader": 6.0,
        "plain readinto": 0.75,
        "reads nothing": 1.0,
    }
    assert set(walls_s) < {label for label, *_ in LOADERS}
    figures = LoadFigures("small", 20_000, 2**30)
    figures.samples = {label: [LoadSample(wall_s, 0.5)] for label, wall_s in walls_s.items()}
    assert load_findings([figures]) == [
        "small: dcp.load ours 1.500 s, stock 4.000 s, ratio 2.67x",
        "small: reader's own share ours 0.500 s, stock 3.000 s, ratio 6.00x",
        "small: 2.00x the time of a plain readinto",
        "small: verification costs 20 %",
    ]
    ours = next(line for line in load_report(figures).splitlines() if line.startswith("Fsspec"))
    assert ours.split()[2:] == [
        "1.500",
        "1.500",
        "1.500",
        "0.67",
        "2.67x",
        "0.500",
        "6.00x",
        "0.500",
    ]
    json.dumps(load_figures_as_json(figures))


@pytest.mark.slow
def test_main_measures_loads_and_compares_what_they_gave(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "figures.json"
    argv = ["--mode", "load", "--quick", "--verify", "--rounds", "1", "--url", str(tmp_path)]
    assert main([*argv, "--states", "large", "small", "--json", str(report)]) == 0
    assert "reader's own share" in capsys.readouterr().out
    figures = json.loads(report.read_text())
    assert figures["mode"] == "load"
    for state in figures["states"]:
        # The peer reads S3 only.
        labels = {label for label, family, *_ in LOADERS if family != "s3torchconnector"}
        assert set(state["loads"]) == labels
    assert os.listdir(tmp_path) == [report.name]


def test_main_refuses_to_draw_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mode", "load", "--plot", "figures.png"]) == 2
    assert "saves only" in capsys.readouterr().err
