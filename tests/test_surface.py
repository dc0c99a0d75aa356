"""The surface that users meet: keys of the configuration, commands, options. A change is a reviewer's decision."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from dlscale import cli
from dlscale.config.reference import schema

#: All of it, a line each, sorted. To change it on purpose: python -m tests.test_surface
FROZEN = Path(__file__).with_name("surface.txt")


def surface() -> Iterator[str]:
    """Yield each key by the section that has it, and each option by its command."""
    found = schema()
    for section, model in {**found["$defs"], "config.yaml": found}.items():
        yield from (f"key {section}.{key}" for key in model.get("properties", {}))
    (commands,) = [action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)]
    for name, parser in commands.choices.items():
        words = [word for action in parser._actions for word in action.option_strings or [action.dest]]
        yield from (f"command {name} {word}" for word in words if word not in ("-h", "--help"))


def test_keys_commands_and_options_are_those_that_were_decided_on() -> None:
    assert sorted(surface()) == FROZEN.read_text().splitlines()


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{line}\n" for line in sorted(surface())))
