"""Make small files that programs, watchdogs, stages and loaders write, and read these files as dlscale does."""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from pathlib import Path
from unittest import mock

import numpy as np

from dlscale.core import progress, telemetry
from dlscale.data.staging import RECORD
from dlscale.extensions.dali import mirrors, prepare
from dlscale.extensions.hangs import collect
from dlscale.extensions.hangs.finding import describe
from dlscale.extensions.hangs.record import hang_of
from dlscale.extensions.hangs.supervisor import HangSupervisor
from dlscale.extensions.headroom import headroom
from dlscale.extensions.headroom.records import Headroom
from dlscale.extensions.loading.report import LoaderWatch
from dlscale.extensions.programs import live, measure, program, running
from dlscale.extensions.programs import profile as profiling
from dlscale.extensions.programs.settings import Program
from dlscale.preflight import status
from dlscale.report.verdict import judge_run
from dlscale.results import read_alone
from tests.test_loaders import VOLUMES, crops, published_mirror
from tests.test_status import configuration, epoch, write_training_status

#: Begin of the program, seconds since 1970-01-01 UTC.
BEGIN = 1.7e9
LOADER = {"dataset": "A", "workers": 1, "seeds": [1], "pin_memory": False, "batches": 20, "waited": 1.0, "firsts": 1}
ARRAY = {"kind": "HDF5", "name": "x", "file": "x.h5", "dtype": "float32", "itemsize": 4, "chunks": [4, 4]}
SETTINGS = Program(command=["train", "{resume}"], resume=["{out}/last"], losses={"val (.*)": "loss/valid"})


def _write(file: Path, *lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))


# ---- the folder of a measured program ----------------------------------------------------------------


def make_program(folder: Path) -> None:
    """Write the notes of two training processes and a loader worker, telemetry, and results of profilers."""
    steps = folder / "steps"
    for rank in (0, 1):
        lines = ["t 1", "p 4000", "l 1000.5", *(f"b 1 {n} 0.05 8\ns {n}.5 {n - 1000} 1" for n in range(1001, 1040))]
        _write(steps / f"timed.host.{rank + 7}", f"begin {BEGIN:.6f} 1000.0 {rank} 6", *lines, "g 1040.0 1041.0")
        lines = [f"m {n} 100000000 {n}00000{' 7 8 9 1 99' * rank}" for n in range(1001, 1040, 3)]
        compiled = {"time": BEGIN + 9, "seconds": 1.0, "frame": "0", "again": True, "forward": True, "function": "f"}
        _write(
            *(steps / f"health.host.{rank + 7}", f"begin {BEGIN} 1000.0", *lines, f"c {json.dumps(compiled)}"),
            'k {"print": 3}',
        )
        times = {"first_waited": 0.1, "between": [0.1], "requests": 20, "empty": 18, "bytes": 10**9, "sized": 20}
        main = {"host": "host", "pid": rank + 7, "parent": 6, "device": "cuda", "cores": 4}
        _write(steps / f"loader.host.{rank + 7}", json.dumps({**main, "loaders": [{**LOADER, **times}]}))
    worker = {"seed": 1, "batches": 20, "seconds": 4.0, "parts": {"read": 3.0}, "transforms": ["T"]}
    reads = {"regions": {"1 × 4": 9}, "requests": 9, "requested": 144, "touched": 576, "opens": 1, "seconds": 3.0}
    more = {"host": "host", "pid": 9, "parent": 7, "worker": worker, "arrays": [ARRAY | reads]}
    _write(steps / "loader.host.9", json.dumps(more))
    window = {"begin": BEGIN + 10, "end": BEGIN + 13, "version": "2.9", "cuda": False, "seconds": [1.0] * 3}
    _write(steps / "torch.host.7.window", json.dumps({**window, "problem": None}))
    spans = [
        ("step", "user_annotation", 0, 9000),
        ("forward", "user_annotation", 10, 4000),
        ("aten::mm", "cpu_op", 20, 9),
    ]
    events = [{"ph": "X", "name": a, "cat": b, "ts": c, "dur": d, "pid": 1, "tid": 1} for a, b, c, d in spans]
    _write(steps / "torch.host.7.json", json.dumps({"traceEvents": events}))
    stack = 'process 6:"sh";process 7:"python train.py";thread (7): MainThread;<module> (train.py:9);step (train.py:5)'
    _write(folder / "profile/py-spy.folded", f"{stack} 90", f"{stack};load (data.py:3) 10")
    rows = [telemetry.Sample(BEGIN + n, 1.0, 4, cpu=0.9, cpu_run=0.8, cpu_others=0.1) for n in range(40)]
    (folder / "telemetry").mkdir()
    (folder / "telemetry/throughput.csv").write_text(telemetry.header(0) + "".join(map(telemetry.line, rows)))


def measured(folder: Path) -> None:
    """Write the records and the lines of a measured program, as `dlscale measure --loader --profile` does."""
    steps, rows = folder / "steps", folder / "telemetry/throughput.csv"
    view = live.View(steps, rows, 10.0)
    view._begin = BEGIN
    view.line(BEGIN + 40)
    LoaderWatch().finish(steps, folder)
    profilers = profiling.Profilers.__new__(profiling.Profilers)
    profilers.use(folder)
    profilers._span, profilers._problem, profilers._tool = (BEGIN + 10, BEGIN + 20), None, "true"
    run = running.Outcome(0, BEGIN, 50.0, 0.0, 0.0, [], {})
    throughput, processes = running._measured(["train"], steps, rows, run, running.Reading(), profilers.excluded_spans)
    throughput.write(folder / "throughput.json")
    measure._write_settings(folder, {"command": ["train"]}, geometry={"gpus_per_node": throughput.nranks})
    profiling.lines(profilers.write_profile(processes, throughput))
    measure.lines(folder, throughput, judge_run(read_alone(folder)))


def make_earlier(folder: Path) -> None:
    """Write the losses that a program printed in two tries."""
    for number in (1, 2):
        _write(folder / "out/last", "x")
        _write(folder / "steps/timed.host.1", "begin 0 0 0", *(f"s {n} 0.0 0" for n in range(1, 40)))
        _write(folder / "steps/printed", *(json.dumps(["loss/valid", n + 0.5, 1 / n]) for n in range(1, 40, 10)))
        os.utime(folder / "out/last", (30 * number,) * 2)
        program.earlier(folder, folder / "out", SETTINGS)


def resumed(folder: Path) -> None:
    """Join the losses of earlier tries with the losses of the last try."""
    before = program.earlier(folder, folder / "out", SETTINGS)
    before.merged({"loss/valid": [(50.0, 0.5)]}, [49.0, 50.0])


def make_turns(folder: Path) -> None:
    """Write the turns of a program whose batches are replayed."""
    for pid in (7, 8):
        _write(folder / f"turns.host.{pid}", *(f"20 {n} 8 {1 + n % 2}.500000 4 4096 0 0" for n in range(12)))
        _write(folder / f"turns.host.{pid}.now", "250 4")


def turns(folder: Path) -> None:
    """Sum up the turns, as the measurement of the headroom does."""
    headroom._number(folder)
    pairs, rows = headroom._pairs(folder, 20), headroom._rows(folder)
    Headroom(turns=pairs, batches=min((int(row[4]) for row in rows), default=0), bytes=1, processes=1, seconds=1.0)


# ---- hangs -------------------------------------------------------------------------------------------


def make_hang(folder: Path) -> None:
    """Write notes of two processes, the first of which waits in an operation, and files of two runs that hung."""
    stacks = ["Current thread 0x01 (most recent call first):", '  File "/a/train.py", line 3 in step']
    for rank in (0, 1):
        known = {"rank": rank, "place": "node", "pid": rank + 7, "parent": 6, "idle": 9.0, "trains": True}
        known |= {"stepped": True, "launched": True, "line": "at train.py:3", "written": BEGIN}
        entry = {"profiling_name": "gloo:all_reduce", "time_created_ns": 10**18, "called": "all_reduce #1 at a.py:3"}
        entry |= {"process_group": ["0", "default"], "collective_seq_id": 1, "p2p_seq_id": 0, "retired": bool(rank)}
        more = {"children": {"9": "\n".join(stacks)}, "groups": {"0": ["default", [0, 1]]}, "complete": True}
        _write(folder / f"steps/hang.status.host.{rank + 7}", json.dumps(known))
        _write(folder / f"steps/hang.report.host.{rank + 7}", json.dumps({**known, **more, "entries": [entry]}))
        _write(folder / f"steps/hang.stacks.host.{rank + 7}", *stacks)
    _write(folder / "results/plans/p/a/hang/finding.txt", "no step for 9 s: rank 1 is at train.py:3")
    lines = ["12:00:00 epoch 1", "dlscale train: rank 1 hangs at train.py:3. This process also ends"]
    _write(folder / "results/logs/train/p/b.log", *lines)


def hung(folder: Path) -> None:
    """Describe a hang, as `dlscale measure --hang-after` does for a program, and `dlscale explain` for a run."""
    steps = folder / "steps"
    supervisor = HangSupervisor(steps, folder.parent / "hung", 60.0, lambda text: None)
    supervisor._look()
    supervisor._idle()
    for file in steps.iterdir():
        file.touch()
    statuses = {each["pid"]: each for each in supervisor._statuses.values()}
    with mock.patch.object(collect, "ANSWER", 0.0):
        reports = collect.request_reports(steps, ())
    stacks = {int(file.suffix[1:]): file.read_bytes().decode(errors="replace") for file in steps.glob("hang.stacks.*")}
    found = collect.Collected(reports, stacks, collect._processes(reports, stacks, statuses, (), ()))
    any(map(supervisor._has_moved, reports.values()))
    found.keep(supervisor.folder)
    describe(found.processes)
    for name in "ab":
        hang_of(folder / "results/plans/p" / name)


# ---- running stages ----------------------------------------------------------------------------------


def make_progress(folder: Path) -> None:
    """Write the results of a running, a failed and a finished stage."""
    write_training_status(folder, host="elsewhere", place="elsewhere", job="17")
    data = {
        "what": "preprocess",
        "part": True,
        "done": 3,
        "total": 9,
        "unit": "rows",
        "place": "x",
        "time": time.time(),
    }
    _write(folder / "logs/preprocess/d/train/0.log.doing", json.dumps(data))
    _write(folder / "logs/train/p/b.log", f"12:00:00 {progress.STARTED % 2.0}", "dlscale train: the disk is full")
    for name in "ab":
        _write(folder / f"plans/p/{name}/metrics.jsonl", *(epoch(number).strip() for number in (1, 2)))
        _write(folder / f"benchmarks/train/p/{name}.tsv", "s\th:m:s\tmax_rss", "8.5\t0:00:08\t300")


_configured = functools.cache(configuration)


def shown(folder: Path) -> None:
    """Print the state of all stages, as `dlscale status` and a running workflow do."""
    for as_json in (False, True):
        status.main(argparse.Namespace(plans=["p"], json=as_json, watch=False), _configured(folder))
    begin, paths = (
        BEGIN - 60,
        [(f"{folder}/logs/train/p/{n}.log", f"{folder}/benchmarks/train/p/{n}.tsv") for n in "ac"],
    )
    call = status.CallProgress(begin, [status.Job("p.a", "train", *each, 9.0, True, 0.5) for each in paths])
    call.look(time.time())
    status.progress_line(call, time.time())
    progress.lines(progress.jobs(folder, begin), begin, time.time(), 4)


# ---- mirrors -----------------------------------------------------------------------------------------


def make_mirrors(folder: Path) -> None:
    """Write volumes with mirrors of dlscale, and a volume with mirrors of the tutorial's converter."""
    for name, files in (("own", 2), ("published", 1)):
        (folder / name).mkdir(parents=True)
        samples = crops(folder / name, VOLUMES["published"], files=files)
        for kind, field in (("data", samples.input), ("label", samples.target)):
            if files == 1:
                published_mirror(field, folder / name / f"0_{kind}.npy")
            prepare.make_mirror(field)


def mirrored(folder: Path) -> None:
    """Check or renew mirrors, and compare them with their volumes."""
    for name, files in (("own", 2), ("published", 1)):
        record = folder / name / "mirrors" / RECORD
        record.write_bytes(record.read_bytes().replace(b"/original/", b"/copy/"))
        samples = crops(folder / name, VOLUMES["published"], files=files)
        for field in (samples.input, samples.target):
            prepare.make_mirror(field)
            found = mirrors.mirror(field)
            values = np.load(found.path)
            for reader, first, (depth, height, width) in zip(field.readers, found.first, found.edges, strict=True):
                own = np.moveaxis(reader.stored(()), 0, -1)
                np.testing.assert_array_equal(values[first : first + depth, :height, :width], own)
