"""Configuration: one message per mistake, with the mistake's key; layers of settings; plans of the tutorials."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.distributed as dist
import yaml

from dlscale import cli
from dlscale.config import resolve as config
from dlscale.config.compute import compute_settings
from dlscale.config.records import Published
from dlscale.config.resolve import Configuration
from dlscale.config.run import RunCore, Throughput, load_run, run_class
from dlscale.core import machine, registry
from dlscale.core.errors import UserError
from dlscale.core.settings import flat, load_yaml, read_yaml, typed, write_yaml
from dlscale.core.stages import RUN_STAGES, STAGES
from dlscale.data.reads import load_dataset
from dlscale.extensions.cosmo_unet.model import UNet3D
from dlscale.extensions.scaffold import new_study
from dlscale.extensions.scaffold.new_study import TEMPLATE
from dlscale.extensions.schema.reference import reference, schema
from dlscale.train.trainer import peak_rate
from tests.conftest import COSMO, COSMO_RUN, ERA5, ERA5_RUN, ROOT, stage

Raw = dict[str, Any]

#: Configuration of two datasets and two plans, without mistakes.
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
    """Return a plan `p` with valid settings; `more` adds or replaces keys of the plan."""
    base = {"dataset": "box", **COSMO_RUN} if study == "cosmo_unet" else {"dataset": "sky", **ERA5_RUN}
    merged = config.merge(copy.deepcopy(base), settings or {})
    return {"plans": {"p": {"study": study, "settings": merged, "runs": {"a": {}}} | more}}


def message(**changes: Any) -> str:
    """Return the error message that the changed configuration causes."""
    with pytest.raises(UserError) as caught:
        load(**changes)
    return str(caught.value)


def one(text: str, path: str, *words: str) -> None:
    """Assert that a message is one line about `path` and contains `words`."""
    assert text.startswith(f"configuration: {path}: "), text
    assert "\n" not in text, text
    for word in words:
        assert word in text, text


# ---- mistakes ----------------------------------------------------------------------------------------


#: By name of the mistake: settings with one mistake, end of the message's key, and words of the message.
MISTAKES = {
    "unknown key": ({"batchsize": 4}, "", ("'batchsize'", "did you mean 'batch_size'?")),
    "key of a section": ({"lr": 1e-3}, "", ("'lr'", "did you mean 'optimizer.lr'?")),
    "key of two sections": ({"workers": 1}, "", ("'workers'", "did you mean 'loader.workers' or 'tune.workers'?")),
    "key of another section": ({"optimizer": {"epochs": 3}}, ".optimizer", ("'epochs'", ".training.epochs'?")),
    "key that belongs further up": ({"training": {"batch_size": 3}}, ".training", ("'batch_size'", ".batch_size'?")),
    "section in itself": ({"model": {"model": {}}}, ".model", ("'model'", ".model'?")),
    "absurd seed": ({"seed": 10**40}, ".seed", ("expected less than or equal to",)),
    "absurd batch": ({"batch_size": 10**30}, ".batch_size", ("less than or equal to 1000000000",)),
    "absurd cluster": ({"geometry": {"nodes": 10**9}}, ".geometry.nodes", ("less than or equal to 1000000",)),
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
    "wrong dataset": ({"dataset": "boxx"}, ".dataset", ("'boxx'", "did you mean 'box'?")),
    "dataset of another kind": ({"dataset": "sky"}, ".dataset", ("era5", "cosmo")),
    "impossible geometry": ({"geometry": {"gpus_per_node": 3}}, "", ("batch_size 4", "gpus_per_node", "3")),
    "crop that levels cannot halve": ({"samples": {"crop": 10}}, "", ("samples.crop 10", "model.widths")),
    "crop larger than the box": ({"samples": {"crop": 64}}, ".samples.crop", ("64", "box", "32")),
    "weights at an address": (
        {"training": {"epochs": 1, "weights": "https://me:s3cret@example.org/model.pt"}},
        ".training",
        ("weights: an address; fetch the file",),
    ),
    "two batch sizes": ({"batch_size": 4, "local_batch_size": 4}, "", ("either batch_size", "local_batch_size")),
    "no local batch": ({"local_batch_size": 0}, "", ("local_batch_size: got 0", "whole number")),
    "epochs and steps": ({"training": {"epochs": 2, "steps": 9}}, ".training", ("either epochs or steps",)),
    "no epochs": ({"training": {"epochs": 0}}, ".training.epochs", ("got 0", "greater than 0")),
    "no steps": ({"training": {"steps": 0}}, ".training.steps", ("got 0", "greater than 0")),
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
    # `p` comes first, so the mistake in `q` is found while the run of `p` is resolved.
    ladder = plan(kind="ladder", runs={"first": wrong, "second": {"label": "innocent"}})["plans"]["p"]
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
        ({"target": ["sound"]}, "unknown key 'target' (did you mean 'targets'?); valid keys", ()),
        ({"targets": ["sond"]}, "targets", ("did you mean 'sound'?",)),
        ({"targets": ["data_box"]}, "targets", ("no plan is called", "to make a dataset: dlscale run data_box")),
        ({"studies": {"cosmo": {}}}, "studies", ("did you mean 'cosmo_unet'?",)),
        ({"datasets": {"box": {"downsampel": 2}}}, "datasets.box", ("did you mean 'downsample'?",)),
        ({"datasets": {"box": {"source": {"gird": 2}}}}, "datasets.box.source", ("did you mean 'grid'?",)),
        ({"datasets": {"box": {"source": {"seed": 2**80}}}}, "datasets.box.source.seed", ("less than or equal to",)),
        ({"datasets": {"box": {"grid": 2}}}, "datasets.box", ("did you mean 'source.grid'?",)),
        ({"datasets": {"box": {"train": 2}}}, "datasets.box", ("did you mean 'source.train'?",)),
        ({"datasets": {"box": {"lr": 2}}}, "datasets.box", ("did you mean 'studies.NAME.optimizer.lr'?",)),
        ({"plans": {"sound": {"lr": 2}}}, "plans.sound", ("did you mean 'settings.optimizer.lr'?",)),
        ({"datasets": {"box": {"source": {"kind": "simulatd"}}}}, "datasets.box.source", ("'simulated'",)),
        ({"datasets": {"box": {"downsample": 3}}}, "datasets.box", ("3", "source.grid 32")),
        ({"datasets": {"box": None}}, "datasets.box", ("got None", "keys and values")),
        (
            {"datasets": {"era5_published": {"downsample": 2}}},
            "datasets.era5_published",
            ("downsample: not supported",),
        ),
        (
            {"datasets": {"cosmo_published": {"downsample": 2}}},
            "datasets.cosmo_published",
            ("downsample: not supported",),
        ),
        ({"plans": {"sound": {"runz": {}}}}, "plans.sound", ("did you mean 'runs'?",)),
        (
            {"plans": {"sound": {"study": "cosmo_unt"}}},
            "plans.sound.study",
            ("did you mean 'cosmo_unet'?", "--configfile"),
        ),
        ({"plans": {"sound": {"kind": "lader"}}}, "plans.sound.kind", ("did you mean 'ladder'?",)),
        ({"plans": {"sound": {"measure": ["trian"]}}}, "plans.sound.measure.0", ("did you mean 'train'?",)),
        (
            {"plans": {"sound": {"settings": {"measure": ["train"]}}}},
            "plans.sound.settings",
            ("unknown key 'measure'",),
        ),
        ({"plans": {"sound": {"settings": {"use": "sound.first"}}}}, "plans.sound.settings", ("unknown key 'use'",)),
        ({"plans": {"sound": {"settings": {"needs": ["bf16"]}}}}, "plans.sound.settings", ("unknown key 'needs'",)),
        ({"plans": {"sound": {"only": {"trian": []}}}}, "plans.sound.only.trian", ("did you mean 'train'?",)),
        ({"plans": {"sound": {"only": {"profile": ["first"]}}}}, "plans.sound", ("add profile to measure",)),
        ({"plans": {"sound": {"only": {"train": ["frist"]}}}}, "plans.sound", ("did you mean 'first'?",)),
        (
            {"plans": {"sound": {"measure": ["train"], "only": {"train": []}}}},
            "plans.sound",
            ("run first has no stage left", "remove"),
        ),
        ({"plans": {"sound": {"from": "sond.first"}}}, "plans.sound.from", ("did you mean 'sound'?",)),
        ({"plans": {"sound": {"from": "weather.vit"}}}, "plans.sound.from", ("era5_vit", "cosmo_unet")),
        ({"plans": {"sound": {"runs": {"a": {"use": "sound.frist"}}}}}, "plans.sound.runs.a.use", ("'first'",)),
        (
            {"plans": {"sound": {"runs": {"a": {"use": "sound.first", "seed": 1}}}}},
            "plans.sound.runs.a",
            ("excludes all other keys",),
        ),
        ({"plans": {"sound": {"runs": {"a": {"study": "era5_vit"}}}}}, "plans.sound.runs.a.study", ("one study",)),
        ({"plans": {"sound": {"runs": {"a": [1]}}}}, "plans.sound.runs.a", ("got [1]",)),
        ({"plans": {"sound": {"runs": {"a b": {}}}}}, "plans.sound.runs.a b", ("expected 1 to 64 letters",)),
        ({"plans": {"a" * 65: {"study": "cosmo_unet", "runs": {"a": {}}}}}, f"plans.{'a' * 65}", ("1 to 64",)),
        ({"plans": ["sound"]}, "plans", ("expected names",)),
        (
            {"plans": {"cosmo_publishd": {"settings": {"seed": 3}}}},
            "plans.cosmo_publishd",
            ("a new plan needs study and runs (did you mean 'cosmo_published'?)",),
        ),
        ({"plans": {"zzz": {"sweep": {"over": {"seed": [1]}}}}}, "plans.zzz", ("a new plan needs study",)),
        ({"plans": {"sond": {"runs": {"first": {"seed": 1}}}}}, "plans.sond", ("(did you mean 'sound'?)",)),
        (
            {"datasets": {"bx": {"source": {"seed": 3}}}},
            "datasets.bx",
            ("a new dataset needs kind (did you mean 'box'?)",),
        ),
        ({"results": "out/{run}"}, "results", ("expected to match",)),
        ({"results": "-n"}, "results", ("expected to match",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_outside_of_runs(changes: Raw, path: str, words: tuple[str, ...]) -> None:
    one(message(**changes), path, *words)


TWO, FSDP = {"gpus_per_node": 2}, {"kind": "fsdp"}

#: Settings that runs with a divided model or sharded weights refuse, by name: (study, settings, words of the message).
UNSHARED: dict[str, tuple[str, Raw, str]] = {
    "heads": ("era5_vit", {"geometry": {"gpus_per_node": 3, "tp": 3}}, "heads"),
    "devices": ("era5_vit", {"geometry": {"gpus_per_node": 3, "tp": 2}}, "tp"),
    "convolutions": (
        "cosmo_unet",
        {"geometry": {**TWO, "cp": 2}},
        "geometry.cp: the model of study cosmo_unet does not support this key",
    ),
    "one process": ("era5_vit", {"geometry": {**TWO, "tp": 2}, "parallel": {"kind": "dp"}}, "use ddp or fsdp"),
    "statistics": (
        "era5_vit",
        {"geometry": {**TWO, "tp": 2}, "parallel": {"sync_batchnorm": True}},
        "cannot be combined",
    ),
    "groups": ("era5_vit", {"geometry": TWO, "parallel": {**FSDP, "shard": 3}}, "shard 3: expected a divisor of 2"),
    "masters": ("era5_vit", {"geometry": TWO, "parallel": FSDP, "precision": "bf16_master"}, "float32 weights itself"),
    "graphs": (
        "era5_vit",
        {"geometry": TWO, "parallel": FSDP, "cuda_graph": True},
        "cuda_graph and parallel.kind fsdp",
    ),
    "drop-out in graphs": (
        "era5_vit",
        {"geometry": {**TWO, "tp": 2}, "cuda_graph": True, "model": {"dropout": 0.1}},
        "cuda_graph and geometry.tp",
    ),
    "drop-out in the compiler's graphs": (
        "era5_vit",
        {"geometry": {**TWO, "cp": 2}, "compile": {"mode": "reduce-overhead"}, "model": {"dropout": 0.1}},
        "compile.mode reduce-overhead and geometry.tp",
    ),
    "one device": (
        "era5_vit",
        {"parallel": {**FSDP, "param_dtype": "bf16"}},
        "if no two devices have the same weights",
    ),
    "one of each part": (
        "era5_vit",
        {"geometry": {**TWO, "tp": 2}, "parallel": {**FSDP, "reduce_dtype": "bf16"}},
        "if no two devices have the same weights",
    ),
    "offloaded by one": ("era5_vit", {"parallel": {**FSDP, "cpu_offload": True}}, "cpu_offload: with a single device"),
    "offloaded sums": (
        "era5_vit",
        {"geometry": {**TWO, "tp": 2}, "parallel": {**FSDP, "cpu_offload": True}},
        "geometry.tp",
    ),
    "offloaded scale": (
        "era5_vit",
        {"geometry": TWO, "parallel": {**FSDP, "cpu_offload": True}, "precision": "fp16"},
        "bf16",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("study", "settings", "words"), UNSHARED.values(), ids=list(UNSHARED))
def test_impossible_settings_of_model_parallel_runs_are_refused(study: str, settings: Raw, words: str) -> None:
    said = message(**plan(settings, study=study))
    assert words in said and "\n" not in said, said


def test_two_mistakes_are_two_lines() -> None:
    lines = message(**plan({"optimizer": {"lrr": 1}, "precision": "bf61"})).split("\n")
    assert len(lines) == 2
    for line, path in zip(sorted(lines), ("optimizer", "precision"), strict=True):
        one(line, f"plans.p.settings.{path}")


def test_a_long_message_keeps_its_begin_and_end() -> None:
    said = message(datasets={f"d{number}": {"kind": "x" * 300} for number in range(8)})
    assert len(said) <= 1000 and said.startswith("configuration: datasets.d0: kind: no such kind 'xxx")
    assert said.endswith("mnist, starter") and " … " in said


def test_an_error_of_a_later_rung_is_reported_at_the_rung_that_set_the_key() -> None:
    """A crop that fits the box of rung `a`, but not the smaller box of rung `b`, is reported at rung `a`."""
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


def _nested(begin: str, end: str) -> str:
    """Return a short YAML text with eight mappings; each mapping contains the previous mapping nine times."""
    lines = (f"z{i}: &a{i + 1} {{{begin.format(i)}{end}}}" for i in range(8))
    return "\n".join(["targets: [a]", "z: &a0 {x: 1}", *lines])


ALIASES = _nested(", ".join(f"k{j}: *a{{0}}" for j in range(9)), "")
MERGED = _nested("<<: [" + ", ".join(9 * ["*a{0}"]), "]")


def test_files_with_mistakes_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text, expected in (
        ("a: [1", "not valid YAML"),
        ("a: " + 5000 * "1", "not valid YAML"),
        ("# a list\n- 1\n", "expected keys and values, got list"),
        ("", "got None"),
        ("a: 1\nb: 2\na: 3\n", "line 3: not valid YAML: the key 'a' is already in line 1"),
        ("a: {b: 1, b: 2}\n", "line 1: not valid YAML: the key 'b' is already in line 1"),
        ("a: 1\nb: &b\n  c: [*b]\n", "line 2: not valid YAML: found unconstructable recursive node"),
        ("a:\n\tb: 1\n", "line 2: not valid YAML: found character"),
        ("a: " + 3000 * "[", "not valid YAML"),
        *(("a: " + 100_000 * each, "more than 10,000 levels") for each in ("[", "{a: ", "[{a: ")),
        *((100_000 * each, "more than 10,000 levels") for each in ("- ", "? ")),  # libyaml would overflow the stack
        ('a: "\\ud800"\n', "line 1: not valid YAML: found invalid Unicode character"),
        ('a: [1, "b\\0"]\n', "line 1: not valid YAML: a NUL character; remove it"),
        ('a: 1\n"b\\0": 1\n', "line 2: not valid YAML: a NUL character; remove it"),
        ("a: !!python/name:os.system\n", "line 1: not valid YAML: the tag !!python/name:os.system is not"),
        (ALIASES, r"not valid YAML: .*aliases .*2\.1e\+08 values; expected at most 100,000"),
        (MERGED, "not valid YAML: .*aliases .* values; expected at most 100,000"),
    ):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        with pytest.raises(UserError, match=expected) as caught:
            config.load_files(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    for encoded in (b"# two lines\ntitle: caf\xe9\n", "targets: [a]\n".encode("utf-16")):
        file.write_bytes(encoded)
        with pytest.raises(UserError, match=r"mine\.yaml, line [12]: not in UTF-8"):
            config.load_files(file)
    file.write_bytes(b"\xef\xbb\xbftargets: [a]\n")
    assert read_yaml(file) == {"targets": ["a"]}, "a byte order mark must be accepted"
    with pytest.raises(UserError, match=r"absent\.yaml: no such file"):
        config.load_files(tmp_path / "absent.yaml")
    merged = tmp_path / "merged.yaml"  # no mistake: a key may overwrite a merged value
    merged.write_text("a: {b: &b {<<: &c {d: 1}, d: 2}}\ne: {<<: *b, d: 3}\nf: [*c, *c]\n")
    assert read_yaml(merged) == {"a": {"b": {"d": 2}}, "e": {"d": 3}, "f": [{"d": 1}, {"d": 1}]}
    assert stage("configure", "--settings", "{", "--out", tmp_path / "out.yaml") == cli.USER_ERROR
    assert capfd.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out.yaml").exists()


# ---- values ------------------------------------------------------------------------------------------


def test_plain_values_are_as_written(tmp_path: Path) -> None:
    """YAML 1.1 would read 12:00:00 as 43200, 010 as 8, `no` as false, and 2020-01-01 as a date."""
    strings = "12:00:00 12:30 1:2 010 -012 0o17 0x1F 0b11 1_000 1e3 1.2.3 2020-01-01 no No off on yes Y y = .inf .nan"
    numbers = {"0": 0, "-3": -3, "+4": 4, ".5": 0.5, "5.": 5.0, "1.5e-3": 0.0015, "-1.0E+3": -1000.0}
    others = {"true": True, "FALSE": False, "null": None, "~": None, "": None, '"7"': "7"}
    for text, expected in [*((word, word) for word in strings.split()), *numbers.items(), *others.items()]:
        read = load_yaml(f"a: [1, {{b: {text}}}]", "here")["a"][1]["b"]
        assert (read, type(read)) == (expected, type(expected)), text
    assert load_yaml("{1: a, 010: b, no: c, true: d, 1.0: e, ~: f}", "here") == {
        "1": "a", "010": "b", "no": "c", "true": "d", "1.0": "e", "~": "f",
    }  # fmt: skip
    assert typed("a.b={c: no, d: [010, 1, null]}") == ("a.b", {"c": "no", "d": ["010", "1", "null"]})
    for word, expected in (("a={b: 1, b: 2}", "the key 'b' is already in line 1"), (f"a={ALIASES}", "its aliases")):
        with pytest.raises(UserError, match=expected):
            typed(word)
    values = [*strings.split(), *numbers.values(), None, True, 1e-20, 1e20, "10", "null"]
    write_yaml(tmp_path / "written.yaml", {"values": values, "no": {"010": "yes"}})
    assert read_yaml(tmp_path / "written.yaml") == {"values": values, "no": {"010": "yes"}}


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        *(("!!int 010", "!!int"), ('!!int "0x10"', "!!int"), ("!!float 1", "!!float"), ("!!bool yes", "!!bool")),
        *(("!!timestamp 2020-01-01", "!!timestamp"), ("!!set {x, y}", "!!set"), ("!!omap [x: 1]", "!!omap")),
        *(("!!binary aGk=", "!!binary"), ("[{b: !mine 1}]", "!mine"), ("{!!int 010: 1}", "!!int")),
    ],
)
def test_a_tag_changes_no_value(value: str, tag: str) -> None:
    with pytest.raises(UserError, match=rf"here, line 2: .*the tag {tag} is not supported"):
        load_yaml(f"x: 1\na: {value}", "here")
    with pytest.raises(UserError, match=f"the tag {tag} is not supported"):
        typed(f"a={value}")
    assert load_yaml("[!!str 010, !!int 10, !!seq [1], !!map {b: ''}]", "here") == ["010", 10, [1], {"b": ""}]


def test_a_plain_value_is_read_by_the_type_of_the_key(tmp_path: Path) -> None:
    """Plain values are read by their key's type in the user's file and in site.yaml."""
    base, file = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text(yaml.safe_dump(SOUND))

    def read(settings: str) -> Any:
        file.write_text(f"plans: {{sound: {{title: no, settings: {settings}}}}}")
        found = config.load_files(base, file)
        assert found.workflow.plans["sound"].title == "no"
        return found.plans["sound"]["first"].run

    run = read("{training: {epochs: 010}, seed: 1_000, optimizer: {fused: off, lr: 1e-3}}")
    assert (run.training.epochs, run.seed, run.optimizer.fused, run.optimizer.lr) == (10, 1000, False, 0.001)
    for settings, expected in (
        ("{training: {epochs: 12:30}}", "training.epochs: got '12:30'; expected a valid integer"),
        ("{seed: 0x1F}", "seed: got '0x1F'; expected a valid integer"),
        ("{seed: 0o17}", "seed: got '0o17'; expected a valid integer"),
        ("{training: {epochs: yes}}", "training.epochs: got 'yes'; expected a valid integer"),
    ):
        with pytest.raises(UserError) as caught:
            read(settings)
        assert expected in str(caught.value)
    site = tmp_path / "site.yaml"
    times = "{cpu_nodes: {cpus: 1}, gpu_nodes: {cpus: 1, gpus: 1}, minutes: {program: 12:00:00}}"
    site.write_text(f"scheduler: {times}\n")
    with pytest.raises(UserError, match=r"minutes\.program: got '12:00:00'; expected a valid integer"):
        config.site_settings(site)
    file.write_text("plans: {sound: {title: 3.10}}\n")
    with pytest.raises(UserError, match=r"title: got 3\.1; expected text"):
        config.load_files(base, file)
    file.write_text("budget: {gpu_hours: 12:30}\n")
    with pytest.raises(UserError, match="gpu_hours: got '12:30'; expected a valid number"):
        config.load_files(base, file)


def test_numbers_as_yaml_and_the_command_line_give_them(tmp_path: Path) -> None:
    """Numbers that arrive as strings are read as numbers.

    YAML reads 5E-4 as a string, and all values of a mapping after --config are strings.
    """
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
    assert (run.optimizer.lr, run.optimizer.fused, run.training.epochs, run.training.steps) == (5e-4, True, None, 12)
    for patch, expected in (("4", 4), (["4", "8"], (4, 8))):
        run = load(plans={"weather": {"settings": {"model": {"patch": patch}}}}).plans["weather"]["vit"].run
        assert run.model.patch == expected  # type: ignore[union-attr]
    dataset = load(datasets={"box": {"downsample": "2", "source": {"box_mpc_h": "5E+1"}}}).workflow.datasets["box"]
    assert (dataset.downsample, dataset.source.box_mpc_h) == (2, 50.0)  # type: ignore[union-attr]


# ---- layers ------------------------------------------------------------------------------------------


def test_later_layers_win_and_the_rest_stays() -> None:
    """Each of four keys is set last in a different layer: shipped, study, plan, run."""
    shipped = config.study_files()["cosmo_unet"].settings
    found = load(
        studies={"cosmo_unet": {"optimizer": {"lr": 1.0, "eps": 1.0, "weight_decay": 1.0}}},
        **plan({"optimizer": {"lr": 0.1, "eps": 2.0}}, runs={"a": {"optimizer": {"lr": 3.0}}, "b": {}}),
    ).plans["p"]
    a, b = (found[name].run for name in "ab")
    assert (a.optimizer.lr, a.optimizer.eps, a.optimizer.weight_decay, b.optimizer.lr) == (3.0, 2.0, 1.0, 0.1)
    assert (a.loss.kind, a.model.init_std) == (shipped["loss"]["kind"], shipped["model"]["init_std"])  # type: ignore[union-attr]


def test_only_ladders_keep_changes_of_earlier_rungs() -> None:
    runs = {
        "base": {"label": "the base"},
        "workers": {"loader": {"workers": 2}},
        "fast": {"optimizer": {"fused": True}, "label": "the fast"},
        "last": {"loader": {"prefetch": 4}},
    }
    rungs = {name: resolved.run for name, resolved in load(**plan(kind="ladder", runs=runs)).plans["p"].items()}
    assert [(run.loader.workers, run.optimizer.fused, run.loader.prefetch, run.label) for run in rungs.values()] == [
        (0, False, 2, "the base"),
        (2, False, 2, None),
        (2, True, 2, "the fast"),
        (2, True, 4, None),
    ]
    alone = {name: resolved.run for name, resolved in load(**plan(kind="set", runs=runs)).plans["p"].items()}
    assert [run.loader.workers for run in alone.values()] == [0, 2, 0, 0]


def test_a_run_on_more_gpus_than_this_machine_has_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two exceptions: a machine without a GPU, and a site with a scheduler.

    Without a GPU, the processes use the machine's cores. A scheduler may have nodes with enough GPUs.
    """
    two: Raw = {"geometry": {"gpus_per_node": 2}}
    runs: Raw = {"one": {}, "two": {**two, "seed": 5}, "again": {"precision": "bf16"}}
    cluster: Raw = {"site": {"scheduler": {"cpu_nodes": {"cpus": 32}, "gpu_nodes": {"cpus": 64, "gpus": 4}}}}
    for seen, site, lacks in (
        ("0", {}, "2 GPUs (it has 1)"),
        ("0,1", {}, None),
        ("", {}, None),
        ("-1", {}, None),
        ("0", cluster, None),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        found = load(**plan(kind="ladder", runs=runs), **site)
        assert found.skipped_runs["p"] == ({"two": lacks} if lacks else {})
        last = found.plans["p"]["again"].run
        assert (last.geometry.gpus_per_node, last.seed) == ((1, 0) if lacks else (2, 5))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    typed: Raw = {"one": {}, "two": {"geometry": {"gpus_per_node": "2"}}}  # strings, as `--config` passes them
    assert load(**plan(runs=typed)).skipped_runs["p"] == {"two": "2 GPUs (it has 1)"}
    scaling: Raw = {"devices": [1, 2], "batch_sizes": [4]}
    weak = load(plans={"w": {"study": "cosmo_unet", "kind": "weak_scaling", "scaling": scaling}})
    assert list(weak.plans["w"]) == ["b4_ddp_1"] and list(weak.skipped_runs["w"]) == ["b4_ddp_2", "b4_no_sync_2"]
    one(
        message(**plan(runs={"c": two}), targets=["p"]),
        "targets",
        "no run that this machine supports",
        "2 GPUs (it has 1)",
    )


def test_a_rung_that_the_machine_cannot_do_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later rungs do not inherit the changes of the rung that is left out. The missing requirement is reported."""
    runs: Raw = {
        "a": {},
        "compiled": {"compile": {"mode": "default"}, "batch_size": 2, "needs": ["compiler"]},
        "b": {"seed": 5},
    }
    for here in (True, False):
        monkeypatch.setitem(machine.NEEDS, "compiler", ("a C++ compiler", lambda here=here: here))
        found = load(**plan(kind="ladder", runs=runs))
        assert list(found.plans["p"]) == (["a", "compiled", "b"] if here else ["a", "b"])
        assert found.skipped_runs["p"] == ({} if here else {"compiled": "a C++ compiler"})
        last = found.plans["p"]["b"].run
        assert (last.seed, last.compile.mode, last.batch_size) == ((5, "default", 2) if here else (5, "none", 4))
    one(
        message(**plan(runs={"c": {"needs": ["compiler"]}}), targets=["p"]),
        "targets",
        "no run that this machine supports",
        "C++",
    )
    other = {"study": "cosmo_unet", "runs": {"d": {"use": "p.compiled"}, "e": {"use": "p.a"}}}
    both = {**plan(kind="ladder", runs=runs)["plans"], "q": other}
    assert load(plans=both).skipped_runs["q"] == {"d": "a C++ compiler"}
    wrong = {**runs, "compiled": {**runs["compiled"], "precison": "bf16"}}
    one(message(**plan(kind="ladder", runs=wrong)), "plans.p.runs.compiled", "did you mean 'precision'")
    for wrong in (["compilre"], "compiler", 3):
        one(message(**plan(runs={"c": {"needs": wrong}})), "plans.p.runs.c.needs", "compiler, dali, bf16", str(wrong))


def test_a_sites_requirements_count_where_runs_do_not_use_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`provides` decides for containers and other nodes; without containers, torchao must be installed here."""
    find = importlib.util.find_spec
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cluster: Raw = {"scheduler": {"cpu_nodes": {"cpus": 32}, "gpu_nodes": {"cpus": 64, "gpus": 4}}}
    eight, docker = {"provides": ["fp8"]}, {"engine": "docker", "image": "some:image"}
    for site, torchao, capability, runs in (
        ({}, True, (9, 0), True),
        ({}, True, (8, 0), False),
        ({}, False, (9, 0), False),
        (eight, True, None, False),
        ({"provides": []}, True, (9, 0), True),
        (cluster | eight, True, None, True),
        (cluster | eight, False, (9, 0), False),
        (cluster | {"provides": ["bf16"]}, True, (9, 0), False),
        (docker | eight, False, None, True),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, t=torchao: find(name) if name != "torchao" else t)
        monkeypatch.setattr(machine, "nvml", lambda ask, c=capability: c)
        found = load(site={"engine": "none"} | site, **plan(runs={"a": {}, "b": {"needs": ["fp8"]}}))
        assert ("b" in found.plans["p"]) == runs, (site, torchao, capability)


def test_use_names_a_run_that_another_plan_has() -> None:
    plans = plan(runs={"mine": {"use": "sound.second"}, "own": {}})["plans"]
    plans["q"] = {"study": "cosmo_unet", "runs": {"through": {"use": "p.mine"}}}
    plans["sound"] = {"runs": {"second": {"label": "its own"}}}
    configuration = load(plans=plans)
    labels = {
        ("sound", "second"): "its own",
        ("p", "own"): "own",
        ("p", "mine"): "mine (= sound.second)",
        ("q", "through"): "through (= sound.second)",
    }
    assert {names: configuration.label(*names) for names in labels} == labels
    found = configuration.plans
    for resolved in (found["p"]["mine"], found["q"]["through"]):
        assert (resolved.plan, resolved.name, resolved.run) == ("sound", "second", found["sound"]["second"].run)
    assert (found["p"]["own"].plan, found["p"]["own"].name) == ("p", "own")


def test_a_later_layer_changes_between_epochs_and_steps() -> None:
    runs = {"a": {"training": {"steps": 9}}, "b": {"training": {"epochs": 3}}, "c": {}}
    found = [resolved.run.training for resolved in load(**plan(kind="ladder", runs=runs)).plans["p"].values()]
    assert [(training.epochs, training.steps) for training in found] == [(None, 9), (3, None), (3, None)]
    # Only the settings `epochs` and `steps` exclude each other. Runs may have these names.
    merged = config.merge(
        {"epochs": {"seed": 1}, "steps": {"seed": 2}, "parallel": {"bucket_mb": 9}},
        {"steps": {"seed": 3}, "parallel": {"kind": "ddp"}},  # `ddp` is the default kind
    )
    assert merged == {"epochs": {"seed": 1}, "steps": {"seed": 3}, "parallel": {"bucket_mb": 9, "kind": "ddp"}}


def test_a_local_batch_size_sets_the_global_batch_size() -> None:
    """The batch size that is set last counts, local or global, in any layer.

    Stages only see the global batch size.
    """
    devices = {"geometry": {"nodes": 2, "gpus_per_node": 4}}
    runs: Raw = {
        "default": {},
        "local": {"local_batch_size": 3},
        "devices": devices,
        "global": {"batch_size": 16},
        "again": {"local_batch_size": "5"},
    }
    rungs = {name: one.run for name, one in load(**plan(kind="ladder", runs=runs)).plans["p"].items()}
    assert [run.batch_size for run in rungs.values()] == [4, 3, 24, 16, 40]
    assert [run.local_batch_size for run in rungs.values()] == [4, 3, 3, 2, 5]
    set_ = load(**plan({"local_batch_size": 6}, runs={"a": {}, "b": {"batch_size": 7}, "c": devices})).plans["p"]
    assert [one.run.batch_size for one in set_.values()] == [6, 7, 48]
    none = load(**plan({"local_batch_size": 6}, runs={"a": {"batch_size": 7, "local_batch_size": None}})).plans["p"]
    assert none["a"].run.batch_size == 7
    own = {key: value for key, value in COSMO_RUN.items() if key != "batch_size"}
    study = {"cosmo_unet": {"dataset": "box", **own, "local_batch_size": 9}}
    by_study = load(studies=study, plans={"p": {"study": "cosmo_unet", "runs": {"a": devices}}})
    assert by_study.plans["p"]["a"].run.batch_size == 72
    for run in (rungs["again"], by_study.plans["p"]["a"].run):
        for name in RUN_STAGES:
            assert "local_batch_size" not in run.slice(name)
            assert run.slice(name)["batch_size"] == run.batch_size
    settings = {**json.loads(rungs["global"].model_dump_json()), **devices, "local_batch_size": 2}
    settings.pop("batch_size")
    for name in RUN_STAGES:
        assert load_run(json.dumps(settings), name).batch_size == 16
    jsonschema.validate({"plans": plan(runs={"a": {"local_batch_size": 3}})["plans"]}, schema())


def test_shipped_plans_and_datasets_change_by_name() -> None:
    found = load(
        datasets={"cosmo_published": {"source": {"test": ["a.h5"]}}},
        plans={"cosmo_published": {"settings": {"seed": 3}, "runs": {"base": {"batch_size": 16}, "more": {}}}},
    )
    assert found.workflow.datasets["cosmo_published"].source.test == ["a.h5"]
    runs = found.plans["cosmo_published"]
    assert (runs["base"].run.batch_size, runs["bs256_opt"].run.batch_size, runs["more"].run.batch_size) == (16, 256, 64)
    assert {resolved.run.seed for resolved in runs.values()} == {3}
    assert load().plans["cosmo_published"]["base"].run.seed == 0  # the changes must not persist in shipped plans


# ---- settings that the stages get --------------------------------------------------------------------


@pytest.mark.parametrize(("name", "run"), [("sound", "second"), ("weather", "vit")])
def test_each_stage_gets_a_slice_of_the_resolved_run(name: str, run: str, tmp_path: Path) -> None:
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


def test_stages_read_the_settings_of_a_dataset(tmp_path: Path) -> None:
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
    """Return the path of each error that the JSON schema reports."""
    plain = json.loads(json.dumps(raw, default=str))  # an editor's YAML parser returns dates
    return [list(error.absolute_path) for error in jsonschema.Draft202012Validator(schema()).iter_errors(plain)]


@pytest.mark.slow
def test_the_schema_accepts_valid_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert complaints(yaml.safe_load((ROOT / "config.yaml").read_text())) == []
    assert complaints(SOUND) == []
    for study in config.study_files().values():
        shipped = {key: getattr(study, key) for key in ("datasets", "plans")}
        assert not study.plans or complaints({"targets": list(study.plans), **shipped}) == []
    changed = {
        "targets": ["sound", "cosmo_published"],
        "datasets": {"cosmo_published": {"source": {"train": ["a.h5"]}}},
        "studies": {"cosmo_unet": {"optimizer": {"lr": 1e-3}}},
        "plans": {
            "cosmo_published": {"settings": {"seed": 3}},
            "starter_weak": {"kind": "strong_scaling"},  # a plan that a study's `scaling` makes can also change
            "other": {"study": "cosmo_unet", "settings": None, "runs": {"a": {}}},
            "mine": {"study": "cosmo_unet", "from": "sound.first", "runs": {"a": {"use": "sound.second"}, "b": None}},
        },
    }
    assert complaints(changed) == []
    config.load(config.merge(copy.deepcopy(SOUND), changed))
    assert stage("schema") == 0
    assert json.loads(capsys.readouterr().out) == schema()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"tragets": []}, []),
        ({"plans": {"sound": {"runs": {"first": {"batchsize": 2}}}}}, ["plans", "sound", "runs", "first"]),
        ({"plans": {"sound": {"runs": {"first": {"optimizer": {"lrr": 2}}}}}}, ["plans", "sound", "runs", "first"]),
        ({"plans": {"sound": {"settings": {"model": {"width": [2]}}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"settings": {"precision": "bf61"}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"settings": {"optimizer": {"lr": -1}}}}}, ["plans", "sound", "settings"]),
        ({"plans": {"sound": {"runs": {"first": {"study": "cosmo_unet"}}}}}, ["plans", "sound", "runs", "first"]),
        ({"plans": {"sound": {"measure": ["trian"]}}}, ["plans", "sound", "measure", 0]),
        ({"plans": {"sound": {"runs": {"a b": {}}}}}, ["plans", "sound", "runs"]),
        ({"studies": {"cosmo_unet": {"batchsize": 2}}}, ["studies", "cosmo_unet"]),
        ({"datasets": {"box": {"downsampel": 2}}}, ["datasets", "box"]),
        ({"datasets": {"box": {"source": {"gird": 2}}}}, ["datasets", "box"]),
    ],
)
def test_the_schema_rejects_invalid_configurations(changes: Raw, path: list[Any]) -> None:
    found = complaints(config.merge(copy.deepcopy(SOUND), changes))
    assert found and all(complaint[: len(path)] == path for complaint in found)
    message(**changes)  # loading also fails


# ---- published plans ---------------------------------------------------------------------------------

#: Runs of the SC22 tutorial, by name: batch, epochs, samples per epoch (training, validation), GPUs, learning rate
#: after warm-up, warm-up steps.
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
#: The same values for V100s of 16 GB, with 32 samples per GPU.
SUMMIT_PUBLISHED = {
    "base_sm": (32, 10, 65536, 8192, 1, 2e-4, 0),
    "shorter_sm": (32, 4, 512, 64, 1, 2e-4, 0),
    "short_sm": (32, 4, 4096, 512, 1, 2e-4, 0),
    "short_opt_sm": (32, 4, 4096, 512, 1, 2e-4, 0),
    "bs32_opt_sm": (32, 3, 65536, 8192, 1, 2e-4, 0),
    "bs576_test_sm": (576, 3, 65536, 8192, 18, 2e-4 * 18**0.5, 128),
    "bs576_opt_sm": (576, 12, 65536, 8192, 18, 2e-4 * 18**0.5, 128),
    "bs2304_opt_sm": (2304, 48, 65536, 8192, 72, 2e-4 * 72**0.5, 128),
    "bs9216_opt_sm": (9216, 96, 65536, 8192, 288, 2e-4 * 288**0.5, 128),
}


@pytest.mark.parametrize(
    ("name", "expected", "local"),
    [("cosmo_published", COSMO_PUBLISHED, 64), ("cosmo_published_summit", SUMMIT_PUBLISHED, 32)],
)
def test_the_published_unet_plans(name: str, expected: dict[str, tuple[float, ...]], local: int) -> None:
    runs = {name: resolved.run for name, resolved in load().plans[name].items()}
    assert list(runs) == list(expected)
    for run_name, published in expected.items():
        run = runs[run_name]
        optimised = "opt" in run_name or "test" in run_name
        workers = 2 if not optimised else 8 if run_name == "short_opt" else 2 if local == 64 else 7
        found = run.model_dump(mode="json") | flat(run.model_dump(mode="json"))
        found |= {"gpus": run.geometry.world_size, "local": run.local_batch_size, "compiled": run.compile.mode}
        found |= {"peak": pytest.approx(peak_rate(run.schedule, run.optimizer.lr, run.batch_size))}
        keys = ("batch_size", "training.epochs", "samples.train", "samples.valid", "gpus", "peak")
        wanted = {
            **dict(zip((*keys, "schedule.warmup_steps"), published, strict=True)),
            "model": {
                **{"kind": "unet3d", "widths": [64, 128, 256, 512, 512, 512], "init_std": 0.02},
                "space_to_depth": False,
            },
            **{"loss": {"kind": "l1", "density_weight": 0.0}, "optimizer.kind": "adam", "optimizer.fused": optimised},
            **{"schedule.kind": "cosine", "schedule.end_lr": 0.0, "samples.crop": 64, "training.steps": None},
            **{"local": local, "loader.kind": "dali" if optimised else "torch", "loader.workers": workers},
            "samples.symmetry": "published_dali" if optimised else "published",
            "compiled": "default" if optimised else "none",
            "precision": "fp16" if optimised else "tf32" if local == 64 else "fp32",
        }
        assert {key: found[key] for key in wanted} == wanted, run_name
        assert getattr(run.loader, "reader", "numpy") == "numpy"
        assert run.geometry.gpus_per_node <= 4  # the shipped site has four GPUs per node; Summit had six
    assert next(iter(runs.values())).throughput == Throughput(warmup=3, trials=3, batches=50)


RATES = {16: 5e-4, 32: 7.07e-4, 64: 1e-3, 128: 1.41e-3, 256: 2e-3, 512: 2.83e-3, 1024: 4e-3, 2048: 5.66e-3}
SHORT, N1024, N2048 = (512, 128), (1024, 1024), (2048, 2048)
#: Runs of the SC23 and SC24 tutorials, by name: batch, steps, samples per epoch (training and validation, None: all),
#: GPUs, learning rate, precision, whether compiled.
ERA5_PUBLISHED = {
    "base": (16, 30000, None, 1, 5e-4, "tf32", False),
    "short": (16, 128, SHORT, 1, 5e-4, "tf32", False),
    "short_opt": (16, 128, SHORT, 1, 5e-4, "fp16", True),
    "short_opt_bf16": (16, 128, SHORT, 1, 5e-4, "bf16", True),
    "opt": (16, 30000, None, 1, 5e-4, "fp16", True),
    "opt_bf16": (16, 30000, None, 1, 5e-4, "bf16", True),
    **{f"bs{batch}_opt": (batch, 30000, None, batch // 16, rate, "fp16", True) for batch, rate in RATES.items()},
    "mp": (64, 30000, None, 4, 1e-3, "fp16", True),
    "mp_bf16": (64, 30000, None, 4, 1e-3, "bf16", True),
    "mp_bs16": (16, 30000, None, 4, 5e-4, "fp16", True),
    "mp_bs32": (32, 30000, None, 4, 7.07e-4, "fp16", True),
    "mp_patch4": (4, 30000, None, 4, 1e-3, "fp16", True),
}
#: Runs of the SC25 tutorial, which drops bf16 and changes or adds runs.
ERA5_SC25 = {
    **{name: row for name, row in ERA5_PUBLISHED.items() if "bf16" not in name},
    **{name: (*ERA5_PUBLISHED[name][:-1], False) for name in ("mp", "mp_bs16", "mp_bs32", "mp_patch4")},
    "bs32_opt_short": (32, 128, N1024, 2, 7.07e-4, "fp16", True),
    "bs64_opt_short": (64, 128, N2048, 4, 1e-3, "fp16", True),
    "mp_short": (64, 128, N2048, 4, 1e-3, "fp16", False),
    "mp_bs32_short": (32, 128, N1024, 4, 7.07e-4, "fp16", False),
}


@pytest.mark.parametrize(
    ("plan_name", "expected"), [("era5_published", ERA5_PUBLISHED), ("era5_published_sc25", ERA5_SC25)]
)
def test_the_published_vit_plans(plan_name: str, expected: dict[str, tuple[Any, ...]]) -> None:
    runs = {name: resolved.run for name, resolved in load().plans[plan_name].items()}
    assert set(runs) == set(expected)
    for name, (batch, steps, samples, gpus, rate, precision, compiled) in expected.items():
        run = runs[name]
        optimised = precision != "tf32"
        found = run.model_dump(mode="json") | flat(run.model_dump(mode="json"))
        wanted = {
            **{"batch_size": batch, "training.steps": steps, "training.epochs": None, "precision": precision},
            **{"optimizer.lr": rate, "schedule.scaling": "none"},  # the rate is given literally, without a scaling rule
            "samples": {
                **{"kind": "pairs", "dt": 1, "train": samples and samples[0], "valid": samples and samples[1]},
                **{"subset": "first" if samples else "spread", "history": [], "clock": []},
            },
            **{"loader.kind": "dali" if optimised else "torch", "loader.workers": 8 if optimised else 0},
            "optimizer.fused": optimised,
            "model": {
                **{"kind": "vit", "patch": 4 if name == "mp_patch4" else 8, "depth": 12, "heads": 8, "dropout": 0.0},
                **{"embed_dim": 1024 if name.startswith("mp") else 384, "residual": False, "static": []},
            },
            **{"loss.kind": "relative_l2", "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.0},
            **{"schedule.kind": "cosine", "schedule.warmup_steps": 0, "schedule.end_lr": 0.0},
        }
        assert {key: found[key] for key in wanted} == wanted, name
        assert (run.geometry.world_size, run.compile.mode != "none") == (gpus, compiled), name
        if name.startswith("bs"):
            assert run.local_batch_size == 16, name
    assert runs["mp_patch4"].local_batch_size == 1
    assert load().workflow.datasets[runs["base"].dataset].crop == (360, 720)  # type: ignore[union-attr]


#: Rungs of each tutorial's ladder, in the tutorial's order: (name, changed settings).
STEPS: dict[str, list[tuple[str, Raw]]] = {
    "cosmo_published_ladder": [
        ("baseline", {}),
        ("workers4", {"loader": {"workers": 4}}),
        ("workers8", {"loader": {"workers": 8}}),
        ("workers16", {"loader": {"workers": 16}}),
        (
            "dali",
            {"loader": {"kind": "dali", "reader": "numpy", "workers": 8}, "samples": {"symmetry": "published_dali"}},
        ),
        ("tf32_off", {"precision": "fp32"}),
        ("fp16", {"precision": "fp16"}),
        ("fused", {"optimizer": {"fused": True}}),
        ("compile", {"compile": {"mode": "default"}}),
        ("graphs", {"cuda_graph": True}),
    ],
    "era5_published_ladder": [
        ("baseline", {}),
        ("workers4", {"loader": {"workers": 4}}),
        ("workers8", {"loader": {"workers": 8}}),
        ("workers16", {"loader": {"workers": 16}}),
        ("dali", {"loader": {"kind": "dali", "workers": 8}}),
        ("tf32_off", {"precision": "fp32"}),
        ("fp16", {"precision": "fp16"}),
        ("bf16", {"precision": "bf16"}),
        ("fused", {"optimizer": {"fused": True}}),
        ("compile", {"compile": {"mode": "default"}}),
        ("graphs", {"cuda_graph": True}),
    ],
}


@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_each_published_rung_changes_one_setting(name: str, steps: list[tuple[str, Raw]]) -> None:
    """Each rung adds one documented change to the previous rungs, even if the rung comes from another plan."""
    found = config.load(
        {"targets": [name], "site": {"engine": "docker", "image": "some:image", "provides": ["dali"]}}
    ).plans
    first = found[name.removesuffix("_ladder")]["short"].run
    assert [(rung, found[name][rung].run.study) for rung in found[name]] == [(rung, first.study) for rung, _ in steps]
    taken: Raw = {}
    trained = {*RunCore.model_fields, "training"}
    for rung, step in steps:
        run = found[name][rung].run
        expected = run_class(run.study).model_validate(
            config.merge(first.model_dump(mode="json"), copy.deepcopy(config.merge(taken, step)))
        )
        assert run.model_dump(include=trained) == expected.model_dump(include=trained), rung
        assert peak_rate(run.schedule, run.optimizer.lr, run.batch_size) == first.optimizer.lr, rung


@pytest.mark.parametrize(("study", "steps"), [("cosmo", 60), ("era5", 32)])
def test_the_published_profiles_are_of_the_published_rungs(study: str, steps: int) -> None:
    """Profiles cover as many steps as the tutorials' profiles, in the last of four epochs."""
    found = load()
    profiled, ladder = (found.plans[f"{study}_published_{name}"] for name in ("profile", "ladder"))
    skipped = found.skipped_runs[f"{study}_published_profile"]
    assert len({**profiled, **skipped}) == {"cosmo": 5, "era5": 6}[study]
    for name, resolved in profiled.items():
        assert resolved.run.profile.model_dump(include={"tools", "epoch", "steps"}) == {
            **{"tools": ["nsys"], "epoch": 4, "steps": steps}
        }
        both = [compute_settings(each.run.model_dump(mode="json")) for each in (resolved, ladder[name])]
        assert both[0] == both[1], name


def test_profiles_of_several_gpus_are_of_the_short_forms_of_sc25() -> None:
    """The profiled runs differ from `bs64_opt_short` and `mp_short` only in the flags of the tutorial's commands."""
    found = load().plans
    plan, published = found["era5_published_profile_sc25"], found["era5_published_sc25"]
    meshes = {"dp_bs64": (1, 1, 4), "dp_bs64_bcap2": (1, 1, 4), "mp_tp4": (4, 1, 16), "mp_cp4": (1, 4, 16)}
    assert set(plan) == set(meshes)
    own = {"label", "geometry", "parallel", "profile", "throughput"}
    for name, resolved in plan.items():
        run, short = resolved.run, published["mp_short" if name.startswith("mp") else "bs64_opt_short"].run
        assert run.model_dump(exclude=own) == short.model_dump(exclude=own), name
        geometry = run.geometry
        assert (geometry.tp, geometry.cp, geometry.world_size, run.local_batch_size) == (*meshes[name], 16), name
        parallel = run.parallel.model_dump(exclude_unset=True, exclude={"kind"})
        assert parallel == {"bucket_mb": 5 if name == "dp_bs64_bcap2" else 25, "bucket_view": False}, name
        assert run.profile.model_dump(include={"tools", "epoch", "steps"}) == {
            "tools": ["nsys"],
            "epoch": 4,
            "steps": 32,
        }
    assert plan["mp_cp4"].run.geometry.order == "cp-tp-dp"


def test_the_larger_model_is_shared_in_the_published_batches() -> None:
    """Four GPUs share a model and its 16 samples; learning rates equal those of the tutorial's file."""
    runs = {name: each.run for name, each in load().plans["era5_published_mp"].items() if name.startswith("tp4")}
    assert {run.batch_size: run.optimizer.lr for run in runs.values()} == {16: 5e-4, 32: 7.07e-4, 64: 1e-3}
    for run in runs.values():
        assert (run.local_batch_size, run.geometry.tp, run.geometry.gpus_per_node) == (16, 4, 4)


def test_shipped_plans_resolve_and_figures_name_existing_runs() -> None:
    found, demo = load(), yaml.safe_load((ROOT / "config.yaml").read_text())
    made = {name: {**runs, **found.skipped_runs[name]} for name, runs in found.plans.items()}
    for study in config.study_files().values():
        for name, plan_ in study.plans.items():
            named = set(found.plans[name]) | set(found.skipped_runs[name])
            written = set(plan_.get("runs", named))  # a sweep, scaling or convergence block adds its own runs
            assert named == written or (written < named and plan_.keys() & {"scaling", "convergence"})
        for figure in study.published:
            for name in (*figure.runs, *figure.like):
                plan_name, _, run = name.partition(".")
                assert run in (made.get(plan_name) or demo["plans"][plan_name]["runs"]), figure


def test_no_key_of_a_published_figure_is_misspelt() -> None:
    """Records ignore unknown keys, because later versions may add keys. So a misspelt key would be ignored."""
    for name, study in registry.studies().items():
        for figure in yaml.safe_load(study.yaml.read_text()).get("published", []):
            assert set(figure) <= set(Published.model_fields), name


def test_figures_belong_to_the_runs_that_made_them() -> None:
    """Published figures belong to the runs that produced them: on one GPU, on several GPUs, in another plan."""

    def figures(name: str, run: str) -> list[tuple[str, float]]:
        return [
            (figure.source, figure.speed / figure.gpus)
            for figure in config.study_files()[name].published
            if figure.speed and run in figure.runs
        ]

    expected = {
        "short": [("SC23", 9.4), ("SC24", 8.8), ("SC25", 9.2)],
        "base": [],  # a longer training for which no speed is published
        "short_opt_bf16": [("SC23", 42.8), ("SC24", 55.0), ("SC25", 64.0)],
        "mp": [("SC23", 12.0), ("SC24", 93.1 / 4)],
    }
    assert {run: figures("era5_vit", f"era5_published.{run}") for run in expected} == expected
    assert figures("cosmo_unet", "cosmo_published.short") == [("SC22, epoch 4", 85.2), ("SC22, benchy", 83.212)]
    ddp = {
        "gpu4": 1923.9,
        "gpu4_nobroadcast": 2037.1,
        "gpu4_bucket100": 2056.8,
        "gpu8": 3353.3,
        "gpu8_bucket100": 3588.4,
    }
    runs = load().plans["cosmo_published_ddp"]
    assert set(runs) == set(ddp)
    for name, rate in ddp.items():
        run = runs[name].run
        assert figures("cosmo_unet", f"cosmo_published_ddp.{name}") == [("SC22, epoch 3", rate / int(name[3]))]
        assert (run.geometry.world_size, run.local_batch_size) == (int(name[3]), 16), name
        knobs = run.parallel.model_dump(exclude_unset=True, exclude={"kind"})
        assert knobs == ({"broadcast_buffers": False} if "_" in name else {"bucket_view": False}) | (
            {"first_bucket_mb": 1, "bucket_mb": 100} if "bucket" in name else {}
        ), name
    for gpus, rate in ((2, 1582), (4, 3003), (64, 32619)):
        assert ("tutorial, results", rate / gpus) in figures("imagenet_resnet50", f"imagenet_published.gpu{gpus}")


@pytest.mark.parametrize(("name", "calls"), [("gpu4", 8), ("gpu4_bucket100", 5), ("gpu8_bucket100", 5)])
def test_gradients_of_the_published_unet_take_the_published_calls(name: str, calls: int) -> None:
    """PyTorch's assignment of gradients to buckets gives SC22's number of all_reduce calls.

    The last size limit applies to all further buckets.
    """
    run = load().plans["cosmo_published_ddp"][name].run
    with torch.device("meta"):
        gradients = list(UNet3D(4, 5, widths=run.model.widths).parameters())[::-1]
    bucket = run.parallel.bucket_mb or 25
    first = run.parallel.first_bucket_mb or run.parallel.bucket_mb or 1
    limits = [int(size * 2**20) for size in (first, bucket)]
    found, _ = dist._compute_bucket_assignment_by_size(gradients, limits, [False] * len(gradients), [])
    figures = [figure for figure in config.study_files()["cosmo_unet"].published if figure.metric == "collectives"]
    assert len(found) == calls
    assert calls in [figure.value for figure in figures if figure.label == f"buckets of {bucket:.0f} MB"]


@pytest.mark.parametrize(
    ("study", "source", "runs", "sums"),
    [
        ("cosmo_unet", "SC22", 14, {"train_loss": 1.370184, "valid_loss": 1.114133, "validation_time": 222.234}),
        ("era5_vit", "SC23", 12, {"train_loss": 18.227072, "valid_loss": 16.248356, "validation_time": 238.628}),
        ("era5_vit", "SC24", 12, {"train_loss": 18.466262, "valid_loss": 16.474507, "validation_time": 229.236}),
        ("era5_vit", "SC25", 10, {"train_loss": 10.903829, "valid_loss": 9.32538, "validation_time": 215.11}),
    ],
)
def test_each_published_log_has_all_losses(study: str, source: str, runs: int, sums: dict[str, float]) -> None:
    """Each run with a published speed has two losses and the time of a validation (in s, to 1 ms) per epoch.

    Their sums equal the sums of all losses and times in the tutorial.
    """
    published = config.study_files()[study].published

    def name_of(figure: Published) -> str:
        return [*figure.runs, *figure.like][0]

    logs: dict[str, dict[str, list[float]]] = {}
    for figure in published:
        if figure.by_epoch and figure.source == f"{source}, log":
            losses = logs.setdefault(name_of(figure), {})
            assert figure.metric not in losses, figure
            losses[figure.metric] = figure.by_epoch
    timed = [each for each in published if each.speed and each.source.split(",")[0] == source]
    assert {name_of(each) for each in timed if not each.source.endswith("benchy")} == set(logs)
    assert len(logs) == runs
    for name, losses in logs.items():
        assert {len(each) for each in losses.values()} <= {2, 3, 4} and losses.keys() == sums.keys(), name
        assert len({len(each) for each in losses.values()}) == 1, name
    for metric, total in sums.items():
        assert sum(sum(losses[metric]) for losses in logs.values()) == pytest.approx(total, abs=1e-9)


def test_both_job_logs_of_the_guide_have_all_losses() -> None:
    """The losses of each log, summed over its 25 epochs, equal the sums that awk computed from the logs."""
    figures = [each for each in config.study_files()["starter_cnn"].published if each.by_epoch]
    assert {len(each.by_epoch) for each in figures} == {25}
    sums = [(each.metric, sum(each.by_epoch)) for each in figures]
    assert [name for name, _ in sums] == ["train_loss", "valid_loss"] * 2
    assert [total for _, total in sums] == pytest.approx([2.375197, 2.255814, 2.321788, 2.259265], abs=1.25e-5)


def test_a_published_figure_has_devices_and_unit() -> None:
    """`gpus` equals the number of GPUs in a figure's label, because estimates divide the rate by `gpus`.

    A metric of time is called `time` and has the unit s, min or h.
    """
    for study in config.study_files().values():
        for figure in study.published:
            if count := re.match(r"(\d+) GPUs", figure.label):
                assert figure.gpus == int(count[1]), figure
            assert not figure.metric.startswith("time,") and (
                figure.metric != "time" or figure.unit in ("s", "min", "h")
            ), figure


def test_the_published_table_of_imagenet_has_the_batch_sizes_of_the_runs() -> None:
    """The published table has the batch sizes of its runs, and the speeds and times of `plot.py`.

    The tutorial's repository names runs by GPUs and images per GPU.
    """
    table = [each for each in config.study_files()["imagenet_resnet50"].published if "table" in each.series]
    for metric, values in {
        "speed": [2925, 5735, 10768, 20367.57, 37488.15],
        "time": [40908, 21124, 11292, 6027.09, 3378.84],
    }.items():
        own = [each for each in table if (each.metric == "time") == (metric == "time")]
        assert [each.gpus for each in own] == [4, 8, 16, 32, 64]
        assert [each.batch_size for each in own] == [896, 2048, 4096, 8192, 16384]
        assert [each.value if metric == "time" else each.speed for each in own] == values


def test_the_committed_schema_is_the_configurations() -> None:
    path = ROOT / "workflow_scripts/dlscale/config/config.schema.json"
    assert json.loads(path.read_text()) == schema(), "run `make schema`"


@pytest.mark.slow
def test_repeats_train_with_the_next_seeds_and_no_more() -> None:
    """Each run is repeated with the seeds that follow its own seed.

    Rungs of a ladder still build on each other. A run that is reused from another plan is not repeated.
    """
    found = load(
        **plan(
            {"seed": 5},
            kind="ladder",
            repeat=3,
            measure=["train", "throughput"],
            runs={"a": {}, "b": {"precision": "bf16"}, "c": {"seed": 9, "label": "last"}},
        )
    )
    runs = found.plans["p"]
    assert [(name, each.run.seed) for name, each in runs.items()] == [
        *(("a", 5), ("a-seed6", 6), ("a-seed7", 7), ("b", 5), ("b-seed6", 6), ("b-seed7", 7)),
        *(("c", 9), ("c-seed10", 10), ("c-seed11", 11)),
    ]
    assert [runs[name].repeats for name in ("a", "a-seed6", "a-seed7", "b")] == [None, "a", "a", None]
    assert runs["b-seed7"].run.precision == runs["c"].run.precision == "bf16"
    assert (runs["c"].run.label, runs["c-seed10"].run.label) == ("last", "last, seed 10")
    assert found.stages("p", "b") == ["train", "throughput"] and found.stages("p", "b-seed6") == ["train"]
    used = {"plans": {"q": {"study": "cosmo_unet", "repeat": 2, "runs": {"x": {"use": "p.a"}}}}}
    assert list(load(**config.merge(plan(), used)).plans["q"]) == ["x"]


@pytest.mark.parametrize(
    "more, message_",
    [
        ({"repeat": 0}, "plans.p.repeat: got 0; expected greater than or equal to 1"),
        ({"repeat": 2, "measure": ["throughput"]}, "repeat: the plan does not train; add train to measure"),
        ({"repeat": 4, "runs": {"a": {"seed": 2**63 - 3}}}, "the seed is above 9223372036854775807"),
        (
            {"repeat": 2, "runs": {"a": {}, "a-seed1": {}}},
            "repeat: a repetition cannot be called a-seed1",
        ),
        ({"repeat": 2, "runs": {"a" * 60: {}}}, "more than 64 characters"),
        (
            {"repeat": 2, "kind": "convergence", "runs": {}, "convergence": {"batch_sizes": [64]}},
            "repeat: a plan of kind convergence cannot have this key",
        ),
    ],
)
def test_impossible_repeats_are_refused(more: Raw, message_: str) -> None:
    found = message(**plan(**more))
    assert message_ in found and "\n" not in found


def test_every_key_is_described_and_listed_in_the_reference() -> None:
    """Every key has a description, and a row in the reference with its default, if any.

    docs/configuration.md equals the generated reference.
    """
    found = schema()
    models = {"the file": found, **found["$defs"]}
    bare = [f"{name}.{key}" for name, model in models.items() for key, node in model.get("properties", {}).items()
            if key != "kind" and not node.get("description")]  # fmt: skip
    assert not bare, "keys without a description"
    page = reference()
    for name, model in models.items():
        for key in model.get("properties", {}):
            assert f"| `{key}` |" in page, f"{name}.{key}"
    for row in (
        "| `batch_size` | whole number > 0 ≤ 1,000,000,000 | `64` | ",
        '| `kind` | `adam`, `adamw` | `"adam"` |',
    ):
        assert row in page
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) <= {
        heading.lower() for heading in re.findall(r"^### (.*)$", page, re.MULTILINE)
    }
    sections = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert sorted(sections) == sorted(name.removesuffix("Settings") for name in found["$defs"])
    assert page.index("## Keys of a first study") < page.index("## All keys of the file") < page.index("### Plan\n")
    assert (ROOT / "docs/configuration.md").read_text().strip() == page.strip(), (
        "the page is outdated; run `make schema`"
    )


@pytest.mark.parametrize(
    ("layers", "page"),
    [
        ([{}], "index"),
        ([{"targets": ["a", "b"]}], "index"),
        ([{"targets": ["c"]}], "c"),
        ([{"targets": ["b"]}, {"targets": ["a", "c"]}], "a+c"),
        ([{"targets": ["c"], "results": "results"}], "c"),
        ([{"targets": ["c"], "results": "elsewhere"}], "index"),
        ([{"targets": ["c"], "results": "elsewhere"}, {"targets": ["a"]}], "a"),
        ([{"targets": ["c"]}, {"results": "elsewhere"}], "index"),
        ([{"targets": ["index"]}], "index+0-1bc04b52"),
        ([{"targets": ["long" * 10, "name" * 10]}], f"{'long' * 10}+1-39eb2157"),
    ],
)
def test_a_call_for_other_targets_has_a_separate_page(layers: list[dict[str, Any]], page: str) -> None:
    assert config.report_page([{"results": "results", "targets": ["a", "b"]}, *layers]) == f"report/{page}.html"
    assert config.report_page([{"targets": ["c"]}, {}]) == "report/index.html", "without config.yaml"


@pytest.mark.parametrize(
    ("layers", "title"),
    [
        ([], "dlscale demo"),
        ([{"report": {"title": "Mine"}}], "Mine"),
        ([{"targets": ["rates"]}], "Learning rates"),
        ([{"targets": ["rates", "other"]}], "Learning rates, other"),
        ([{"targets": ["rates"], "report": {"title": "Mine"}}], "Mine"),
        ([{"report": {"title": "Mine"}}, {"targets": ["other"]}], "other"),
        ([{"targets": ["demo"]}], "dlscale demo"),  # the same targets
    ],
)
def test_a_title_applies_to_targets_of_the_same_layer(layers: list[dict[str, Any]], title: str) -> None:
    """A title applies to targets that are written in the same layer or in an earlier layer."""
    runs = {"study": "mnist_cnn", "runs": {"a": {}}}
    plans = {"demo": runs, "rates": {**runs, "title": "Learning rates"}, "other": runs}
    every = [{"targets": ["demo"], "report": {"title": "dlscale demo"}, "plans": plans}, *layers]
    found = config.with_title(config.load(functools.reduce(config.merge, every, {})), every)
    assert found.workflow.report.title == title


def test_secrets_are_removed_from_addresses_of_datasets() -> None:
    source = {"kind": "files", "all": {"images": "http://me:pa55@h/i?sig=t0ken", "labels": "http://h/l?id=7"}}
    source["shares"] = {"train": 0.5, "valid": 0.5}
    raw = {"targets": ["mnist_demo"], "datasets": {"mine": {"kind": "mnist", "source": source}}}
    found = config.load(raw)
    whole = found.workflow.datasets["mine"].source.all
    assert (whole.images, whole.labels) == ("http://h/i?sig=***", "http://h/l?id=~7902699b")
    assert found.secrets == {whole.images: source["all"]["images"], whole.labels: source["all"]["labels"]}
    assert "pa55" not in repr(found) and "t0ken" not in repr(found)
    source["all"]["images"] = "http://me:pa/55@h/i"
    with pytest.raises(UserError, match=r"datasets\.mine\.source\.all\.images: malformed address") as caught:
        config.load(raw)
    assert "55" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            plan({"loader": {"workers": 3000}}),
            "loader.workers: got 3000; expected at most 512",
        ),
        (plan({"threads": 10**6}), "threads: got 1000000; expected at most 1,024"),
        (
            plan({"throughput": {"seconds": 1e308}}),
            "seconds: got 1e+308; expected at most 604,800 (one week)",
        ),
        (plan({"optimizer": {"lr": 1e308}}), "lr: got 1e+308; expected at most 1e+30"),
        (plan({"model": {"widths": [4, 1e40]}}), "widths.1: got 1e+40; expected a smaller number"),
        (plan(runs={"a": {"needs": [{"a": 1}]}}), "bf16, fp8, got [{'a': 1}]"),
        (plan({"precision": "y" * 5000}), "precision: got 'yyy"),
        (plan({"precision": ["y"] * 5000}), "precision: got ['y', 'y',"),
        (plan({"y" * 5000: 1}), "unknown key 'yyy"),
        (plan(runs={"a": {"use": "y" * 5000}}), "use: no plan is called 'yyy"),
        ({"targets": []}, "configuration: targets: got []; expected at least 1 value"),
        (
            {"datasets": {"d": {"kind": "cosmo", "source": {"kind": "prepared", "train": ["{x}.h5"], "valid": ["v"]}}}},
            "datasets.d.source: '{x}.h5': braces are wildcards to Snakemake",
        ),
        (
            plan(
                kind="sweep",
                runs={},
                sweep={"method": "random", "trials": 2, "over": {"seed": {"integers": [1, 2**60]}}},
            ),
            "integers.1: got 1152921504606846976; expected less than or equal to 9007199254740992",
        ),
    ],
)
def test_extreme_values_are_reported_with_their_key(changes: Raw, expected: str) -> None:
    text = message(**changes)
    assert expected in text
    assert len(text) < 2000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTPS_PROXY", "http://me:s3cret@proxy:3128"),
        ("HOOK", "https://hooks.example.org/x?token=s3cret"),
        ("WANDB_API_KEY", "s3cret"),
        ("HF_TOKEN", "s3cret"),
    ],
)
def test_a_secret_in_the_environment_of_a_site_is_refused_and_not_shown(name: str, value: str) -> None:
    with pytest.raises(UserError, match=rf"environment\.{name}: .*export it") as refused:
        config.load({"targets": [], "site": {"environment": {name: value, "TOKENIZERS_PARALLELISM": "false"}}})
    assert "s3cret" not in str(refused.value)


def test_secrets_of_a_studys_own_datasets_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets in a study's own YAML file are hidden like secrets in the user's file."""
    monkeypatch.setattr(registry, "_added", {})  # restored later, because other tests expect only shipped studies
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "secretive.py").write_text((TEMPLATE / "waves.py").read_text())
    (tmp_path / "waves_data.py").write_text((TEMPLATE / "waves_data.py").read_text())
    given = read_yaml(TEMPLATE / "waves.yaml")
    arrays = {"input": "https://me:s3cret@h.org/x.npy?sig=s3cret", "target": "https://h.org/y.npy"}
    source = {"kind": "arrays", "all": arrays, "shares": {"train": 0.5, "valid": 0.5}}
    given["datasets"]["fetched"] = {"kind": "starter", "source": source}
    given["plans"] = {}
    (tmp_path / "secretive.yaml").write_text(yaml.safe_dump(given))
    found = config.load({"targets": ["cosmo_published"], "studies": {"secretive": str(tmp_path / "secretive.py")}})
    assert "s3cret" not in repr(found.workflow)
    assert found.secrets == {"https://h.org/x.npy?sig=***": "https://me:s3cret@h.org/x.npy?sig=s3cret"}


def test_an_error_in_an_external_study_is_reported_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_added", {})  # restored later, because other tests expect only shipped studies
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("waves", "waves_data"):
        (tmp_path / f"{name.replace('waves', 'ripples')}.py").write_text(
            (TEMPLATE / f"{name}.py").read_text().replace("waves", "ripples")
        )
    given = yaml.safe_load((TEMPLATE / "waves.yaml").read_text().replace("waves", "ripples"))
    given["settings"]["dataset"] = "cosmo_demo"
    file = tmp_path / "ripples.yaml"
    file.write_text(yaml.safe_dump(given))
    with pytest.raises(UserError) as caught:
        load(studies={"ripples": str(tmp_path / "ripples.py")})
    assert str(caught.value).startswith(f"configuration: {file}: settings.dataset: ")


@pytest.mark.parametrize(("here", "seen"), [(".", "its place/"), ("its place", ""), ("elsewhere", "{tmp}/its place/")])
def test_paths_are_relative_to_the_file_that_contains_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, seen: str
) -> None:
    """Paths are relative to the file that contains them: the user's file or the study's own YAML file.

    This includes paths of studies and paths in datasets. Web addresses are unchanged.
    """
    monkeypatch.setattr(registry, "_added", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    place = tmp_path / "its place"
    new_study.write("ripples", place, images=False)
    given = {name: read_yaml(place / f"ripples{name}.yaml") for name in ("", "_run")}
    for name, folder in {"": "own", "_run": "given"}.items():
        files = {"input": f"{folder}/x.npy", "target": "https://h.org/y.npy"}
        source = {"kind": "arrays", "all": files, "shares": {"train": 0.5, "valid": 0.5}}
        given[name].setdefault("datasets", {})[folder] = {"kind": "starter", "source": source}
        (place / f"ripples{name}.yaml").write_text(yaml.safe_dump(given[name]))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / here)
    found = config.load_files(os.path.relpath(place / "ripples_run.yaml"))
    assert registry.added()["ripples"].file == place / "ripples.py"
    for name in ("own", "given"):
        files = found.workflow.datasets[name].source.all
        assert files.input == seen.format(tmp=tmp_path) + f"{name}/x.npy" and files.target == "https://h.org/y.npy"
    typed = config.load_files(over=[{**given["_run"], "studies": {"ripples": str(place / "ripples.py")}}])
    assert typed.workflow.datasets["given"].source.all.input == "given/x.npy", (
        "paths on the command line must be unchanged"
    )


def test_every_number_has_a_greatest_value_or_costs_nothing() -> None:
    """Every number has an upper bound, unless large values cost no time, memory, processes or files."""
    # `select` is only compared, `betas` are checked to be fractions, and `depth` is an enumeration
    free = {"select", "betas", "depth"}
    open_ended = []

    def walk(node: Any, key: str, holder: str) -> None:
        if isinstance(node, list):
            for each in node:
                walk(each, key, holder)
        elif isinstance(node, dict):
            if node.get("type") in ("integer", "number") and not node.keys() & {"maximum", "exclusiveMaximum", "enum"}:
                open_ended.append(f"{holder}.{key}")
            for name, each in node.get("properties", {}).items():
                walk(each, name, holder)
            for name in ("anyOf", "items", "prefixItems", "additionalProperties", "patternProperties"):
                walk(node.get(name), key, holder)

    models = schema()["$defs"]
    for name, model in models.items():
        walk(model, "", name)
    assert len(models) > 50 and {name for name in open_ended if name.split(".")[1] not in free} == set()


@pytest.mark.parametrize("name", ["cosmo_published_ladder", "era5_published_ladder"])
def test_settings_without_effect_on_any_run_are_refused(name: str) -> None:
    base = name.replace("_ladder", ".short")
    assert message(plans={name: {"settings": {"seed": 5}}}).startswith(
        f"configuration: plans.{name}.settings: no run uses these settings, "
    )
    own = {
        "study": {"c": "cosmo_unet", "e": "era5_vit"}[name[0]],
        "kind": "ladder",
        "from": base,
        "settings": {"seed": 5},
    }
    found = load(plans={"mine": {**own, "runs": {"first": {}, "next": {"loader": {"workers": 4}}}}})
    assert [each.run.seed for each in found.plans["mine"].values()] == [5, 5]


def test_a_plan_is_not_called_as_the_results_of_measure() -> None:
    """A plan must not have the name of `dlscale measure`'s results, because both would use the same folder."""
    plan = {"study": "starter_cnn", "runs": {"a": {}}}
    with pytest.raises(UserError, match=r"plans\.measured: `dlscale measure` uses this name"):
        config.load({"targets": ["measured"], "plans": {"measured": plan}})


BOOLEANS: list[dict[str, Any]] = [{"training": {"epochs": True}}, {"batch_size": True}, {"optimizer": {"lr": False}}]


@pytest.mark.parametrize("changes", BOOLEANS)
def test_a_boolean_is_refused_as_a_number(changes: dict[str, Any]) -> None:
    plan = {"study": "starter_cnn", "settings": changes, "runs": {"a": {}}}
    with pytest.raises(UserError, match=r"expected a number as `(epochs|batch_size|lr)`, not (true|false)"):
        config.load({"targets": ["p"], "plans": {"p": plan}})
