"""The interface for users: configuration keys, commands and options. A reviewer must approve changes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlscale import cli
from dlscale.extensions.schema.reference import schema

#: Sorted list of the complete interface. To change the list on purpose: python -m tests.test_surface
FROZEN = Path(__file__).with_name("surface.txt")


def surface() -> Iterator[str]:
    """Yield each key with its section, and each option with its command."""
    found = schema()
    for section, model in {**found["$defs"], "config.yaml": found}.items():
        yield from (f"key {section}.{key}" for key in model.get("properties", {}))
    (commands,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for name, parser in commands.choices.items():
        words = [word for action in parser._actions for word in action.option_strings or [action.dest]]
        yield from (f"command {name} {word}" for word in words if word not in ("-h", "--help"))


def test_keys_commands_and_options_are_those_that_were_decided_on() -> None:
    assert sorted(surface()) == FROZEN.read_text().splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{} --configfile a.yaml b.yml TARGETS", {"configfile": ["a.yaml", "b.yml"]}),
        ("{} --configfile=a.yaml TARGETS --json", {"configfile": ["a.yaml"], "json": True}),
        ("{} TARGETS --configfile a.yaml --configfile b.yaml", {"configfile": ["a.yaml", "b.yaml"]}),
        ("{} --config seed=2 plans.p.kind=set TARGETS", {"config": ["seed=2", "plans.p.kind=set"]}),
        ("{} --profile slurm TARGETS --config a=1", {"profile": "slurm", "config": ["a=1"]}),
        ("{} --json -- TARGETS", {"json": True}),
    ],
)
def test_options_are_accepted_before_and_after_targets(words: str, expected: dict[str, Any]) -> None:
    commands = {
        **{"status": "plans", "why": "targets", "explain": "runs", "history": "results", "doctor": "plans"},
        **{"cost": "plans", "predict": "runs", "evaluate": "runs"},
    }
    parser = cli.parser()
    for command, dest in commands.items():
        found = vars(parser.parse_args(words.format(command).replace("TARGETS", "p.a q").split()))
        assert {key: found[key] for key in (dest, *expected)} == {dest: ["p.a", "q"], **expected}
    two = vars(parser.parse_args(words.format("compare").replace("TARGETS", "p q").split()))
    assert {key: two[key] for key in ("results", *expected)} == {"results": ["p", "q"], **expected}
    one = vars(parser.parse_args(words.format("crate").replace("TARGETS", "p").split()))
    assert {key: one[key] for key in ("plan", *expected)} == {"plan": "p", **expected}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("why a --json b --profile s c", {"targets": ["a", "b", "c"], "json": True, "profile": "s"}),
        ("compare p --gate q", {"results": ["p", "q"], "gate": True}),
        ("predict --devices 8 16 p.a --tp 2 4 q.b", {"runs": ["p.a", "q.b"], "devices": [8, 16], "tp": [2, 4]}),
        ("import --plans p q ./log --as n --study s", {"events": "./log", "plans": ["p", "q"], "name": "n"}),
        ("measure --batch-size 4 -- a.py --name x -- y", {"command": ["a.py", "--name", "x", "--", "y"], "name": None}),
        ("new-study --images n --at f", {"name": "n", "at": "f", "images": True}),
        ("predict --price -1 p.a", {"runs": ["p.a"], "price": -1.0}),
        ("status", {"plans": []}),
    ],
)
def test_options_take_the_words_that_fit_them(words: str, expected: dict[str, Any]) -> None:
    found = vars(cli.parser().parse_args(words.split()))
    assert {key: found[key] for key in expected} == expected


def test_the_nearest_command_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    for word, near in (("rn", "run"), ("compaer", "compare"), ("new_study", "new-study"), ("statsu", "status")):
        with pytest.raises(SystemExit) as ended:
            cli.main([word, "mnist_demo"])
        assert ended.value.code == 2 and f"'{word}' (did you mean '{near}'?)" in capsys.readouterr().err


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in sorted(surface())))
