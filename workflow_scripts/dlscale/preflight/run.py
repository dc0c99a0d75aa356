"""`dlscale run WORD …`: what a user types becomes a call of Snakemake.

A word is a target, or a setting as `optimizer.lr=1e-3`. Both are checked here, so that a mistake is one message; the
rest is Snakemake's own. dlscale never imports it: it is started.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlscale.config.resolve import Configuration, load_files, merge
from dlscale.config.workflow import Workflow
from dlscale.core.errors import UserError
from dlscale.core.settings import Raw, flat, holds, nested, typed
from dlscale.preflight import dryrun, live, targets
from dlscale.preflight.targets import Target

HELP = """\
usage: dlscale run [WORD ...] [-n] [-p] [--profile NAME] [--configfile FILE ...] [SNAKEMAKE'S OPTIONS ...]

Run plans, or make data or files, with settings that are typed here.

A WORD is
  PLAN, or plan_PLAN     a plan, with a page of its own; without any target: the targets of the configuration
  data_NAME              a dataset, described and drawn
  study_NAME             the target plans of a study
  FILE                   a file in the folder of results
  all, image             the targets; the image of the site
  KEY=VALUE              a setting of the plans that are named, as optimizer.lr=1e-3; or, from its beginning, any key of
                         the configuration, as plans.mine.runs.large.batch_size=64. Values are YAML.

options:
  -n, --dry-run          what would run, why, and what it costs; 1 if something would keep it from starting
  -p, --printshellcmds   print the commands of jobs; in a dry run also what is asked of Slurm
  --profile NAME         the site: profiles/NAME, or its path
  --configfile FILE ...  YAML files, over config.yaml

From the first other option on, all words are Snakemake's (`snakemake --help`): dlscale run PLAN --cores 4
"""

#: A setting: a dotted key, and its value. A file of that name has a slash before it.
SETTING = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
#: Ends of files of settings, of which further ones may follow `--configfile`.
SETTINGS_FILE = (".yaml", ".yml", ".json")


@dataclass
class Call:
    """The words of a call, sorted."""

    targets: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  #: KEY=VALUE
    files: list[str] = field(default_factory=list)
    profile: str | None = None
    dry: bool = False
    commands: bool = False  #: Whether the commands of jobs are printed.
    help: bool = False
    rest: list[str] = field(default_factory=list)  #: Snakemake's.


def sort(words: Iterable[str]) -> Call:
    """Sort words: from the first option that is not one of ours on, all are Snakemake's."""
    call, left = Call(), list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            call.help = True
        elif word in ("--dry-run", "--dryrun", "--printshellcmds") or re.fullmatch("-[np]+", word):
            call.dry |= word.startswith("--dry") or (word[1] != "-" and "n" in word)
            call.commands |= word == "--printshellcmds" or (word[1] != "-" and "p" in word)
        elif name in ("--profile", "--configfile"):
            if not equals and not left:
                raise UserError(f"{word}: expected {'a name' if name == '--profile' else 'a file'} after it")
            given = value if equals else left.pop(0)
            if name == "--profile":
                call.profile = given
                continue
            call.files.append(given)
            while left and left[0].endswith(SETTINGS_FILE) and not SETTING.fullmatch(left[0]):
                call.files.append(left.pop(0))
        elif word.startswith("-") and word not in ("--", "--config"):  # these Snakemake alone needs
            call.rest = [word, *left]
            break
        elif not word.startswith("-"):
            (call.settings if SETTING.fullmatch(word) else call.targets).append(word)
    return call


# ---- settings --------------------------------------------------------------------------------------


def is_whole(word: str) -> bool:
    """Whether a setting's key is one of the whole configuration: else it is a run's."""
    return typed(word)[0].partition(".")[0] in Workflow.model_fields


def placed(word: str, plans: Sequence[str]) -> Raw:
    """Return a setting as configuration: where its key says, or of the plans that are named."""
    key, given = typed(word)
    if is_whole(word):
        return nested({key: given})
    if not plans:
        first = key.partition(".")[0]
        if close := difflib.get_close_matches(first, Workflow.model_fields, n=1, cutoff=0.8):
            raise UserError(f"{word}: unknown key '{first}' (did you mean '{close[0]}'?)")
        raise UserError(
            f"{word}: of which plan? Name it, as in dlscale run PLAN {word}; or write the key from its beginning, "
            f"plans.PLAN.settings.{word}"
        )
    return {"plans": {plan: {"settings": nested({key: given})} for plan in plans}}


def loaded(call: Call, layers: Sequence[tuple[str, Raw]]) -> Configuration:
    """Return the configuration with settings over it; a message begins with the setting that is wrong."""
    files = [*(["config.yaml"] if Path("config.yaml").is_file() else []), *call.files]
    over = [layer for _, layer in layers]
    try:
        return load_files(*files, site=call.profile, over=over)
    except UserError as whole:
        load_files(*files, site=call.profile)  # wrong without any
        for count, (word, _) in enumerate(layers, 1):
            try:
                load_files(*files, site=call.profile, over=over[:count])
            except UserError as error:
                raise UserError(f"{word}: {str(error).removeprefix('configuration: ')}") from None
        raise whole


def configured(call: Call) -> tuple[Configuration, list[Target], Raw]:
    """Return the configuration, validated, the targets, and what was typed over the files."""
    configuration = loaded(call, [(word, placed(word, ())) for word in call.settings if is_whole(word)])
    asked = [targets.typed(word, configuration) for word in call.targets]
    plans = list(dict.fromkeys(plan for target in asked for plan in target.plans))
    layers = [(word, placed(word, plans)) for word in call.settings]
    if not all(map(is_whole, call.settings)):
        configuration = loaded(call, layers)
    over: Raw = {}
    for _, layer in layers:
        merge(over, layer)
    return configuration, asked, over


def hidden(call: Call, plans: Iterable[str], configuration: Configuration) -> list[str]:
    """Return a line for each setting of a plan that some of its runs have in their own way: these stay as they are."""
    lines, plans = [], dict.fromkeys(plans)
    for word in [word for word in call.settings if not is_whole(word)]:
        key, given = typed(word)
        leaves = [tuple(leaf.split(".")) for leaf in flat({key: given})]
        for name in plans:
            plan, own, kept = configuration.workflow.plans[name], list[str](), False
            for run, settings in plan.runs.items():
                held = any(holds(part, leaf) for _, part in plan.parts(run) for leaf in leaves)
                kept |= held and plan.kind == "ladder"  # by the rungs after it
                if held or kept or "use" in (settings or {}):
                    own.append(f"{name}.{run}")
            if own:
                lines.append(f"{word}: as before in {', '.join(own)}, which have their own")
    return lines


# ---- the call --------------------------------------------------------------------------------------


def command(call: Call, names: Sequence[str], over: Raw) -> list[str]:
    """Return the words that start Snakemake."""
    words = [sys.executable, "-m", "snakemake", *dryrun.site(call.profile)]
    words += ["--dry-run"] * call.dry + ["--printshellcmds"] * call.commands
    words += ["--config", *(f"{key}={json.dumps(value)}" for key, value in over.items())] if over else []
    words += ["--configfile", *call.files] if call.files else []
    words += call.rest
    return words + ([*([] if "--" in call.rest else ["--"]), *names] if names else [])


def main(words: Sequence[str]) -> int:
    """Check what was typed, and have Snakemake do it: shown as it goes, or what Snakemake says."""
    call = sort(words)
    if call.help:
        print(HELP, end="")
        return 0
    if not Path("Snakefile").is_file() and not {"-s", "--snakefile", "-d", "--directory"} & set(call.rest):
        raise UserError("Snakefile: no such file here; call it in the folder of the repository")
    configuration, asked, over = configured(call)
    for line in hidden(call, (plan for target in asked for plan in target.plans), configuration):
        print(line, file=sys.stderr)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # which stages ignore
        signal.signal(number, signal.SIG_DFL)
    words = command(call, [target.name for target in asked], over)
    if call.dry or call.commands or any(re.fullmatch(f"{dryrun.LOOKING}|{dryrun.LOUD}", word) for word in call.rest):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(words[0], words)  # its status, and the signals that it gets, are its own
    return live.run(words)
