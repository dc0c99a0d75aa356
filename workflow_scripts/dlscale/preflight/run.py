"""`dlscale run WORD …`: check targets and settings (`seed=2`), then start Snakemake with them.

This module never imports Snakemake. A command that needs the result of a dry run names a file in an environment
variable, and the workflow writes the result into this file.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

Run plans, or make datasets or files, with settings from the command line.

A WORD is
  PLAN or plan_PLAN      a plan, with its own page (default: the targets of the configuration)
  data_NAME              a dataset, with its description and preview
  study_NAME             the target plans of a study
  FILE                   a file in the results folder
  all, image             all targets; the container image of the site
  KEY=VALUE              a setting of the named plans, such as optimizer.lr=1e-3, or any key of the configuration with
                         its full path, such as plans.mine.runs.large.batch_size=64. Values are YAML.

options:
  -n, --dry-run          show the jobs that would run, the reasons and the cost; exit with 1 if the jobs could not start
  -p, --printshellcmds   print the commands of jobs; in a dry run also the requests to Slurm
  --profile NAME         site: NAME (profiles/NAME/site.yaml), or the path of a profile's folder or site.yaml
                         (also --workflow-profile)
  --configfile FILE ...  YAML files that override config.yaml

Other options are Snakemake's (`snakemake --help`). Write them after all other words.
Example: dlscale run PLAN --cores 4
"""

#: Pattern of a setting KEY=VALUE with a dotted key. A file path with `=` does not match, because a slash precedes `=`.
SETTING = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
#: Options of `dlscale run` itself.
OURS = re.compile(r"-[hnp]+|--|--(help|dry-?run|printshellcmds|(workflow-)?profile(=.*)?)")
#: Snakemake's options for settings and settings files. Each call must repeat these options.
SETTINGS = {"--config", "-C", "--configfile", "--configfiles"}
#: Suffixes of settings files. Several such files may follow `--configfile`.
ENDS = (".yaml", ".yml", ".json")
#: Prefix of a target's name → kind of target, in words.
KINDS = {"plan": "plan", "data": "dataset", "study": "study"}
#: Environment variable that names the file to which a dry run writes its result.
ASKED = "DLSCALE_ASKED"
#: Python code of Snakemake's command line, with one-line errors for wrong options.
SNAKEMAKE = (
    "from dlscale.core.interrupt import end_at_once; end_at_once('dlscale run'); import argparse; "
    "from dlscale.preflight import run; from snakemake import cli; "
    "argparse.ArgumentParser.error = run.refuse_option; cli.print = run.print_without_profile; cli.main()"
)


@dataclass(frozen=True)
class Waiting:
    """A job that would run, with Snakemake's reasons for it."""

    rule: str
    wildcards: Mapping[str, str]
    missing: Sequence[str] = ()  #: Missing outputs; names of folders end with a slash.
    known: bool = False  #: Whether the job ran before.
    failed: str = ""  #: Time of the last try if it failed, else empty; Snakemake removes the outputs of a failed try.
    before: Sequence[str] = ()  #: Recorded parameters (as `repr`) that the job no longer has.
    now: Sequence[str] = ()  #: New parameters (as `repr`), which the last run's record lacks.
    newer: Sequence[str] = ()  #: Inputs that changed since the last run.
    inputs: bool = False  #: Whether the list of inputs changed.
    follows: bool = False  #: Whether the same call makes some of the job's inputs.
    forced: bool = False
    interrupted: bool = False  #: Whether an earlier try was interrupted.
    command: bool = False  #: Whether the rule's own command changed.


# ---- targets ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A target, with the plans and datasets that it names or belongs to."""

    name: str  #: Name or path of Snakemake's target.
    plans: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()


def studies(configuration: Configuration) -> dict[str, list[str]]:
    """Return the target plans of each study; studies without a target plan are absent."""
    found: dict[str, list[str]] = {}
    for plan in configuration.workflow.targets:
        found.setdefault(configuration.workflow.plans[plan].study, []).append(plan)
    return found


def read_target(word: str, configuration: Configuration) -> Target | None:
    """Return the target for a results file, plan_NAME, data_NAME or study_NAME; None for other words.

    Raises
    ------
    UserError
        The plan, run, dataset or study is unknown (the message has the nearest name), or this machine cannot run any of
        the plan's runs.
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
        lacking = "; ".join(f"{run}: {what}" for run, what in configuration.skipped_runs[name].items())
        raise UserError(f"{word}: every run of the plan needs something that this machine lacks ({lacking})")
    return Target(word, plans=(name,))


def refuse_late_words(targets: Iterable[str], configuration: Configuration) -> None:
    """Refuse plans and settings among Snakemake's targets: plans and settings must precede Snakemake's options."""
    for word in targets:
        if (word in configuration.plans or SETTING.fullmatch(word)) and not Path(word).exists():
            example = f"dlscale run {word}" if word in configuration.plans else f"dlscale run PLAN {word}"
            raise UserError(f"{word}: write plans and settings before Snakemake's options: {example} --cores 4")


def typed_target(word: str, configuration: Configuration) -> Target:
    """Return the target that a word names: PLAN, `all`, `image`, or a word for `read_target`."""
    if word in ("all", "image"):
        return Target(word)
    if found := read_target(f"plan_{word}" if word in configuration.plans else word, configuration):
        return found
    plan, _, run = word.partition(".")
    if run in configuration.plans.get(plan, {}):
        raise UserError(f"{word}: this is a run; only its plan can be a target. Run the plan: dlscale run {plan}")
    names = [*configuration.plans, "all", "image", *(f"data_{name}" for name in configuration.workflow.datasets)]
    raise UserError(
        f"{word}: a file of settings; write: --configfile {word}"
        if word.endswith(ENDS) and Path(word).is_file()
        else f"{word}: {unknown('target', word, names)}"
    )


def _check(word: str, what: str, name: str, configuration: Configuration) -> None:
    """Refuse an unknown name; if the name has results, the message adds that another configuration made them."""
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
    """The words of a command line, sorted by meaning."""

    targets: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)  #: KEY=VALUE
    files: list[str] = field(default_factory=list)
    profile: str | None = None
    dry: bool = False
    commands: bool = False  #: Whether to print the commands of jobs.
    help: bool = False
    rest: list[str] = field(default_factory=list)  #: Options and targets for Snakemake.


def sort(words: Iterable[str]) -> Typed:
    """Sort the words of a command line.

    From the first option that is not in `OURS`, all words are Snakemake's, except the values of --config and
    --configfile.
    """
    all_ = [part for word in words for part in (word.split("=", 1) if word.partition("=")[0] in SETTINGS else [word])]
    ours, rest, settings, files = list[str](), list[str](), list[str](), list[str]()
    foreign = follows = False  # whether the word is Snakemake's; whether it follows an option of SETTINGS
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
    try:  # only Snakemake needs `--`
        args = parser.parse_intermixed_args([word for word in ours if word != "--"])
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name}: {error.message}") from None
    return Typed(args.words, settings, files, args.profile, args.dry, args.commands, args.help, rest)


def is_whole(word: str) -> bool:
    """Return whether a setting's key starts at the top level of the configuration, not at the level of a run."""
    return typed(word)[0].partition(".")[0] in Workflow.model_fields


def nest_setting(word: str, plans: Sequence[str]) -> Raw:
    """Return a setting as nested configuration, at its full key or in the settings of the named plans."""
    key, value = typed(word)
    if is_whole(word):
        return nested({key: value})
    if not plans:
        raise UserError(
            f"{word}: a setting without a plan. Name the plan: dlscale run PLAN {word}; or write the full key: "
            f"plans.PLAN.settings.{word}"
        )
    return {"plans": {plan: {"settings": nested({key: value})} for plan in plans}}


def configured(call: Typed) -> tuple[Configuration, list[Target], Raw]:
    """Return the validated configuration, the targets, and the settings of the command line."""
    files = [*(["config.yaml"] if Path("config.yaml").is_file() else []), *call.files]
    whole = [nest_setting(word, ()) for word in call.settings if is_whole(word)]
    configuration = load_files(*files, site=call.profile, over=whole)
    asked = [typed_target(word, configuration) for word in call.targets]
    plans = list(dict.fromkeys(plan for target in asked for plan in target.plans))
    layers = [nest_setting(word, plans) for word in call.settings]
    if len(whole) < len(layers):
        configuration = load_files(*files, site=call.profile, over=layers)
    return configuration, asked, functools.reduce(merge, layers, Raw())


# ---- calls of Snakemake ----------------------------------------------------------------------------


def site_words(profile: str | None) -> list[str]:
    """Return Snakemake's options for a site, from the site's name, folder or `site.yaml`."""
    if not profile:
        return []
    folder = Path(profile if "/" in profile else f"profiles/{profile}")
    folder = folder.parent if folder.suffix == ".yaml" else folder
    if (folder / "profile.yaml").is_file():
        return ["--workflow-profile", str(folder)]
    return ["--default-resources", f"site={profile!r}"]


def dry_run(names: Sequence[str], args: argparse.Namespace) -> tuple[int, str, Any]:
    """Make a dry run with the profile and settings of `args`; return exit status, output, and result (None if failed).

    The result is the value that the workflow passes to `write_reply`.
    """
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


def write_reply(reasons: Any) -> bool:
    """Write the result of a dry run for `dry_run`; return False if no process waits for it."""
    if ASKED in os.environ:
        write_json(os.environ[ASKED], reasons)
    return ASKED in os.environ


def in_turn(first: Callable[..., object], method: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `first` with the keywords of `method`, then `method`.

    This function is not in the Snakefile, because Snakemake's error messages list each function of the Snakefile that
    is on the stack.
    """

    def both(*args: object, **named: object) -> object:
        first(**named)
        return method(*args, **named)

    return both


def command(call: Typed, names: Sequence[str], over: Raw) -> list[str]:
    """Return the command that starts Snakemake."""
    words = [sys.executable, "-P", "-c", SNAKEMAKE, *site_words(call.profile)]
    words += ["--dry-run"] * call.dry + ["--printshellcmds"] * call.commands
    words += [] if "--logger" in call.rest else ["--logger", "dlscale"]
    words += ["--config", *(f"{key}={json.dumps(value)}" for key, value in over.items())] if over else []
    words += ["--configfile", *call.files] if call.files else []
    words += call.rest
    return words + ([*([] if "--" in call.rest else ["--"]), *names] if names else [])


def print_without_profile(*values: object, **named: Any) -> None:
    """Print Snakemake's output without the line that names its profile."""
    if not str(values[0] if values else "").startswith("Using "):
        print(*values, **named)


def refuse_option(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Exit with a one-line message on a wrong option and the nearest valid one, without the usage."""
    near = nearest(message.split()[2], parser._option_string_actions) if message.startswith("unrecognized") else ""
    parser.exit(2, f"dlscale run: {message}{near}; write targets and settings before Snakemake's options\n")


def main(words: Sequence[str]) -> int:
    """Check the words of the command line, then replace this process with Snakemake."""
    call = sort(words)
    if call.help:
        print(HELP, end="")
        return 0
    if not Path("Snakefile").is_file() and not {"-s", "--snakefile", "-d", "--directory"} & set(call.rest):
        raise UserError(
            "Snakefile: no such file here. Run this command in the repository, or in a folder made by `dlscale init`"
        )
    _, asked, over = configured(call)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # Snakemake would inherit that dlscale ignores these signals
        signal.signal(number, signal.SIG_DFL)
    words = command(call, [target.name for target in asked], over)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, given())  # the caller gets Snakemake's exit status, and signals reach Snakemake
