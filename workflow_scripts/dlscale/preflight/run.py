"""`dlscale run WORD …`: a call of Snakemake, from words that are checked here: targets, and settings as `seed=2`.

dlscale never imports Snakemake. A command that asks it for a dry run names a file in the environment, into which the
rules write the answer.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dlscale.config.resolve import Configuration, load_files, merge
from dlscale.config.workflow import Workflow
from dlscale.core.errors import UserError, nearest, of_another, unknown
from dlscale.core.files import read_json, write_json
from dlscale.core.machine import given
from dlscale.core.settings import Raw, nested, typed

HELP = """\
usage: dlscale run [WORD ...] [-n] [-p] [--profile NAME] [--configfile FILE ...] [SNAKEMAKE'S OPTIONS ...]

Run plans, or make data or files, with settings from the command line.

A WORD is
  PLAN, or plan_PLAN     a plan, with its own page; without any target: the targets of the configuration
  data_NAME              a dataset, with its description and preview
  study_NAME             the target plans of a study
  FILE                   a file in the folder of results
  all, image             the targets; the image of the site
  KEY=VALUE              a setting of the named plans, as optimizer.lr=1e-3, or any key of the configuration by its
                         whole path, as plans.mine.runs.large.batch_size=64. Values are YAML.

options:
  -n, --dry-run          show what would run, why, and its cost; exit with 1 if it could not start
  -p, --printshellcmds   print the commands of jobs; in a dry run also the requests to Slurm
  --profile NAME         site: profiles/NAME, or its path (also --workflow-profile)
  --configfile FILE ...  YAML files, over config.yaml

The first other option, and all words after it but --configfile and --config, are Snakemake's (`snakemake --help`):
dlscale run PLAN --cores 4
"""

#: A setting: a dotted key, and its value. A file of that name has a slash before it.
SETTING = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
#: Options of ours.
OURS = re.compile(r"-[hnp]+|--|--(help|dry-?run|printshellcmds|(workflow-)?profile(=.*)?)")
#: Snakemake's options that settings follow, or files of them.
SETTINGS = {"--config", "-C", "--configfile", "--configfiles"}
#: Ends of the names of files of settings, of which several may follow `--configfile`.
ENDS = (".yaml", ".yml", ".json")
#: Begins of a target's name, and their kinds in words.
KINDS = {"plan": "plan", "data": "dataset", "study": "study"}
#: Variable with the file to which a dry run writes its answer.
ASKED = "DLSCALE_ASKED"
#: Program that is Snakemake, but for what it says of a mistaken option.
SNAKEMAKE = (
    "from dlscale.core.interrupt import end_at_once; end_at_once('dlscale run'); import argparse; "
    "from dlscale.preflight import run; from snakemake import cli; "
    "argparse.ArgumentParser.error = run.refuse_option; cli.print = run.print_without_profile; cli.main()"
)


# ---- targets ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A target, with the plans and datasets that it names or is a part of."""

    name: str  #: As Snakemake knows it.
    plans: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


def studies(configuration: Configuration) -> dict[str, list[str]]:
    """Return the target plans of each study that has any."""
    found: dict[str, list[str]] = {}
    for plan in configuration.workflow.targets:
        found.setdefault(configuration.workflow.plans[plan].study, []).append(plan)
    return found


def read_target(word: str, configuration: Configuration) -> Target | None:
    """Return the target that a word names: a file of results, or plan_NAME, data_NAME, study_NAME; None if neither.

    An unknown name, also of a run, or a plan without any run for this machine, is a `UserError` with the nearest name.
    """
    results, path = Path(configuration.workflow.results), Path(word)
    if path.is_absolute() and path.is_relative_to(results.resolve()):
        path = results / path.relative_to(results.resolve())
    if path.is_relative_to(results):
        folder, name, *further = [*path.relative_to(results).parts, "", ""]
        if folder in ("plans", "data") and any(further):
            _check(word, folder.removesuffix("s"), name, configuration)
        if folder == "plans" and any(further):
            run, *file = further
            if any(file) and run not in configuration.plans[name]:
                raise UserError(f"{word}: {unknown('run', run, configuration.plans[name])}")
            return Target(str(path), plans=(name,))
        return Target(str(path), datasets=(name,) if folder == "data" and any(further) else ())
    what, _, name = word.partition("_")
    if not (what in KINDS and re.fullmatch(r"[\w-]+", name)):
        return None
    _check(word, what, name, configuration)
    if what == "data":
        return Target(word, datasets=(name,))
    if what == "study":
        return Target(word, plans=tuple(studies(configuration)[name]))
    if not configuration.plans[name]:
        lacking = "; ".join(f"{run}: {what}" for run, what in configuration.left_out[name].items())
        raise UserError(f"{word}: no run of it can be on this machine ({lacking})")
    return Target(word, plans=(name,))


def refuse_late_words(targets: Iterable[str], configuration: Configuration) -> None:
    """Refuse plans and settings among Snakemake's targets: `dlscale run` reads them before Snakemake's options only."""
    for word in targets:
        if (word in configuration.plans or SETTING.fullmatch(word)) and not Path(word).exists():
            example = f"dlscale run {word}" if word in configuration.plans else f"dlscale run PLAN {word}"
            raise UserError(f"{word}: write plans and settings before Snakemake's options: {example} --cores 4")


def typed_target(word: str, configuration: Configuration) -> Target:
    """Return the target that a user's word names: also a plan by its name alone, `all` or `image`."""
    if word in ("all", "image"):
        return Target(word)
    if found := read_target(f"plan_{word}" if word in configuration.plans else word, configuration):
        return found
    plan, _, run = word.partition(".")
    if run in configuration.plans.get(plan, {}):
        raise UserError(f"{word}: a run, which is made with its plan: dlscale run {plan}")
    names = [*configuration.plans, "all", "image", *(f"data_{name}" for name in configuration.workflow.datasets)]
    raise UserError(f"{word}: {unknown('target', word, names)}")


def _check(word: str, what: str, name: str, configuration: Configuration) -> None:
    """Refuse a name that is not known; where it has results, the message says where those are from."""
    workflow = configuration.workflow
    kinds: dict[str, Collection[str]] = {
        "plan": configuration.plans,
        "data": workflow.datasets,
        "study": studies(configuration),
    }
    known = kinds[what]
    if name not in known:
        file = {"plan": f"plans/{name}/plan.yaml", "data": f"data/{name}/manifest.json"}.get(what)
        other = of_another(Path(workflow.results, file)) if file else ""
        raise UserError(f"{word}: {unknown(KINDS[what], name, known)}{other}")


# ---- the words of a call ---------------------------------------------------------------------------


@dataclass
class Typed:
    """What a user typed: the words of a call, sorted."""

    targets: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  #: KEY=VALUE
    files: list[str] = field(default_factory=list)
    profile: str | None = None
    dry: bool = False
    commands: bool = False  #: Whether the commands of jobs are printed.
    help: bool = False
    rest: list[str] = field(default_factory=list)  #: Snakemake's.


def sort(words: Iterable[str]) -> Typed:
    """Sort words: from the first option that is not one of ours on, all but settings are Snakemake's."""
    all_ = [part for word in words for part in (word.split("=", 1) if word.partition("=")[0] in SETTINGS else [word])]
    ours, rest, settings, files = list[str](), list[str](), list[str](), list[str]()
    foreign = follows = False  # whether the word is Snakemake's, or follows an option with settings
    for word in all_:
        is_setting = SETTING.fullmatch(word) is not None
        follows = word in SETTINGS or (follows and (is_setting or word.endswith(ENDS)))
        foreign = foreign or (not follows and word.startswith("-") and not OURS.fullmatch(word))
        if is_setting and (follows or not foreign):
            settings.append(word)
        elif follows:
            files += [word] if word not in SETTINGS else []
        else:
            (rest if foreign else ours).append(word)
    if {"--configfile", "--configfiles"} & set(all_) and not files:
        raise UserError(f"--configfile: expected a file *{', *'.join(ENDS)}")
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-n", "--dry-run", "--dryrun", action="store_true", dest="dry")
    parser.add_argument("-p", "--printshellcmds", action="store_true", dest="commands")
    parser.add_argument("--profile", "--workflow-profile")
    parser.add_argument("words", nargs="*")
    try:  # `--` Snakemake alone needs
        args = parser.parse_intermixed_args([word for word in ours if word != "--"])
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from None
    return Typed(args.words, settings, files, args.profile, args.dry, args.commands, args.help, rest)


def is_whole(word: str) -> bool:
    """Return whether a setting's key is one of the whole configuration, not of a run."""
    return typed(word)[0].partition(".")[0] in Workflow.model_fields


def placed(word: str, plans: Sequence[str]) -> Raw:
    """Return a setting as configuration: where its key says, or of the plans that are named."""
    key, value = typed(word)
    if is_whole(word):
        return nested({key: value})
    if not plans:
        raise UserError(
            f"{word}: of which plan? Name it, as in dlscale run PLAN {word}; or write the key from its beginning, "
            f"plans.PLAN.settings.{word}"
        )
    return {"plans": {plan: {"settings": nested({key: value})} for plan in plans}}


def configured(call: Typed) -> tuple[Configuration, list[Target], Raw]:
    """Return the configuration, validated, the targets, and what was typed over the files."""
    files = [*(["config.yaml"] if Path("config.yaml").is_file() else []), *call.files]
    whole = [placed(word, ()) for word in call.settings if is_whole(word)]
    configuration = load_files(*files, site=call.profile, over=whole)
    asked = [typed_target(word, configuration) for word in call.targets]
    plans = list(dict.fromkeys(plan for target in asked for plan in target.plans))
    layers = [placed(word, plans) for word in call.settings]
    if len(whole) < len(layers):
        configuration = load_files(*files, site=call.profile, over=layers)
    return configuration, asked, functools.reduce(merge, layers, Raw())


# ---- calls of Snakemake ----------------------------------------------------------------------------


def site_words(profile: str | None) -> list[str]:
    """Return the words that name a site to Snakemake, from its name, folder or `site.yaml`."""
    if not profile:
        return []
    folder = Path(profile if "/" in profile else f"profiles/{profile}")
    folder = folder.parent if folder.suffix == ".yaml" else folder
    if (folder / "profile.yaml").is_file():
        return ["--workflow-profile", str(folder)]
    return ["--default-resources", f"site={profile!r}"]


def ask(names: Sequence[str], args: argparse.Namespace) -> tuple[int, str, Any]:
    """Return status, words and, with success, answer of a dry run, with the profile and settings that `args` names."""
    command = [sys.executable, "-P", "-m", "snakemake", "--dry-run", *site_words(args.profile)]
    for option in ("configfile", "config"):
        command += [f"--{option}", *values] if (values := getattr(args, option)) else []
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        done = subprocess.run(
            [*command, "--", *names],
            env={**given(), ASKED: str(answer)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        said = done.stdout.rpartition("Building DAG of jobs...\n")[2].strip()
        said = "\n".join(line for line in said.splitlines() if not line.startswith("Using "))
        return done.returncode, said, None if done.returncode else read_json(answer)


def answer(reasons: Any) -> bool:
    """Write the answer for the process that asked; return whether one did."""
    if ASKED in os.environ:
        write_json(os.environ[ASKED], reasons)
    return ASKED in os.environ


def in_turn(first: Callable[..., object], method: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `first` with the keywords of `method`, then `method`.

    (Of an error, Snakemake shows the line of each function of the Snakefile that it passes.)
    """

    def both(*args: object, **named: object) -> object:
        first(**named)
        return method(*args, **named)

    return both


def command(call: Typed, names: Sequence[str], over: Raw) -> list[str]:
    """Return the words that start Snakemake."""
    words = [sys.executable, "-P", "-c", SNAKEMAKE, *site_words(call.profile)]
    words += ["--dry-run"] * call.dry + ["--printshellcmds"] * call.commands
    words += [] if "--logger" in call.rest else ["--logger", "dlscale"]
    words += ["--config", *(f"{key}={json.dumps(value)}" for key, value in over.items())] if over else []
    words += ["--configfile", *call.files] if call.files else []
    words += call.rest
    return words + ([*([] if "--" in call.rest else ["--"]), *names] if names else [])


def print_without_profile(*values: object, **named: Any) -> None:
    """Print what Snakemake prints, except the line on the profile that it uses."""
    if not str(values[0] if values else "").startswith("Using "):
        print(*values, **named)


def refuse_option(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End with a line on a mistaken option, with the nearest one, and without the usage of all of them."""
    near = nearest(message.split()[2], parser._option_string_actions) if message.startswith("unrecognized") else ""
    parser.exit(2, f"dlscale run: {message}{near}; targets and settings come before Snakemake's options\n")


def main(words: Sequence[str]) -> int:
    """Check what was typed, and become the Snakemake that does it."""
    call = sort(words)
    if call.help:
        print(HELP, end="")
        return 0
    if not Path("Snakefile").is_file() and not {"-s", "--snakefile", "-d", "--directory"} & set(call.rest):
        raise UserError("Snakefile: no such file here; call it in the repository, or in a folder of dlscale init")
    _, asked, over = configured(call)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # which stages ignore
        signal.signal(number, signal.SIG_DFL)
    words = command(call, [target.name for target in asked], over)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, given())  # its status, and the signals that it gets, are its own
