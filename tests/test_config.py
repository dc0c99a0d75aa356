"""Configuration: one message for each mistake, at the place where it was written; how settings are layered;
and the published plans, number by number.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dlscale import cli
from dlscale.config import resolve as config
from dlscale.config.resolve import Configuration
from dlscale.config.run import RunCore, load_run, run_class
from dlscale.core import machine
from dlscale.core.errors import UserError
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.data.parts import load_dataset
from dlscale.train.schedule import peak_rate
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, ROOT, stage

Raw = dict[str, Any]

#: Two datasets and a plan without mistakes.
SOUND: Raw = {
    "targets": ["sound"],
    "datasets": {"box": COSMO, "sky": ERA5},
    "plans": {
        "sound": {
            "study": "cosmo_unet",
            "settings": {"dataset": "box", **COSMO_RUN},
            "runs": {"first": {}, "second": {"batch_size": 2}},
        },
        "weather": {"study": "era5_vit", "settings": {"dataset": "sky", **ERA5_RUN}, "runs": {"vit": {}}},
    },
}


def load(**changes: Any) -> Configuration:
    return config.load(config.merge(copy.deepcopy(SOUND), changes))


def plan(settings: Raw | None = None, study: str = "cosmo_unet", **more: Any) -> Raw:
    """Return a plan `p` of sound settings; `more` replaces or adds keys of it."""
    base = {"dataset": "box", **COSMO_RUN} if study == "cosmo_unet" else {"dataset": "sky", **ERA5_RUN}
    merged = config.merge(copy.deepcopy(base), settings or {})
    return {"plans": {"p": {"study": study, "settings": merged, "runs": {"a": {}}} | more}}


def message(**changes: Any) -> str:
    """Return the message that the changed configuration ends in."""
    with pytest.raises(UserError) as caught:
        load(**changes)
    return str(caught.value)


def one(text: str, path: str, *words: str) -> None:
    """Assert that a message is one line, about `path`, and holds `words`."""
    assert text.startswith(f"configuration: {path}: "), text
    assert "\n" not in text, text
    for word in words:
        assert word in text, text


# ---- mistakes ----------------------------------------------------------------------------------------


#: Settings with one mistake each: what is wrong, below the place where it was written, and what is said.
MISTAKES = {
    "unknown key": ({"batchsize": 4}, "", ("'batchsize'", "did you mean 'batch_size'?")),
    "unknown key deeper": ({"optimizer": {"lrr": 1e-3}}, ".optimizer", ("'lrr'", "did you mean 'lr'?")),
    "value out of range": ({"optimizer": {"lr": -3}}, ".optimizer.lr", ("got -3", "greater than 0")),
    "not a number": ({"batch_size": "many"}, ".batch_size", ("got 'many'", "valid integer")),
    "not finite": ({"optimizer": {"lr": float("nan")}}, ".optimizer.lr", ("got nan", "finite")),
    "wrong choice": ({"precision": "bf61"}, ".precision", ("got 'bf61'", "did you mean 'bf16'?", "fp16")),
    "misspelt kind": ({"loader": {"kind": "torhc"}}, ".loader", ("did you mean 'torch'?", "synthetic")),
    "misspelt kind of a union": (
        {"samples": {"kind": "corps", "crop": 16}},
        ".samples.kind",
        ("did you mean 'crops'?",),
    ),
    "no mapping": ({"model": "unet3d"}, ".model", ("got 'unet3d'", "keys and values")),
    "list too short": ({"optimizer": {"betas": [0.9]}}, ".optimizer.betas", ("2",)),
    "wrong item of a list": ({"model": {"widths": [4, -8]}}, ".model.widths.1", ("got -8",)),
    "wrong dataset": ({"dataset": "boxx"}, ".dataset", ("'boxx'", "did you mean 'box'?", "sky")),
    "dataset of another kind": ({"dataset": "sky"}, ".dataset", ("era5", "cosmo")),
    "impossible geometry": ({"geometry": {"gpus_per_node": 3}}, "", ("batch_size 4", "gpus_per_node", "3")),
    "crop that levels cannot halve": ({"samples": {"crop": 10}}, "", ("samples.crop 10", "model.widths")),
    "crop larger than the box": ({"samples": {"crop": 64}}, ".samples.crop", ("64", "box", "32")),
    "epochs and steps": ({"training": {"epochs": 2, "steps": 9}}, ".training", ("either epochs or steps",)),
    "scaling without a base": ({"schedule": {"scaling": "sqrt"}}, ".schedule", ("base_batch_size",)),
}


def in_run(wrong: Raw) -> tuple[Raw, str]:
    return plan(runs={"a": wrong}), "plans.p.runs.a"


def in_settings(wrong: Raw) -> tuple[Raw, str]:
    return plan(wrong, runs={"a": {"label": "innocent"}}), "plans.p.settings"


def in_study(wrong: Raw) -> tuple[Raw, str]:
    changes = plan(runs={"a": {"label": "innocent"}})
    del changes["plans"]["p"]["settings"]
    return changes | {"studies": {"cosmo_unet": config.merge({"dataset": "box", **copy.deepcopy(COSMO_RUN)}, wrong)}}, (
        "studies.cosmo_unet"
    )


def in_rung_before(wrong: Raw) -> tuple[Raw, str]:
    # `p` comes first, so it is while resolving its run that the mistake in `q` is met.
    rungs = {"first": wrong, "second": {"label": "innocent"}}
    ladder = plan(kind="ladder", runs=rungs)["plans"]["p"]
    first = {"study": "cosmo_unet", "from": "q.second", "runs": {"a": {}}}
    return {"plans": {"p": first, "q": ladder}}, "plans.q.runs.first"


@pytest.mark.parametrize("place", [in_run, in_settings, in_study, in_rung_before])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_once_where_it_was_written(mistake: str, place: Any) -> None:
    wrong, below, words = MISTAKES[mistake]
    changes, path = place(copy.deepcopy(wrong))
    one(message(**changes), path + below, *words)


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"tragets": ["sound"]}, "unknown key 'tragets' (did you mean 'targets'?); valid keys", ()),
        ({"targets": ["sond"]}, "targets", ("did you mean 'sound'?",)),
        ({"studies": {"cosmo": {}}}, "studies", ("did you mean 'cosmo_unet'?",)),
        ({"datasets": {"box": {"downsampel": 2}}}, "datasets.box", ("did you mean 'downsample'?",)),
        ({"datasets": {"box": {"source": {"gird": 2}}}}, "datasets.box.source", ("did you mean 'grid'?",)),
        ({"datasets": {"box": {"source": {"kind": "simulatd"}}}}, "datasets.box.source", ("'simulated'",)),
        ({"datasets": {"box": {"downsample": 3}}}, "datasets.box", ("3", "source.grid 32")),
        ({"datasets": {"box": None}}, "datasets.box", ("got None", "keys and values")),
        ({"datasets": {"era5_published": {"downsample": 2}}}, "datasets.era5_published", ("used as they are",)),
        ({"datasets": {"cosmo_published": {"downsample": 2}}}, "datasets.cosmo_published", ("used as they are",)),
        ({"plans": {"sound": {"runz": {}}}}, "plans.sound", ("did you mean 'runs'?",)),
        ({"plans": {"sound": {"study": "cosmo_unt"}}}, "plans.sound.study", ("did you mean 'cosmo_unet'?",)),
        ({"plans": {"sound": {"kind": "lader"}}}, "plans.sound.kind", ("did you mean 'ladder'?",)),
        ({"plans": {"sound": {"measure": ["trian"]}}}, "plans.sound.measure.0", ("did you mean 'train'?",)),
        ({"plans": {"sound": {"only": {"trian": []}}}}, "plans.sound.only.trian", ("did you mean 'train'?",)),
        ({"plans": {"sound": {"only": {"profile": ["first"]}}}}, "plans.sound", ("add profile to measure",)),
        ({"plans": {"sound": {"only": {"train": ["frist"]}}}}, "plans.sound", ("did you mean 'first'?",)),
        ({"plans": {"sound": {"from": "sond.first"}}}, "plans.sound.from", ("did you mean 'sound'?",)),
        ({"plans": {"sound": {"from": "weather.vit"}}}, "plans.sound.from", ("era5_vit", "cosmo_unet")),
        ({"plans": {"sound": {"runs": {"a": {"use": "sound.frist"}}}}}, "plans.sound.runs.a.use", ("'first'",)),
        ({"plans": {"sound": {"runs": {"a": {"use": "sound.first", "seed": 1}}}}}, "plans.sound.runs.a", ("alone",)),
        ({"plans": {"sound": {"runs": {"a": {"study": "era5_vit"}}}}}, "plans.sound.runs.a.study", ("one study",)),
        ({"plans": {"sound": {"runs": {"a": [1]}}}}, "plans.sound.runs.a", ("got [1]",)),
        ({"plans": {"sound": {"runs": {"a b": {}}}}}, "plans.sound.runs.a b", ("expected to match",)),
        ({"plans": ["sound"]}, "plans", ("expected names",)),
        ({"results": "out/{run}"}, "results", ("expected to match",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_outside_of_runs(changes: Raw, path: str, words: tuple[str, ...]) -> None:
    one(message(**changes), path, *words)


def test_parts_of_another_study() -> None:
    one(message(**plan(runs={"a": {"model": {"kind": "vit"}}})), "plans.p.runs.a.model.kind", "'vit'", "unet3d")
    one(message(**plan({"model": {"kind": "unet3d"}}, study="era5_vit")), "plans.p.settings.model.kind", "vit")
    wrong = {"samples": {"kind": "pairs"}}
    one(message(**plan(wrong)), "plans.p.settings.samples.kind", "'pairs'", "crops")


def test_a_patch_that_does_not_divide_the_fields() -> None:
    changes = plan({"model": {"patch": [4, 5]}}, study="era5_vit")
    one(message(**changes), "plans.p.settings.model.patch", "4 x 5", "16 x 32")
    one(message(**plan({"model": {"heads": 3}}, study="era5_vit")), "plans.p.settings.model", "embed_dim 16", "heads 3")
    one(
        message(**plan({"model": {"patch": [4]}}, study="era5_vit")),
        "plans.p.settings.model.patch",
        "got [4]",
        "value 2 is missing",
    )


def test_two_mistakes_are_two_lines() -> None:
    lines = message(**plan({"optimizer": {"lrr": 1}, "precision": "bf61"})).split("\n")
    assert len(lines) == 2
    for line, path in zip(sorted(lines), ("optimizer", "precision"), strict=True):
        one(line, f"plans.p.settings.{path}")


def test_what_a_later_rung_makes_wrong_is_reported_where_it_stands() -> None:
    """The crop of rung `a` fits; rung `b` changes to a smaller box, in which it does not."""
    small = {**COSMO, "source": {**COSMO["source"], "grid": 16}}
    rungs = {"a": {"samples": {"crop": 32}}, "b": {"dataset": "small"}}
    text = message(**plan(kind="ladder", runs=rungs), datasets={"small": small})
    one(text, "plans.p.runs.a.samples.crop", "32", "small", "16")


@pytest.mark.parametrize(
    ("plans", "chain"),
    [
        ({"p": {"runs": {"a": {"use": "q.a"}}}, "q": {"runs": {"a": {"use": "p.a"}}}}, "p.a -> q.a -> p.a"),
        ({"p": {"from": "q.a", "runs": {"a": {}}}, "q": {"from": "p.a", "runs": {"a": {}}}}, "p.a -> q.a -> p.a"),
        ({"p": {"from": "p.a", "runs": {"a": {}}}}, "p.a -> p.a"),
        ({"p": {"from": "q.a", "runs": {"a": {}}}, "q": {"runs": {"a": {"use": "p.a"}}}}, "p.a -> q.a -> p.a"),
    ],
)
def test_circles_are_shown(plans: Raw, chain: str) -> None:
    one(message(plans={name: {"study": "cosmo_unet", **plan} for name, plan in plans.items()}), "plans", chain)


def test_files_with_mistakes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text, expected in (
        ("a: [1", "not valid YAML"),
        ("- 1\n", "expected keys and values, got list"),
        ("", "got None"),
    ):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        with pytest.raises(UserError, match=expected) as caught:
            config.load_files(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"absent\.yaml: no such file"):
        config.load_files(tmp_path / "absent.yaml")
    assert stage("configure", "--settings", "{", "--out", tmp_path / "out.yaml") == cli.USER_ERROR
    assert capfd.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out.yaml").exists()


# ---- values ------------------------------------------------------------------------------------------


def test_numbers_as_yaml_and_the_command_line_give_them(tmp_path: Path) -> None:
    """YAML reads 5E-4 as a string, and in a mapping behind --config everything is one."""
    file = tmp_path / "mine.yaml"
    file.write_text("plans: {sound: {settings: {optimizer: {lr: 5E-4, eps: 1e-3}}}}")
    written = yaml.safe_load(file.read_text())["plans"]["sound"]["settings"]["optimizer"]
    assert written == {"lr": "5E-4", "eps": "1e-3"}
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(SOUND))
    run = config.load_files(base, file).plans["sound"]["first"].run
    assert (run.optimizer.lr, run.optimizer.eps) == (5e-4, 1e-3)

    strings = {
        "seed": "7",
        "model": {"widths": ["4", "8"]},
        "optimizer": {"lr": "5E-4", "betas": ["0.9", "0.95"], "fused": "true"},
        "training": {"epochs": "null", "steps": "12"},
    }
    run = load(plans={"sound": {"settings": strings}}).plans["sound"]["first"].run
    assert (run.seed, run.model.widths, run.optimizer.betas) == (7, [4, 8], (0.9, 0.95))  # type: ignore[union-attr]
    assert (run.optimizer.lr, run.optimizer.fused) == (5e-4, True)
    assert (run.training.epochs, run.training.steps) == (None, 12)
    for patch, expected in (("4", 4), (["4", "8"], (4, 8))):
        run = load(plans={"weather": {"settings": {"model": {"patch": patch}}}}).plans["weather"]["vit"].run
        assert run.model.patch == expected  # type: ignore[union-attr]
    dataset = load(datasets={"box": {"downsample": "2", "source": {"box_mpc_h": "5E+1"}}}).workflow.datasets["box"]
    assert dataset.downsample == 2
    assert dataset.source.box_mpc_h == 50.0  # type: ignore[union-attr]


# ---- layers ------------------------------------------------------------------------------------------


def test_later_layers_win_and_the_rest_stays() -> None:
    """Shipped, then the study's, the plan's, the run's: each of four keys is last set in another layer."""
    shipped = config.study_files()["cosmo_unet"].settings
    found = load(
        studies={"cosmo_unet": {"optimizer": {"lr": 1.0, "eps": 1.0, "weight_decay": 1.0}}},
        **plan({"optimizer": {"lr": 0.1, "eps": 2.0}}, runs={"a": {"optimizer": {"lr": 3.0}}, "b": {}}),
    ).plans["p"]
    optimizer = found["a"].run.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay) == (3.0, 2.0, 1.0)
    assert found["b"].run.optimizer.lr == 0.1
    assert found["a"].run.loss.kind == shipped["loss"]["kind"]
    assert found["a"].run.model.init_std == shipped["model"]["init_std"]  # type: ignore[union-attr]


def test_a_ladder_keeps_what_earlier_rungs_changed_and_a_set_does_not() -> None:
    runs = {
        "base": {"label": "the base"},
        "workers": {"loader": {"workers": 2}},
        "fast": {"optimizer": {"fused": True}, "label": "the fast"},
        "last": {"loader": {"prefetch": 4}},
    }
    rungs = {name: resolved.run for name, resolved in load(**plan(kind="ladder", runs=runs)).plans["p"].items()}
    assert [run.loader.workers for run in rungs.values()] == [0, 2, 2, 2]
    assert [run.optimizer.fused for run in rungs.values()] == [False, False, True, True]
    assert [run.loader.prefetch for run in rungs.values()] == [2, 2, 2, 4]
    assert [run.label for run in rungs.values()] == ["the base", None, "the fast", None]
    alone = {name: resolved.run for name, resolved in load(**plan(kind="set", runs=runs)).plans["p"].items()}
    assert [run.loader.workers for run in alone.values()] == [0, 2, 0, 0]


def test_a_rung_that_the_machine_cannot_do_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not written: what it changes is not kept by those after it, and it is said what is missing."""
    runs: Raw = {
        "a": {},
        "compiled": {"compile": {"mode": "default"}, "batch_size": 2, "needs": ["compiler"]},
        "b": {"seed": 5},
    }
    for here in (True, False):
        monkeypatch.setitem(machine.NEEDS, "compiler", ("a C++ compiler", lambda here=here: here))
        found = load(**plan(kind="ladder", runs=runs))
        assert list(found.plans["p"]) == (["a", "compiled", "b"] if here else ["a", "b"])
        assert found.left_out["p"] == ({} if here else {"compiled": "a C++ compiler"})
        last = found.plans["p"]["b"].run
        assert (last.seed, last.compile.mode, last.batch_size) == ((5, "default", 2) if here else (5, "none", 4))
    one(
        message(**plan(runs={"c": {"needs": ["compiler"]}}), targets=["p"]), "targets", "no run for this machine", "C++"
    )
    other = {"study": "cosmo_unet", "runs": {"d": {"use": "p.compiled"}, "e": {"use": "p.a"}}}
    both = {"plans": {**plan(kind="ladder", runs=runs)["plans"], "q": other}}
    assert load(**both).left_out["q"] == {"d": "a C++ compiler"}
    wrong = {**runs, "compiled": {**runs["compiled"], "precison": "bf16"}}
    one(message(**plan(kind="ladder", runs=wrong)), "plans.p.runs.compiled", "did you mean 'precision'")
    for wrong in (["compilre"], "compiler", 3):
        one(message(**plan(runs={"c": {"needs": wrong}})), "plans.p.runs.c.needs", "compiler, dali, bf16", str(wrong))


def test_use_names_a_run_that_another_plan_has() -> None:
    plans = plan(runs={"mine": {"use": "sound.second"}, "own": {}})["plans"]
    plans["q"] = {"study": "cosmo_unet", "runs": {"through": {"use": "p.mine"}}}
    found = load(plans=plans).plans
    for resolved in (found["p"]["mine"], found["q"]["through"]):
        assert (resolved.plan, resolved.name) == ("sound", "second")
        assert resolved.run == found["sound"]["second"].run
    assert (found["p"]["own"].plan, found["p"]["own"].name) == ("p", "own")


def test_a_stage_may_be_for_some_runs_only() -> None:
    changes = plan(runs={"a": {}, "b": {}}, measure=["throughput", "profile"], only={"profile": ["b"]})
    found = load(**changes).workflow.plans["p"]
    assert {run: found.stages(run) for run in found.runs} == {"a": ["throughput"], "b": ["throughput", "profile"]}


def test_from_starts_where_a_run_ended_without_its_label() -> None:
    ladder = {"a": {"seed": 5, "label": "rung a"}, "b": {"loader": {"workers": 2}, "label": "rung b"}}
    plans = plan(kind="ladder", runs=ladder)["plans"]
    plans["q"] = {"study": "cosmo_unet", "from": "p.b", "settings": {"batch_size": 8}, "runs": {"x": {}}}
    plans["r"] = {"study": "cosmo_unet", "from": "q.x", "kind": "ladder", "runs": {"y": {"seed": 6}, "z": {}}}
    found = load(plans=plans).plans
    x, z = found["q"]["x"].run, found["r"]["z"].run
    assert (x.seed, x.loader.workers, x.batch_size, x.label) == (5, 2, 8, None)
    assert (z.seed, z.loader.workers, z.batch_size, z.label) == (6, 2, 8, None)


def test_a_later_layer_changes_between_epochs_and_steps() -> None:
    runs = {"a": {"training": {"steps": 9}}, "b": {"training": {"epochs": 3}}, "c": {}}
    found = [resolved.run.training for resolved in load(**plan(kind="ladder", runs=runs)).plans["p"].values()]
    assert [(training.epochs, training.steps) for training in found] == [(None, 9), (3, None), (3, None)]
    # Only the two settings exclude each other: a run may be called like one of them.
    merged = config.merge({"epochs": {"seed": 1}, "steps": {"seed": 2}}, {"steps": {"seed": 3}})
    assert merged == {"epochs": {"seed": 1}, "steps": {"seed": 3}}


def test_another_kind_replaces_a_section_but_not_a_plan() -> None:
    found = load(
        datasets={"box": {"source": {"kind": "prepared", "train": ["a.h5"], "valid": ["b.h5"]}}},
        plans={"sound": {"kind": "ladder"}},
    )
    assert found.workflow.datasets["box"].source.model_dump(exclude_defaults=True) == {
        "kind": "prepared",
        "train": ["a.h5"],
        "valid": ["b.h5"],
    }
    assert found.workflow.plans["sound"].kind == "ladder"
    assert list(found.plans["sound"]) == ["first", "second"]
    back = load(plans={"cosmo_published": {"kind": "ladder", "title": "all in a row"}})
    assert back.plans["cosmo_published"]["bs64_opt"].run.training.epochs == 4  # from `short`, now a rung before


def test_shipped_plans_and_datasets_change_by_name() -> None:
    found = load(
        datasets={"cosmo_published": {"memory_mb": 99}},
        plans={"cosmo_published": {"settings": {"seed": 3}, "runs": {"base": {"batch_size": 16}, "more": {}}}},
    )
    assert found.workflow.datasets["cosmo_published"].memory_mb == 99
    runs = found.plans["cosmo_published"]
    assert (runs["base"].run.batch_size, runs["bs256_opt"].run.batch_size, runs["more"].run.batch_size) == (16, 256, 64)
    assert {resolved.run.seed for resolved in runs.values()} == {3}
    assert load().plans["cosmo_published"]["base"].run.seed == 0  # what is shipped is not changed for good


# ---- what the stages see -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "run"), [("sound", "second"), ("weather", "vit")])
def test_a_resolved_run_reaches_its_stages_slice_by_slice(name: str, run: str, tmp_path: Path) -> None:
    resolved = load().plans[name][run].run
    file = tmp_path / "config.yaml"
    assert stage("configure", "--settings", resolved.model_dump_json(), "--out", file) == 0
    assert run_class(resolved.study).model_validate(yaml.safe_load(file.read_text())) == resolved
    for name_, row in STAGES.items():
        if row.scope == "run":
            seen = load_run(file, name_)
            assert json.loads(seen.model_dump_json()) == resolved.slice(name_)
            assert set(vars(seen)) == {*RunCore.model_fields, *row.settings} == set(resolved.slice(name_))


def test_a_key_that_no_run_has_is_refused_by_every_stage(tmp_path: Path) -> None:
    settings = {**json.loads(load().plans["sound"]["first"].run.model_dump_json()), "optimzer": {}}
    for name in RUN_STAGES:
        with pytest.raises(UserError, match=r"unknown key 'optimzer' \(did you mean 'optimizer'\?\)"):
            load_run(json.dumps(settings), name)


def test_a_stage_does_not_see_what_it_has_no_use_for() -> None:
    def slices(settings: Raw) -> list[Raw]:
        run = load(**plan(settings)).plans["p"]["a"].run
        return [run.slice("train"), run.slice("throughput")]

    before = slices({})
    for settings, changed in (
        ({"throughput": {"trials": 9}}, [False, True]),
        ({"training": {"keep_checkpoints": 9}}, [True, False]),
        ({"schedule": {"warmup_steps": 9}}, [True, False]),
        ({"optimizer": {"lr": 9.0}}, [True, True]),
        ({"label": "nine"}, [False, False]),
    ):
        assert [a != b for a, b in zip(before, slices(settings), strict=True)] == changed, settings


def test_a_dataset_reaches_its_stages(tmp_path: Path) -> None:
    for name, dataset in load().workflow.datasets.items():
        file = tmp_path / f"{name}.yaml"
        assert stage("configure", "--settings", dataset.model_dump_json(), "--out", file) == 0
        assert load_dataset(file) == load_dataset(dataset.model_dump_json()) == dataset
    with pytest.raises(UserError, match="--config: not valid JSON"):
        load_dataset("{'kind'")
    with pytest.raises(UserError, match=r"^--config: unknown key 'knid' \(did you mean 'kind'\?\)"):
        load_dataset(json.dumps({**COSMO, "knid": 1}))


# ---- JSON schema -------------------------------------------------------------------------------------


def complaints(raw: Any) -> list[list[Any]]:
    """Return the paths that the JSON schema complains about."""
    plain = json.loads(json.dumps(raw, default=str))  # dates, as an editor's YAML has them
    return [list(error.absolute_path) for error in jsonschema.Draft202012Validator(config.schema()).iter_errors(plain)]


def test_the_schema_accepts_what_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema.Draft202012Validator.check_schema(config.schema())
    assert complaints(yaml.safe_load((ROOT / "config.yaml").read_text())) == []
    assert complaints(SOUND) == []
    for study in config.study_files().values():
        shipped = {key: getattr(study, key) for key in ("datasets", "plans")}
        assert complaints({"targets": list(study.plans), **shipped}) == []
    changed = {
        "targets": ["sound", "cosmo_published"],
        "datasets": {"cosmo_published": {"memory_mb": 99, "source": {"train": ["a.h5"]}}},
        "studies": {"cosmo_unet": {"optimizer": {"lr": 1e-3}}},
        "plans": {
            "cosmo_published": {"settings": {"seed": 3}},
            "other": {"study": "cosmo_unet", "settings": None, "runs": {"a": {}}},
            "mine": {"study": "cosmo_unet", "from": "sound.first", "runs": {"a": {"use": "sound.second"}, "b": None}},
        },
    }
    assert complaints(changed) == []
    config.load(config.merge(copy.deepcopy(SOUND), changed))
    assert stage("schema") == 0
    assert json.loads(capsys.readouterr().out) == config.schema()


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tragets": []}, []),
        ({"plans": {"sound": {"runs": {"first": {"batchsize": 2}}}}}, ["plans", "sound", "runs", "first"]),
        ({"plans": {"sound": {"runs": {"first": {"optimizer": {"lrr": 2}}}}}}, ["plans", "sound", "runs", "first"]),
        ({"plans": {"sound": {"settings": {"model": {"width": [2]}}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"settings": {"precision": "bf61"}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"settings": {"optimizer": {"lr": -1}}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"settings": {"use": "sound.first"}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"runs": {"first": {"study": "cosmo_unet"}}}}}, ["plans", "sound", "runs", "first"]),
        ({"plans": {"sound": {"measure": ["trian"]}}}, ["plans", "sound", "measure", 0]),
        ({"plans": {"sound": {"runs": {"a b": {}}}}}, ["plans", "sound", "runs"]),
        ({"studies": {"cosmo_unet": {"batchsize": 2}}}, ["studies", "cosmo_unet"]),
        ({"datasets": {"box": {"downsampel": 2}}}, ["datasets", "box"]),
        ({"datasets": {"box": {"source": {"gird": 2}}}}, ["datasets", "box"]),
    ],
)
def test_the_schema_rejects_what_is_not(changes: Raw, path: list[Any]) -> None:
    found = complaints(config.merge(copy.deepcopy(SOUND), changes))
    assert found and all(complaint[: len(path)] == path for complaint in found)
    message(**changes)  # and so does loading it


# ---- published plans ---------------------------------------------------------------------------------

#: batch, epochs, samples an epoch (training, validation), GPUs; learning rate after warm-up, warm-up steps.
COSMO_PUBLISHED = {
    "base": (64, 10, 65536, 8192, 1, 2e-4, 0),
    "short": (64, 4, 4096, 512, 1, 2e-4, 0),
    "short_opt": (64, 4, 4096, 512, 1, 2e-4, 0),
    "bs64_opt": (64, 10, 65536, 8192, 1, 2e-4, 0),
    "bs256_opt": (256, 20, 65536, 8192, 4, 4e-4, 128),
    "bs512_test": (512, 10, 65536, 8192, 8, 2e-4 * 8**0.5, 128),
    "bs512_opt": (512, 40, 65536, 8192, 8, 2e-4 * 8**0.5, 128),
    "bs2048_opt": (2048, 160, 65536, 8192, 32, 2e-4 * 32**0.5, 128),
    "bs8192_opt": (8192, 320, 65536, 8192, 128, 2e-4 * 128**0.5, 128),
}


def test_the_published_unet_plans() -> None:
    runs = {name: resolved.run for name, resolved in load().plans["cosmo_published"].items()}
    assert set(runs) >= set(COSMO_PUBLISHED)
    for name, published in COSMO_PUBLISHED.items():
        run = runs[name]
        assert (
            run.batch_size,
            run.training.epochs,
            run.samples.train,
            run.samples.valid,
            run.geometry.world_size,
            pytest.approx(peak_rate(run.schedule, run.optimizer.lr, run.batch_size)),
            run.schedule.warmup_steps,
        ) == published, name
        assert run.model.model_dump() == {
            "kind": "unet3d",
            "widths": [64, 128, 256, 512, 512, 512],
            "init_std": 0.02,
            "space_to_depth": False,
        }
        assert run.samples.crop == 64  # type: ignore[union-attr]
        assert run.loss.model_dump() == {"kind": "l1", "density_weight": 0.0}
        assert (run.optimizer.kind, run.schedule.kind, run.schedule.end_lr) == ("adam", "cosine", 0.0)
        assert run.training.steps is None
        assert run.geometry.gpus_per_node == min(run.geometry.world_size, 4)  # nodes of four
        assert run.local_batch_size == 64
        optimised = name not in ("base", "short")
        assert (run.loader.workers, run.optimizer.fused) == ((8, True) if optimised else (2, False)), name
        assert run.precision == ("fp16" if optimised else "tf32"), name
    assert runs["base"].throughput.model_dump() == {"warmup": 3, "trials": 3, "batches": 50}
    prepared = load().workflow.datasets[runs["base"].dataset].source.model_dump(exclude_defaults=True)
    assert [Path(path).name for key in ("train", "valid") for path in prepared[key]] == [
        "downsamp_2048crop_train.h5",
        "downsamp_1024crop_valid.h5",
    ]


#: batch, steps, samples an epoch (training, validation; None is all), GPUs, learning rate.
ERA5_PUBLISHED = {
    "base": (16, 30000, None, None, 1, 5e-4),
    "short": (16, 128, 512, 128, 1, 5e-4),
    "opt": (16, 30000, None, None, 1, 5e-4),
    **{
        f"bs{batch}_opt": (batch, 30000, None, None, batch // 16, 5e-4 * (batch / 16) ** 0.5)
        for batch in (16, 32, 64, 128, 256, 512, 1024, 2048)
    },
    "bs64_opt_short": (64, 128, 2048, 128, 4, 1e-3),
    "mp": (64, 30000, None, None, 4, 1e-3),
    "mp_bs16": (16, 30000, None, None, 4, 1e-3),
    "mp_bs32": (32, 30000, None, None, 4, 1e-3),
    "mp_patch4": (4, 30000, None, None, 4, 1e-3),
    "mp_short": (64, 128, 2048, 128, 4, 1e-3),
}


def test_the_published_vit_plans() -> None:
    runs = {name: resolved.run for name, resolved in load().plans["era5_published"].items()}
    assert set(runs) >= set(ERA5_PUBLISHED)
    for name, published in ERA5_PUBLISHED.items():
        run = runs[name]
        assert (
            run.batch_size,
            run.training.steps,
            run.samples.train,
            run.samples.valid,
            run.geometry.world_size,
            pytest.approx(peak_rate(run.schedule, run.optimizer.lr, run.batch_size)),
        ) == published, name
        assert run.model.model_dump() == {
            "kind": "vit",
            "patch": 4 if name == "mp_patch4" else 8,
            "embed_dim": 1024 if name.startswith("mp") else 384,
            "depth": 12,
            "heads": 8,
            "mlp_ratio": 4.0,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "drop_path": 0.0,
            "residual": False,
        }, name
        assert run.loss.kind == "relative_l2"
        assert run.samples.dt == 1  # type: ignore[union-attr]
        assert (run.optimizer.betas, run.optimizer.weight_decay) == ((0.9, 0.95), 0.0)
        assert (run.schedule.kind, run.schedule.warmup_steps, run.schedule.end_lr) == ("cosine", 0, 0.0)
        assert run.training.epochs is None
        if name.startswith("bs"):
            assert run.local_batch_size == 16, name
        assert run.precision == ("tf32" if name in ("base", "short") else "bf16"), name
        assert run.optimizer.fused == (name not in ("base", "short")), name
        assert run.compile.mode == ("none" if name in ("base", "short") else "default"), name
    assert runs["mp_patch4"].local_batch_size == 1
    dataset = load().workflow.datasets[runs["base"].dataset]
    assert dataset.crop == (360, 720)  # type: ignore[union-attr]


def test_wider_heads_are_other_models_of_the_same_size_and_of_no_published_figure() -> None:
    found = load()
    heads = {name: resolved.run.model for name, resolved in found.plans["era5_heads"].items()}
    assert {name: model.embed_dim / model.heads for name, model in heads.items()} == {  # type: ignore[attr-defined]
        "heads8": 48,
        "heads6": 64,
        "heads3": 128,
    }
    assert len({json.dumps(model.model_dump() | {"heads": None}) for model in heads.values()}) == 1
    ladder = {resolved.run.model.heads for resolved in found.plans["era5_ladder"].values()}  # type: ignore[attr-defined]
    assert ladder == {8}
    named = [run for figure in config.study_files()["era5_vit"].published for run in figure.runs]
    assert named and not any(run.startswith("era5_heads") for run in named)


def test_sweeps_of_the_batch_change_nothing_but_the_batch() -> None:
    found = load()
    for study, sizes in (("cosmo", [16, 32, 64, 128, 256]), ("era5", [4, 8, 16, 32])):
        top = found.plans[f"{study}_ladder"]["graphs"].run
        runs = [resolved.run for resolved in found.plans[f"{study}_batch"].values()]
        assert [run.batch_size for run in runs] == sizes
        for run in runs:
            assert run.model_copy(update={"batch_size": top.batch_size, "label": top.label}) == top
        assert found.workflow.plans[f"{study}_batch"].measure == ["throughput"]


def test_every_shipped_plan_resolves_and_its_figures_name_its_runs() -> None:
    found, demo = load(), yaml.safe_load((ROOT / "config.yaml").read_text())
    for study in config.study_files().values():
        for name, plan_ in study.plans.items():
            assert list(found.plans[name]) == list(plan_.get("runs", found.plans[name]))  # a sweep makes its own
        for figure in study.published:
            for name in figure.runs:
                plan_name, _, run = name.partition(".")
                assert run in (study.plans | demo["plans"])[plan_name]["runs"], figure


def test_the_committed_schema_is_the_configurations() -> None:
    path = ROOT / "workflow_scripts/dlscale/config/config.schema.json"
    assert json.loads(path.read_text()) == config.schema(), "run `make schema`"


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "0"}])
def test_threads_wait_as_the_environment_says_or_as_dlscale_does(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str]
) -> None:
    environment = {"OTHER": "1", **own}
    monkeypatch.setattr(machine.os, "environ", environment)
    machine.let_threads_wait()
    assert environment == {"OTHER": "1", **(own or machine.WAITING)}
