"""Job efficiency against the definition of Slurm's `seff`, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlscale.config.records import PlanRecord, Published
from dlscale.core.telemetry import GpuSample, Sample
from dlscale.report import profiles
from dlscale.report.results import PlanResult, RunResult
from dlscale.train.provenance import Provenance

#: The published job: 53 s of processor time in 56 s on one core, 1.31 GB of 8 GB; the machine has 64 cores.
PUBLISHED = {"seconds": 56, "cpu": 53, "cores": 1, "memory": 1.31e9, "of": 8e9}


def run(samples: list[Sample], **given: Any) -> RunResult:
    return RunResult(
        "one",
        "1 worker",
        Path(),
        "p/one",
        {},
        Provenance(**given) if given else None,
        [],
        None,
        None,
        None,
        {"train": [samples] if samples else []},
    )


def samples(gpus: tuple[GpuSample, ...] = ()) -> list[Sample]:
    """Return the published job as telemetry has it, in unequal steps."""
    rows, time = [], 1000.0
    for seconds, share in ((1.0, 0.0), (15.0, 0.8), (40.0, 1.0250)):
        time += seconds
        rows.append(
            Sample(time, seconds, cores=64, cpu_run=share / 64, rss_bytes=PUBLISHED["memory"] * share, gpus=gpus)
        )
    return rows


def test_the_published_job() -> None:
    job = profiles.job(run(samples(), cores=1, memory_bytes=8_000_000_000))
    assert job is not None
    assert (job.stage, job.seconds, job.cores) == ("train", 56, 1)
    assert job.cpu_seconds == pytest.approx(15 * 0.8 + 40 * 1.025) and job.cpu_seconds == pytest.approx(53)
    assert job.efficiency == pytest.approx(0.9464, abs=1e-4)
    assert job.peak_bytes == pytest.approx(1.025 * PUBLISHED["memory"]) and job.gpu is None


def test_the_page_has_the_figures_of_the_run_beside_it() -> None:
    figures = [
        Published(label="job", metric="CPU efficiency", value=94.64, unit="%", source="workshop", runs=["p.one"]),
        Published(label="job", metric="CPU efficiency", value=1.0, unit="%", source="other", runs=["q.one"]),
    ]
    reference = {"name": "one", "plan": "p", "run": "one", "measure": ["train"]}
    plan = PlanRecord(plan="p", study="mnist_cnn", measure=["train"], runs=[reference], published=figures)
    view = profiles.efficiency(PlanResult(plan, [run(samples(), cores=1, memory_bytes=8_000_000_000)]))
    assert view and view.notes[0].startswith("Published for these runs, at full size: job: CPU efficiency 94.64 % (")
    headings = [heading for heading, _ in view.tables[0].columns]
    cells = dict(zip(headings, (cell.text for cell in view.tables[0].rows[0]), strict=True))
    assert cells["CPU efficiency"] == "95\u00a0%" and cells["memory efficiency"] == "17\u00a0%"
    assert "GPU utilisation" not in cells and "waiting for data" not in cells
