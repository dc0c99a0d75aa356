"""The evidence sheet: values computed by hand, open facts, two pages, and the questions of application forms."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlscale.config import resolve as config
from dlscale.config.compute import compute_digest
from dlscale.config.records import PlanRecord, RunReference
from dlscale.core.metrics import Epoch, LossInfo, epoch_lines
from dlscale.extensions.sheet import draw
from dlscale.extensions.sheet.parts import Curve, Fact, Grid, Part, Row
from dlscale.extensions.sheet.sheet import forms
from dlscale.measure.records import Throughput, Trials, Usage
from dlscale.parallel.records import Device
from dlscale.train.provenance import Provenance
from tests.conftest import ROOT, TINY, error_line, stage

CPU = Device(kind="cpu", name="Example CPU", threads=1)
PARTS = {"problem", "machine", "scaling", "efficiency", "target", "energy", "memory", "storage", "request", "commands"}


def trials(mean: float, busy: bool = False) -> Trials:
    """Return three trials, on a machine of 4 cores on which other programs keep 3 cores busy if `busy`."""
    usage = Usage(seconds=3.0, cores=4, cpu_seconds=3.0, cores_cpu_seconds=12.0 if busy else 3.0)
    rates = [0.99 * mean, mean, 1.01 * mean]
    own = {"trial_throughput": rates, "trial_time": [1.0] * 3, "avg_iter_throughput": rates}
    return Trials(mean=mean, std=mean / 100, usage=usage, **own)


def measured(folder: Path, settings: dict[str, Any], busy: bool) -> None:
    devices = settings["geometry"]["gpus_per_node"]
    modes: Any = {"IO": 3000 * devices, "SYNTHETIC": 100 * devices**0.9, "FULL": 90 * devices**0.9}
    modes = {mode: trials(mean, busy) for mode, mean in modes.items()}
    own = {"batch_size": settings["batch_size"], "device": CPU, "compute": compute_digest(settings)}
    Throughput(nranks=devices, peak_memory_bytes=500_000_000, **own, **modes).write(folder / "throughput.json")


def trained(folder: Path) -> None:
    """Write a training of 3 epochs of 16 samples, 1 s each; the second epoch reaches the target."""
    epochs = [
        Epoch(
            **{"epoch": n, "step": 2 * n, "samples": 16 * n, "learning_rate": 0.01, "train_loss": 1.0},
            **{"valid_loss": 1.0 / n, "epoch_seconds": 1.0, "samples_per_second": 16.0, "valid_seconds": 0.5},
        )
        for n in (1, 2, 3)
    ]
    (folder / "metrics.jsonl").write_text(epoch_lines(epochs))
    times = {"started": "2026-01-01T10:00:00+00:00", "finished": "2026-01-01T10:00:10+00:00"}
    made = Provenance(device=CPU, devices=1, parameters=1234, loss=LossInfo(title="loss"), **times)
    made.write(folder / "provenance.json")


@pytest.fixture
def results(tmp_path: Path, tiny_data: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that writes a plan of strong scaling on 1, 2 and 4 devices, and a plan with a training."""
    monkeypatch.chdir(tmp_path)

    def write(busy: bool = False) -> Path:
        tiny = TINY["starter_cnn"]
        target = {"training": {"epochs": 3, "target": {"metric": "valid_loss", "value": 0.6}}}
        common = {"study": "starter_cnn", "settings": {**tiny["run"], "dataset": "tiny"}}
        scaled = {"devices": [1, 2, 4], "batch_sizes": [8], "variants": {"ddp": {}}}
        plans = {
            "strong": {**common, "kind": "strong_scaling", "title": "Strong", "scaling": scaled},
            "learn": {**common, "measure": ["train"], "runs": {"one": target}},
        }
        raw = {"targets": [*plans], "results": "results", "datasets": {"tiny": tiny["dataset"]}, "plans": plans}
        Path("mine.yaml").write_text(yaml.safe_dump(raw))
        Path("results/data").mkdir(parents=True)
        Path("results/data/tiny").symlink_to(tiny_data("starter_cnn"))
        for plan, runs in config.load(raw).plans.items():
            if plan not in plans:
                continue
            measure = plans[plan].get("measure", ["throughput"])
            for name, resolved in runs.items():
                folder = Path("results/plans", plan, name)
                folder.mkdir(parents=True)
                settings = resolved.run.model_dump(mode="json")
                (folder / "config.yaml").write_text(yaml.safe_dump(settings))
                trained(folder) if plan == "learn" else measured(folder, settings, busy)
            references = [RunReference(name=name, plan=plan, run=name, measure=measure) for name in runs]
            own = {"study": "starter_cnn", "kind": plans[plan].get("kind", "set"), "measure": measure}
            record = PlanRecord(plan=plan, title=plan.title(), runs=references, **own).model_dump(mode="json")
            Path("results/plans", plan, "plan.yaml").write_text(yaml.safe_dump(record))
        return Path("results/plans/strong")

    return write


def sheet(*words: object) -> str:
    assert stage("report", "--sheet", *words, "--configfile", "mine.yaml") == 0
    return Path("results/plans", str(words[0]), "sheet.html").read_text(encoding="utf-8")


def row(html: str, label: str) -> tuple[str, str, str]:
    """Return the origin, the text and the note of a fact."""
    pattern = r'<tr class="(\w+)"><th[^>]*><span[^>]*>.</span>' + re.escape(label) + r"</th><td>(.*?)</td>"
    basis, text, note = re.findall(pattern + r'<td class="note">(.*?)</td></tr>', html)[0]
    return basis, text.replace("\xa0", " "), note.replace("\xa0", " ")


def cells(html: str) -> list[tuple[str, list[str]]]:
    """Return the origin and the cells of all rows of tables."""
    rows = re.findall(r'<tr class="(measured|predicted)">(<td>.*?)</tr>', html)
    return [
        (
            basis,
            [re.sub("<.*?>.?</span>|<.*?>", "", cell).replace("\xa0", " ") for cell in re.split("</td>", told)[:-1]],
        )
        for basis, told in rows
    ]


def test_figures_by_hand(results: Callable[..., Path]) -> None:
    results()
    html = sheet("strong", "learn", "--trainings", 10)
    scaled = [told for told in cells(html) if told[1][-1].startswith(("measured", "predicted,")) and len(told[1]) > 7]
    four, ahead = scaled[2], scaled[3]
    assert four[0] == "measured" and four[1][:4] == ["4", "1", "8", "313 ± 7.8"]
    assert four[1][4].startswith("87 % ± 5") and four[1][6] == "25.5"  # 4 ** -0.1; 8 samples / (313 samples/s)
    assert ahead[0] == "predicted" and ahead[1][0] == "8" and " to " in ahead[1][3] and " to " in ahead[1][4]
    assert row(html, "1  Samples of a training")[:2] == ("measured", "32")
    assert row(html, "2  Rate")[:2] == ("measured", "313 samples/s")
    assert row(html, "3  Waits, validations")[1] == "factor 1.50"  # two epochs of 1 s, two validations of 0.5 s
    assert row(html, "4  Time of a training")[:2] == ("predicted", "0.153 s")  # 32 / 313.4 x 1.5
    assert row(html, "5  Node-hours of a training")[1] == "4.25×10⁻⁵"
    assert row(html, "7  Measurements to run")[1] == "0 node-hours"
    assert row(html, "Request")[:2] == ("predicted", "0.000425 node-hours")
    assert row(html, "Peak per device")[:2] == ("measured", "500 MB")
    assert row(html, "Energy per sample")[0] == row(html, "Weak scaling")[0] == "open"
    assert "kind: weak_scaling, from: strong.b8_ddp_4" in row(html, "Weak scaling")[2]
    assert "dlscale report --sheet strong learn --trainings 10 --configfile mine.yaml" in html


def test_other_devices_than_the_sites_are_open(results: Callable[..., Path]) -> None:
    results()
    raw = yaml.safe_load(Path("mine.yaml").read_text())
    raw["plans"]["learn"]["runs"]["two"] = {"geometry": {"gpus_per_node": 2}}
    raw["site"] = yaml.safe_load((ROOT / "profiles/perlmutter/site.yaml").read_text()) | {"engine": "none"}
    Path("mine.yaml").write_text(yaml.safe_dump(raw))
    html = sheet("strong", "learn")
    assert row(html, "Measured devices")[0] == "open" and "the site has A100" in row(html, "Measured devices")[2]
    assert row(html, "7  Measurements to run")[:2] == ("predicted", "≤0.125 node-hours")  # 15 min on half a node
    Path("results/data/tiny").unlink()  # a link: other tests need the dataset
    basis, hours, note = row(sheet("strong", "learn"), "7  Measurements to run")
    assert (basis, hours) == ("predicted", "≤0.125 node-hours") and "node-hours on CPU nodes" in note


def test_training_on_the_devices_of_production_needs_no_prediction(results: Callable[..., Path]) -> None:
    results()
    basis, text, note = row(sheet("strong", "learn", "--production", 1), "4  Time of a training")
    assert (basis, text) == ("measured", "3.00 s") and note.startswith("learn.one")


def test_figures_of_a_busy_machine_are_not_facts(results: Callable[..., Path]) -> None:
    results(busy=True)
    html = sheet("strong", "learn")
    assert row(html, "Efficiency, plan strong")[0] == "open" and "<svg" not in html
    found = [told for told in cells(html) if "busy machine" in told[1][-1]]
    assert found and all("not known" in told[1] for told in found)
    assert row(html, "2  Rate")[0] == "predicted" and "measure again" in row(html, "Request")[2]


def test_the_pdf_has_the_same_facts_on_two_pages(results: Callable[..., Path]) -> None:
    folder = results()
    html = sheet("strong", "learn")
    assert "<svg" in html and html.count('class="page"') == 2 and "<script" not in html
    first = (folder / "sheet.pdf").read_bytes()
    assert len(re.findall(rb"/Type /Page\b", first)) == 2
    sheet("strong", "learn")
    assert (folder / "sheet.pdf").read_bytes() == first  # the same results give the same bytes


def test_text_shrinks_to_fit_and_a_full_page_is_reported(tmp_path: Path) -> None:
    def fits(lines: int) -> bool:
        rows = [Row(("1", "long " * 10), "predicted")] * lines
        part = Part(
            "scaling", "Scaling", [Fact("Label", "value", "open", "note " * 30)], [Grid("Table", ("a", "b"), rows)]
        )
        return draw.pdf(tmp_path / "sheet.pdf", "Title", [[part], []], {"open": 1}, {})

    assert fits(70) and not fits(150)


def test_a_dollar_in_a_label_is_drawn_as_text() -> None:
    svg = draw._svg([Curve(r"cost $\foo{$", [(1, 1.0, 0.9, 1.1)], []), Curve("$5 to $8", [(1, 1.0, 0.9, 1.1)], [])])
    assert r">cost $\foo{$: efficiency over devices<" in svg and ">$5 to $8: efficiency over devices<" in svg


def test_measured_and_predicted_look_different_without_colour() -> None:
    marks, slants = ({draw.STYLES[basis][place] for basis in ("measured", "predicted")} for place in (3, 2))
    assert len(marks) == len(slants) == 2 and len({look[3] for look in draw.STYLES.values()}) == 4


def test_each_question_of_a_form_is_mapped(results: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    known = forms()
    assert set(known) == {"ercap", "eurohpc", "gcs", "archer2"}
    used = {part for form in known.values() for question in form.questions for part in question.parts}
    assert used == PARTS
    results()
    assert stage("report", "--sheet", "strong", "--configfile", "mine.yaml", "--json") == 0
    answers = json.loads(capsys.readouterr().out)["forms"]
    assert [len(asked) for asked in answers.values()] == [len(form.questions) for form in known.values()]
    assert all(each["parts"] or each["open"] for asked in answers.values() for each in asked)
    scaling = next(each for each in answers["ARCHER2"] if "speed-up" in each["ask"])
    assert scaling["parts"] == ["Strong and weak scaling"] and scaling["open"][0].startswith(
        "Weak scaling: add the plan"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "nothing"),
        (["weak"], "weak has no results yet. Run dlscale run weak"),
        (["strong", "--trainings", "0"], "--trainings: got 0; expected at least 1"),
    ],
)
def test_mistakes_are_one_message(
    results: Callable[..., Path], capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    results()
    raw = yaml.safe_load(Path("mine.yaml").read_text())
    raw["plans"]["weak"] = {**raw["plans"]["strong"], "kind": "weak_scaling"}
    Path("mine.yaml").write_text(yaml.safe_dump(raw))
    assert stage("report", "--sheet", *words, "--configfile", "mine.yaml") == 2
    assert message in error_line(capfd)
