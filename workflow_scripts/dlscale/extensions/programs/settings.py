"""External program that runs instead of dlscale's training.

Its settings are the command, and the ways in which the program's speed and losses are read.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationError

from dlscale.config.laws import Law, Lawful
from dlscale.core.errors import brief, unknown
from dlscale.core.redact import has_marker
from dlscale.core.schema import Value
from dlscale.core.settings import flat
from dlscale.core.stages import STAGES
from dlscale.core.urls import hidden

#: Pattern of a placeholder in a command; `{{` and `}}` stand for braces.
PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")

#: Short name of a placeholder → setting of the run.
SHORT = {
    "workers": "loader.workers",
    "prefetch": "loader.prefetch",
    "lr": "optimizer.lr",
    "epochs": "training.epochs",
    "steps": "training.steps",
    "nodes": "geometry.nodes",
    "gpus_per_node": "geometry.gpus_per_node",
}

#: Placeholders whose values are only known when the program starts.
LATER = ("out", "resume")

#: Placeholders that depend on the number of nodes, for commands that start processes on several nodes.
NODES = {"nodes", "geometry.nodes", "gpus"}

#: Settings that need no placeholder in a program's command, because they describe the run or its measurement.
DESCRIBING = {"program", "dataset", "geometry", "throughput", "tune", "label"}

#: Name for `--rate` → pattern of the printed rate, samples/s over all processes. `nersc`: NERSC's tutorial programs.
RATES = {"nersc": r"avg (\S+) samples/sec"}

#: Minimum number of steps for a program's rate: two warm-up steps, and three steps, some of which may be discarded.
MIN_STEPS = 5

#: Pattern of dlscale's names for the values that a program logs.
OURS = re.compile(r"loss/(train|valid)|learning_rate|valid/.+")


class Program(Lawful):
    """External program that runs instead of dlscale's training."""

    command: list[str] = Field(
        min_length=1,
        description="Program and its arguments, with placeholders. Settings of the run replace {batch_size}, "
        "{workers}, {optimizer.lr} and so on. The run's number of devices replaces {gpus}, and the folder for the "
        "program's files replaces {out}. For each name in `values`, the value replaces {name}.",
    )
    values: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.-]{0,63}$")], Value] = Field(
        {},
        description="Values of additional placeholders, which runs may change. A list becomes several arguments, such "
        "as `amp: [--amp_mode, bf16]`; for an empty list, the placeholder is removed.",
    )
    environment: dict[str, str] = Field(
        {}, description="Environment variables of the program; placeholders in the values are replaced."
    )
    folder: str = Field(".", min_length=1, description="Working folder of the program.")
    revision: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{40}$",
        description="Git commit (40 hexadecimal digits) of `folder` or of `repository`. Each start gets a fresh "
        "checkout, in which `folder` and relative paths are resolved.",
    )
    repository: str | None = Field(
        None,
        pattern=r"^((https://|file:///)\S+|/.+)$",
        description="Git repository from which the host of Snakemake fetches `revision`; `folder` is then a folder in "
        "this repository.",
    )
    image: str | None = Field(
        None,
        min_length=1,
        description="Container image of the program, started by `site.engine`. Absent: `site.image`.",
    )
    start: Literal["site", "itself"] = Field(
        "site",
        description="Launcher of a program on several devices. site: `site.starter` starts one process per device. "
        "itself: the command starts the processes, such as `srun --nodes={nodes} ...`. Such a command must state the "
        "number of nodes, because the environment of a job does not contain this number.",
    )
    rate: str | None = Field(
        None,
        description="Regular expression for the printed speed, with one group for the samples/s, or the name of a "
        f"known format ({', '.join(RATES)}). Absent: the speed is measured from the steps.",
    )
    log: str | None = Field(
        None,
        description="Log of the program: TensorBoard event files or their folder, or a file of JSON lines with `step` "
        "and `time`. The losses are read from this log. The speed is read from the log if `rate` is absent and the "
        "steps cannot be detected.",
    )
    losses: dict[str, str] = Field(
        {},
        description="Tags of the log, each with dlscale's name for the values, such as `Loss/valid: loss/valid`. "
        "dlscale's other names are loss/train, learning_rate, and valid/NAME for metrics. Without a log, the keys are "
        "regular expressions for the printed output, with one group for the number; a number before a % sign is "
        "divided by 100.",
    )
    resume: list[str] = Field(
        [],
        description="Arguments that replace {resume} if an earlier try left files in {out}; otherwise {resume} is "
        "removed.",
    )

    LAWS: ClassVar[tuple[Law, ...]] = (
        (
            lambda program: program.repository and not program.revision,
            "repository needs revision; set revision to the commit to fetch",
        ),
        (
            lambda program: "://" in (program.repository or "") and hidden(program.repository) != program.repository,
            "repository: the address contains a login or a query, which pages and logs would show; put the login into "
            "~/.netrc",
        ),
        (
            lambda program: program.rate and not _one_group(RATES.get(program.rate, program.rate)),
            "rate {its.rate}: expected a regular expression with one group for the number, or one of "
            f"{', '.join(RATES)}",
        ),
        (
            lambda program: not program.log and [each for each in program.losses if not _one_group(each)],
            "losses: without a log, expected regular expressions for the printed output, each with one group for the "
            "number; or set log to the path of the log",
        ),
        (
            lambda program: (
                program.losses
                and (
                    "loss/valid" not in program.losses.values()
                    or any(not OURS.fullmatch(ours) for ours in program.losses.values())
                )
            ),
            "losses: each key needs a name of dlscale (loss/valid, loss/train, learning_rate, valid/NAME); loss/valid "
            "is required",
        ),
        (
            lambda program: len(set(program.losses.values())) < len(program.losses),
            "losses: two keys have the same name of dlscale; expected a different name for each",
        ),
        (
            lambda program: program.resume and "resume" not in set(program.placeholders()),
            "resume: the command has no {{resume}} to replace by these arguments; add {{resume}}, or remove the key",
        ),
        (
            lambda program: "/" in program.command[0] and program.command[0].endswith("/"),
            "command {its.command[0]}: a folder; expected a program and its arguments",
        ),
    )

    def texts(self) -> Iterator[str]:
        """Yield all texts that may contain placeholders."""
        yield from (*self.command, *self.environment.values(), self.folder, *filter(None, [self.log]), *self.resume)
        for value in self.values.values():
            yield from map(str, value if isinstance(value, list) else [value])

    def secret_variables(self) -> list[str]:
        """Return the names of variables with secret values, which must not appear on a command line."""
        return [name for name, value in self.environment.items() if has_marker(value)]

    def placeholders(self) -> Iterator[str]:
        """Yield the names of all placeholders."""
        for text in self.texts():
            yield from (match[1] for match in PLACEHOLDER.finditer(text) if match[1])

    def filled(self, run: Any) -> Program:
        """Return the program of a run with all placeholders replaced except {out} and {resume}.

        `values` of the result are the values that replaced placeholders.
        """
        known = {**settings_of(run), **self.values}
        used = {name: known[name] for name in self.placeholders() if name in known}

        def value(name: str) -> str | list[str] | None:
            found = used.get(name)
            own = name in self.values  # such values may contain placeholders
            if isinstance(found, list):
                return [_text(str(each), value) if own else str(each) for each in found]
            return _text(found, value) if own and isinstance(found, str) else _written(found)

        return Program(
            **self.model_dump(include={"revision", "repository", "image", "start", "rate", "losses"}),
            command=[word for text in self.command for word in _words(text, value)],
            resume=[word for text in self.resume for word in _words(text, value)],
            environment={name: _text(text, value) for name, text in self.environment.items()},
            folder=_text(self.folder, value),
            log=self.log and _text(self.log, value),
            values=used,
        )

    def problem(
        self, run: Any, plan_name: str, name: str, workflow: Any, layers: Iterable[tuple[str, dict[str, Any]]]
    ) -> str | None:
        """Return an error message for a run of a plan; the message begins with the path of the wrong key.

        Return None if the run's stages and settings fit the program.

        `layers`: settings that the program must get, each with the key path at which they are written.
        """
        plan, here = workflow.plans[plan_name], f"plans.{plan_name}"
        stages, run_key = plan.stages(name), f"{here}.runs.{name}"
        if not any(STAGES["program" if stage == "train" else stage].program for stage in stages):
            return (
                f"{here}.measure: a program only has the stages "
                f"{', '.join('train' if row == 'program' else row for row in STAGES if STAGES[row].program)}; add one "
                f"of these stages, or remove {name}"
            )
        # The trials of plans that are not targets are checked when the plans run.
        found = self.check(run) or ("tune" in stages and self.untuned(run))
        if found := found or (plan_name in workflow.targets and self.check_trials(run)):
            return f"{run_key}.{found}"
        if plan.halves:
            return f"{here}.sweep.method halving: an external program always trains to its end; use grid or random"
        if self.image and workflow.site.engine == "none":
            return f"{run_key}.program.image: site.engine is none; set an engine, or remove the image"
        if plan.repeat > 1 and "seed" not in {*self.placeholders()}:
            return f"{here}.repeat: the program's command has no {{seed}}; add {{seed}}"
        used = {SHORT.get(each, each) for each in self.placeholders()}
        used |= {"batch_size", "local_batch_size"} if used & {"batch_size", "local_batch_size"} else set()
        for where, layer in layers:
            for key in flat(layer):
                said = key.split(".")[0] in DESCRIBING or key.endswith((".kind", ".on_divergence"))
                if not said and key not in used:
                    return (
                        f"{where}.{key}: the program does not get this setting; put {{{key}}} into program.command, or "
                        "remove the setting"
                    )
        return None

    def check(self, run: Any) -> str | None:
        """Return an error message for wrong placeholders of a run's program; the message begins with the wrong key.

        Return None if the placeholders are valid.
        """
        settings, used = settings_of(run), set(self.placeholders())
        if self.repository and self.folder.startswith("/"):
            return f"program.folder: {self.folder}: expected a path relative to program.repository"
        for name in self.values:
            if name in settings or name in LATER:
                return f"program.values.{name}: a setting has this name, or {{{name}}} is reserved; choose another name"
            if name == "kind":
                return "program.values.kind: another `kind` replaces all settings of a section; choose another name"
            if "." in name:
                return f"program.values.{name}: names with dots are for settings; choose another name"
            if name not in used:
                return f"program.values.{name}: no other key of program contains {{{name}}}; add it to the command"
        known = {**settings, **self.values}
        for name in sorted(used - set(LATER)):
            if name not in known:
                return (
                    f"program.command {{{name}}}: {unknown('setting', name, [*known, *LATER])}; write {{{{ for a brace"
                )
            if known[name] is None:
                return f"program.command {{{name}}}: no value in this run; set {SHORT.get(name, name)}"
        if run.geometry.nodes > 1 and self.start == "itself" and not used & NODES:
            return (
                f"program.start itself: the command contains neither {{nodes}} nor {{gpus}}, so it would run on one of "
                f"{run.geometry.nodes} nodes; write srun --nodes={{nodes}} into program.command, or set geometry.nodes "
                "to 1"
            )
        try:
            self.filled(run)
        except RecursionError:
            return "program.values: placeholders refer to each other in a circle; remove one reference"
        except ValidationError as error:  # such as an empty list in place of a required argument
            first = error.errors()[0]
            key = ".".join(map(str, ("program", *first["loc"])))
            return f"{key}: {first['msg'].removeprefix('Value error, ')}, after its placeholders are replaced"
        return None

    def check_trials(self, run: Any) -> str | None:
        """Return the message for trials that have too few steps for a program's rate.

        Return None if the trials have enough steps, or if the program prints its rate.
        """
        timed = run.throughput
        if self.rate or (steps := (timed.warmup + timed.trials) * timed.batches) >= MIN_STEPS:
            return None
        return (
            f"throughput: (warmup + trials) * batches is {steps}; a program's rate needs at least {MIN_STEPS} steps; "
            "raise throughput.batches"
        )

    def missing_script(self, contained: bool = False) -> str | None:
        """Return the path of the command's script if the file is missing; None if it exists or cannot be checked.

        `contained`: whether the program runs in a container, whose files are not visible to this process.
        """
        folder = Path(self.folder)
        script = _script(Words(self, "{out}").command)
        if script and "{out}" in script:
            script = None
        if script is None or not os.access(folder, os.X_OK) or (self.revision and not self.repository):
            return None
        there = (contained and script.startswith("/")) or (folder / script).exists()
        return None if there else str(folder / script)

    def untuned(self, run: Any) -> str | None:
        """Return the reason why `tune` cannot run for a run's program; the message begins with the wrong key.

        Return None if `tune` can run.
        """
        if run.geometry.world_size > 1:
            return "tune: programs are tuned on one device; set nodes and gpus_per_node in geometry to 1"
        if self.image or self.rate:
            return "tune: paired timing is impossible for a program with `image` or `rate`; remove `tune` or this key"
        if wrong := [name for name in run.tune.values if name not in self.values]:
            return f"tune.values.{wrong[0]}: {unknown('value of the program', wrong[0], self.values)}"
        try:
            found = self.candidates(run, 1)
        except (ValidationError, RecursionError) as error:
            return f"tune: {brief(error)}"
        if len(found) < 2:
            return (
                "tune: no setting can be varied; put {workers} into the command, or list values in tune for another "
                "placeholder of the command: {prefetch}, {batch_size}, {threads}, or a name in program.values"
            )
        return None

    def candidates(self, run: Any, cores: int) -> list[tuple[dict[str, Any], Any]]:
        """Return the candidates of the stage `tune` for a run's program; the current settings are the first candidate.

        A candidate is a pair: the changed settings by dotted key, and the run with a filled program. Only settings
        with a placeholder in the program are varied. `cores` is the number of CPUs per process.
        """
        tried, used = run.tune, set(self.placeholders())
        doubled = itertools.takewhile(lambda count: count <= cores, (2**power for power in itertools.count()))
        lists: dict[str, list[Any]] = {
            "loader.workers": tried.workers or [0, *doubled],
            "loader.prefetch": tried.prefetch if "prefetch" in tried.model_fields_set else [],
            "threads": tried.threads,
            "batch_size": tried.batch_size,
            **{f"program.values.{name}": values for name, values in tried.values.items()},
        }
        names = {**{key: name for name, key in SHORT.items()}, "batch_size": "batch_size", "threads": "threads"}
        known = {
            key: values
            for key, values in lists.items()
            if values and {key, names.get(key), key.removeprefix("program.values.")} & used
        }
        own, found = flat(run.model_dump(mode="json")), list[tuple[dict[str, Any], Any]]()
        for combination in itertools.product(*known.values()):
            over = dict(zip(known, combination, strict=True))
            other = type(run).model_validate(_changed(run.model_dump(mode="json"), over))
            change = {key: value for key, value in over.items() if value != own.get(key)}
            if change not in [each for each, _ in found]:
                found.append((change, other.model_copy(update={"program": other.program.filled(other)})))
        return [({}, run.model_copy(update={"program": self.filled(run)})), *(each for each in found if each[0])]


def _one_group(text: str) -> bool:
    try:
        return re.compile(text).groups == 1
    except re.error:
        return False


def settings_of(run: Any) -> dict[str, Any]:
    """Return the values of a run's placeholders by name, without the placeholders in `program.values`."""
    found = flat(run.model_dump(mode="json", exclude={"program"}))
    found |= {name: found[key] for name, key in SHORT.items() if key in found}
    return {
        **found,
        "gpus": run.geometry.world_size,
        "model_gpus": run.geometry.model_size,
        "local_batch_size": run.local_batch_size,
    }


def _script(command: list[str]) -> str | None:
    """Return the script that a command starts; None if unknown.

    The script follows python, sh, bash or torchrun. For other commands, the script is the program itself if the command
    gives its path.
    """
    first, *rest = command
    program = Path(first).name
    if re.fullmatch(r"python[\d.]*", program):
        while rest and rest[0].startswith("-"):
            if rest[0] in ("-c", "-m"):
                launched = rest[0] == "-m" and rest[1:2] in (["torch.distributed.run"], ["torch.distributed.launch"])
                return _script(["torchrun", *rest[2:]]) if launched else None
            rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
        return rest[0] if rest else None
    if program == "torchrun":
        words = itertools.takewhile(lambda word: word not in ("-m", "--module", "--no-python", "--no_python"), rest)
        return next((word for word in words if word.endswith(".py")), None)
    if program in ("sh", "bash"):
        return rest[0] if rest and not rest[0].startswith("-") else None
    return first if "/" in first else None


def _changed(settings: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        *path, last = key.split(".")
        place = settings
        for part in path:
            place = place[part]
        place[last] = value
    return settings


class Words:
    """Texts of a filled program when it starts, with {out} and {resume} replaced."""

    def __init__(self, program: Program, out: str, resumed: bool = False) -> None:
        def value(name: str) -> str | list[str] | None:
            return out if name == "out" else (program.resume if resumed else []) if name == "resume" else None

        def text(given: str) -> str:
            return _text(given, value).replace("{{", "{").replace("}}", "}")

        self.resume = [text(word) for word in program.resume]
        self.command = [text(word) for given in program.command for word in _words(given, value)]
        self.environment = {name: text(given) for name, given in program.environment.items()}
        self.folder, self.log = text(program.folder), program.log and text(program.log)


def _words(text: str, value: Callable[[str], str | list[str] | None]) -> list[str]:
    """Return the arguments that replace one argument of a command.

    A placeholder may become several arguments, or may be removed.
    """
    match = PLACEHOLDER.fullmatch(text)
    found = value(match[1]) if match and match[1] else None
    return found if isinstance(found, list) else [_text(text, value)]


def _text(text: str, value: Callable[[str], str | list[str] | None]) -> str:
    """Return a text with placeholders replaced; placeholders without a value and double braces do not change."""

    def put(match: re.Match[str]) -> str:
        found = value(match[1]) if match[1] else None
        return match[0] if found is None else " ".join(found) if isinstance(found, list) else found

    return PLACEHOLDER.sub(put, text)


def _written(value: Any) -> str | None:
    """Return a setting's value as text for a command; None stays None."""
    if value is None:
        return None
    return (str(value).lower() if isinstance(value, bool) else str(value)).replace("{", "{{").replace("}", "}}")
