"""Command line, with a subcommand for each stage and for each query (a command for users).

The module of a subcommand is only imported when the subcommand runs.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import logging
import os
import re
import shutil
import signal
import site
import sys
import textwrap
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dlscale.core import environment, interrupt, process, progress, registry, telemetry
from dlscale.core.errors import PeerLost, Stopped, UserError, nearest
from dlscale.core.files import translate_error
from dlscale.core.machine import let_threads_wait, put_python_first, restore_caller
from dlscale.core.process import Ranks, ranks
from dlscale.core.redact import redact, redact_programs
from dlscale.core.settings import read_settings, typed, validate, write_yaml
from dlscale.core.stage import PLANS, Query, Stage, option
from dlscale.core.stages import RUN_OPTIONS, STAGES
from dlscale.core.text import coloured
from dlscale.launch.contain import exit_with_stdin

if TYPE_CHECKING:
    from dlscale.config.resolve import Configuration

USER_ERROR, DEFECT, STOPPED, INTERRUPTED = 2, 1, 75, 130


RUN = "Run plans, or make datasets or files; settings may follow, as in dlscale run PLAN seed=2"

#: Queries of the core, in the order of `--help`; extensions add further queries.
_OWN = {
    "status": Query(
        "dlscale.preflight.status",
        "Show the state of runs: running (progress, time left, loss, speed), silent (ended without a message, or "
        "without a new status for ten minutes), failed (with reason), done, or waiting.",
        (
            PLANS,
            option(
                "--watch",
                "repeat every five seconds until all runs are done, or until a run failed and no job has run for a "
                "minute",
                False,
                action="store_true",
            ),
        ),
        example="dlscale status --watch starter_demo",
    ),
    "cost": Query(
        "dlscale.preflight.cost",
        "Estimate the cost (node-hours, GPU-hours, charge) of runs and datasets without results, on a site with Slurm.",
        (PLANS,),
        example="dlscale cost --profile perlmutter starter_strong",
    ),
}

#: All queries; the queries of extensions are last.
QUERIES = _OWN | registry.table("COMMANDS")

#: Options of each query that reads the configuration.
_CONFIGURED = (
    option(
        "--profile",
        "site: NAME (profiles/NAME/site.yaml), or the path of a profile's folder or site.yaml",
        False,
        metavar="NAME",
    ),
    option(
        "--configfile",
        "YAML files that override config.yaml",
        False,
        nargs="+",
        default=[],
        action="extend",
        metavar="FILE",
    ),
    option(
        "--config",
        "settings (YAML) that override the settings in files",
        False,
        nargs="+",
        default=[],
        action="extend",
        metavar="KEY=VALUE",
    ),
    option("--json", "print JSON", False, action="store_true"),
)


#: Commands that `--help` lists first, in this order.
EVERYDAY = ("init", "run", "status", "why", "explain", "compare", "doctor", "new-study")


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, "", []) else super()._get_help_string(action)


def _overview(texts: Mapping[str, str]) -> str:
    width = min(shutil.get_terminal_size().columns, 120)
    lines = list[str]()
    for title, group in {"every day": EVERYDAY, "more": [name for name in texts if name not in EVERYDAY]}.items():
        lines += ["", coloured(f"{title}:", "bold", sys.stdout)]
        for name in (name for name in group if name in texts):
            lines += textwrap.wrap(texts[name], width, initial_indent=f"    {name:<12} ", subsequent_indent=" " * 17)
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Parser that suggests the most similar command for an unknown command.

    The parser of a query accepts positional arguments before, between and after the options.
    """

    reorders = False

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.exit(
                2, f"dlscale: no command is called '{value}'{nearest(value, action.choices)}; see dlscale --help\n"
            )
        super()._check_value(action, value)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        # An extension may add a command of two words, such as `report --sheet`.
        joined = [first, *words[2:]] if (first := " ".join(words[:2])) in QUERIES else words
        return super().parse_known_args(self._ordered(words) if self.reorders else joined, namespace)

    def _ordered(self, words: Sequence[str]) -> list[str]:
        """Return `words` in another order: options with their values, then `--`, then all other words."""
        options, others, rest = list[str](), list[str](), deque(words)
        while rest and rest[0] != "--":
            word = rest.popleft()
            if not _is_option(word):
                others.append(word)
                continue
            options.append(word)
            name, equals, _ = word.partition("=")
            found = [self._option_string_actions[each] for each in self._option_string_actions if each.startswith(name)]
            action = self._option_string_actions.get(name) or next(iter(found), None)
            if action is None or equals or action.nargs == 0 or not rest or _is_option(rest[0]):
                continue
            options.append(rest.popleft())
            while action.nargs == "+" and rest and not _is_option(rest[0]) and _fits(action, rest[0]):
                options.append(rest.popleft())
        others += list(rest)[1:]
        return [*options, "--", *others] if others else options


def _is_option(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-(\d.*)?", word)


def _fits(action: argparse.Action, word: str) -> bool:
    """Return whether a word is a further value of an option instead of a positional argument."""
    if action.dest == "configfile":
        return word.endswith((".yaml", ".yml", ".json"))
    if action.dest == "config":
        return "=" in word
    if action.type is int:
        return word.isdecimal()
    return "/" not in word and not Path(word).exists()


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands: `run`, the queries, and the stages."""
    top = _Parser(
        prog="dlscale",
        description="Measured, reproducible scaling studies of PyTorch models.",
        epilog=_overview({"run": RUN, **{name: row.text for name, row in QUERIES.items()}}),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    top.add_argument(
        "--study",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="register a study that is not shipped: its name, and its Python file or folder",
    )
    commands = top.add_subparsers(
        dest="stage", metavar="COMMAND", help="one of the commands below; COMMAND --help lists its options"
    )
    # This parser has no options, because the command `run` itself separates its options from Snakemake's options.
    run = commands.add_parser("run", prefix_chars="\0", add_help=False)
    run.add_argument("words", nargs=argparse.REMAINDER)
    run.set_defaults(log=None)
    rows: dict[str, Query | Stage] = {**QUERIES, **STAGES}
    for name, row in rows.items():
        example = f"Example: {row.example}" if isinstance(row, Query) else None
        added = commands.add_parser(name, description=row.text, epilog=example, formatter_class=_Defaults)
        added.add_argument(
            "--log",
            metavar="FILE",
            help="write all output to FILE (ranks N above 0: to FILE with .rankN before the suffix); print the final "
            "error also on the terminal",
        )
        of_runs = isinstance(row, Stage) and row.scope == "run"
        configured = isinstance(row, Query) and row.configured
        added.reorders = isinstance(row, Query)
        for flag, keywords in (*RUN_OPTIONS * of_runs, *row.options, *_CONFIGURED * configured):
            added.add_argument(flag, **keywords)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage or query and return the exit status of the process.

    0: success, 1: a defect, 2: a user's mistake, 75: the stage ended on request after saving its state and can be run
    again, 76: another process of the run failed, 130: interrupted, 141: the reader of the output (`| head`) has ended,
    143: ended by SIGTERM. A query may return other values; see its module.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # the caller has closed the stream
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    # The folder of the setting `site.packages` comes last in `sys.path`, so that it does not hide installed packages.
    if packages := os.environ.get("DLSCALE_PACKAGES"):
        site.addsitedir(packages)
    args = parser().parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(version("dlscale"))
        return 0
    if args.stage is None:
        parser().print_help()
        return USER_ERROR
    terminal, name = sys.stderr, f"dlscale {args.stage}"
    logging.raiseExceptions = False  # no traceback if the disk of the log is full
    let_threads_wait()
    # SIGTERM raises SystemExit, so that a stage removes incomplete files, as it does on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Slurm may send these signals before the time limit. By default they end a process; the train stage handles them.
    for warning in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(warning, signal.SIG_IGN)
    try:
        if args.log:
            log, rank = Path(args.log), ranks().rank  # ranks other than 0 have separate logs
            terminal = process.redirect(log.with_name(f"{log.stem}.rank{rank}{log.suffix}") if rank else log)
        process.say = functools.partial(_fail, terminal, name, 0)
        if "DLSCALE_LIFELINE" in os.environ and args.stage in STAGES:
            exit_with_stdin()
        # A truncated mapped file or a failing disk crashes the process; `faulthandler` then writes a traceback to the
        # log.
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGQUIT, file=2)  # `kill -QUIT` writes all stacks, and the stage continues
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        return _run(args)
    except (Stopped, PeerLost) as ended:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm may send the signal more than once
        return _fail(terminal, name, STOPPED if isinstance(ended, Stopped) else process.LOST, ended)
    except KeyboardInterrupt:
        return _fail(sys.stderr, name, INTERRUPTED, process.INTERRUPTED)  # with --log, stderr is the log
    except Exception as error:
        if isinstance(error, BrokenPipeError) and args.stage not in STAGES:  # such as `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes sys.stdout at exit
            return 128 + signal.SIGPIPE  # the status that a shell reports for a closed pipe
        expected = translate_error(error, "") if isinstance(error, OSError) else error
        if isinstance(expected, UserError):
            return _fail(terminal, name, USER_ERROR, str(expected).removeprefix(": "))
        # "failed to map segment" is in an ImportError if the dynamic linker has too little memory for a library.
        if isinstance(error, MemoryError) or "failed to map segment" in str(error):
            return _fail(
                *(terminal, name, USER_ERROR),
                f"too little memory ({error!r:.300}); close other programs, or request more memory (sbatch --mem)",
            )
        traceback.print_exc(file=sys.stderr)
        if mistake := registry.mistake(error):
            return _fail(terminal, name, USER_ERROR, mistake)
        outside = "".join(f"the study {name} or of " for name in registry.added())
        where = f"; see the traceback in the log {args.log}" if args.log else ""
        what = redact(f"{type(error).__name__}: {error}") + (
            ". A network's `forward` gets one argument: a tensor, a tuple or a dict" * (".forward() " in str(error))
        )
        return _fail(terminal, name, DEFECT, f"a defect of {outside}dlscale: {what}{where}")


def _run(args: argparse.Namespace) -> int:
    for text in args.study:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UserError(f"--study: {text}: expected NAME=PATH, such as waves=waves.py")
        registry.add(name, path)
    query = QUERIES.get(args.stage)
    if args.stage == "run" or query is None or query.configured:
        put_python_first()
    if args.stage == "run":
        from dlscale.preflight import run

        interrupt.raise_again()
        return run.main(args.words)
    if query:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # the locale may lack characters such as dashes
        configuration = _configuration(args) if query.configured else None
        module = importlib.import_module(query.module)
        interrupt.raise_again()
        status = int(module.main(args, configuration))
        sys.stdout.flush()
        return status
    restore_caller()
    first = not ranks().rank
    with progress.status_file(args.log if first else None), _watched(args):
        stage = _imported(_module(args))
        interrupt.raise_again()
        logging.info(progress.STARTED, progress.age())
        if first and getattr(args, "record", None):
            write_yaml(args.record, redact_programs(read_settings(args.config)[0]))
        with _near(args):
            stage.main(args)
        # The module is loaded by name, so that the code of the page is not part of the stage's fingerprint.
        if getattr(args, "page", None):
            registry.load("dlscale.report.report").write_live(args.page)
    if first and getattr(args, "telemetry", None):
        telemetry.show(Path(args.telemetry))
        environment.record(Path(args.telemetry).with_suffix(".json"))
    return 0


def _module(args: argparse.Namespace) -> str:
    """Return the entry module of a stage, which is another module for a run of an external program."""
    row = STAGES[args.stage]
    other = row.scope == "run" and read_settings(args.config)[0].get("program")
    if other and not row.program:
        raise UserError(
            f"{args.stage}: a run of an external program only has the stages "
            f"{', '.join(n for n, s in STAGES.items() if s.program)}"
        )
    return str(row.program) if other else row.module


def _imported(module: str) -> Any:
    """Import a module without garbage collection, which would make the import a fifth longer."""
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()


def _watched(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Return a context that samples telemetry.

    The context does nothing without the option `--telemetry`, or if this is not the first process of its node.
    """
    if not getattr(args, "telemetry", None):
        return contextlib.nullcontext()
    from dlscale.config.run import Geometry

    settings, where = read_settings(args.config)
    geometry = validate(Geometry, settings.get("geometry") or {}, f"{where}: geometry")
    parallel = settings.get("parallel")
    one = isinstance(parallel, dict) and parallel.get("kind") == "dp"  # DataParallel has one process for all GPUs
    one = one or bool(settings.get("program"))
    here, several = geometry.gpus_per_node, geometry.world_size > 1 and not one
    rank, _, local_rank = ranks() if several else Ranks()
    if local_rank:
        return contextlib.nullcontext()
    file = telemetry.node_file(Path(args.telemetry), rank // here)
    # If there are several ranks, all ranks of a node are children of one process of torchrun or Slurm.
    root, processes = (os.getppid(), here) if several else (os.getpid(), 1)
    return telemetry.sampled(file, root, processes, 0 if args.device == "cpu" else here)


@contextlib.contextmanager
def _near(args: argparse.Namespace) -> Iterator[None]:
    """Prepare the data of a run and of the first run in paired timing, and let `args` name their copies, if any."""
    with contextlib.ExitStack() as copies:
        if STAGES[args.stage].scope == "run" and not read_settings(args.config)[0].get("program"):
            original = args.manifest
            args.manifest = _copy(args.config, original, copies)
            if getattr(args, "beside", None):
                args.beside_manifest = _copy(args.beside, args.beside_manifest or original, copies)
        yield


def _copy(config: str, manifest: str, copies: contextlib.ExitStack) -> str:
    """Let a run's loader prepare the data, and return the path of the manifest that the loader reads.

    If the loader requests a copy (`staging`), return the path of the copy's manifest on this node.
    """
    loader = read_settings(config)[0].get("loader")
    loader = loader if isinstance(loader, dict) else {}  # the stage itself refuses an invalid section
    if (place := loader.get("staging")) in ("memory", "local"):
        from dlscale.data.staging import staged

        manifest = str(copies.enter_context(staged(manifest, place)))
    registry.prepare_data(loader, manifest)
    return manifest


def _fail(terminal: TextIO, name: str, status: int, message: object) -> int:
    for stream in dict.fromkeys((terminal, sys.stderr)):
        try:
            print(f"{name}: {message}", file=stream, flush=True)
        except OSError:  # the reader has ended, or the disk is full; Python's flush at exit must not fail, too
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status


def _configuration(args: argparse.Namespace) -> Configuration | None:
    """Return the configuration, merged as in the workflow.

    Return None without any file or setting, such as inside an image.
    """
    from dlscale.config.resolve import load_files

    files = [*(["config.yaml"] if Path("config.yaml").is_file() else []), *args.configfile]
    if not (files or args.config or args.profile):
        return None
    return load_files(*files, site=args.profile, over=[dict([typed(word)]) for word in args.config])
