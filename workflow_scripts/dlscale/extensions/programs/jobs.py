"""Files, folders, revisions and command-line arguments of runs of external programs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from dlscale.config.resolve import Configuration
from dlscale.config.run import Run
from dlscale.core.errors import UserError
from dlscale.core.files import sha256
from dlscale.core.stages import STAGES
from dlscale.extensions.programs.launch import launch_program
from dlscale.extensions.programs.settings import Words
from dlscale.launch import launcher, slurm
from dlscale.preflight.probe import Finding
from dlscale.rules.context import Params, Wildcards
from dlscale.rules.runs import Programs

#: Subfolder of a run for the output of its external program.
OUT = "out"


class ProgramJobs(Programs):
    """Jobs of runs of external programs."""

    def with_fetched_folder(self, run: Run) -> Run:
        """Return the run with `program.folder` inside the fetched repository, or unchanged without a repository."""
        if not (run.program and run.program.repository):
            return run
        folder = Path(self.context.paths.program(str(run.program.revision)), run.program.folder)
        return run.model_copy(update={"program": run.program.model_copy(update={"folder": str(folder)})})

    def checkout(self, wildcards: Wildcards) -> list[str]:
        program = self.context.run(wildcards).program
        return [self.context.paths.program(str(program.revision))] if program and program.repository else []

    def checkout_repository(self, wildcards: Wildcards) -> str:
        programs = (each.run.program for runs in self.context.plans.values() for each in runs.values())
        return next(
            (
                str(each.repository)
                for each in programs
                if each and each.repository and each.revision == wildcards.revision
            ),
            "",
        )

    def checkout_params(self, wildcards: Wildcards) -> Params:
        return self.context.params(
            [], {"repository": self.checkout_repository(wildcards), "revision": wildcards.revision}
        )

    def checkout_launch(self, wildcards: Wildcards, input: Any) -> list[str]:
        return self.commands.completed([*launcher.PYTHON_HERE])

    def named_files(self, run: Run) -> list[str]:
        """Return the files that the command of a run's program names, except files in the results folder.

        A change of one of these files makes the program run again. The command's first element counts only if it is a
        file in the program's folder, because Python itself is not a file of the program.
        """
        if not run.program:
            return []
        words, results = Words(run.program, OUT), Path(self.context.paths.folder).absolute()
        first, *known = [Path(words.folder, word) for word in words.command]
        if "/" in words.command[0] and first.resolve().is_relative_to(Path(words.folder).resolve()):
            known.append(first)
        # `os.path.isfile` returns False for arguments too long for a file name, such as code after `-c`; `Path` raises.
        files = [
            file
            for file in known
            if os.path.isfile(file) and not file.absolute().is_relative_to(results)  # noqa: PTH113
        ]
        return list(dict.fromkeys(map(os.path.relpath, files)))

    def files(self, wildcards: Wildcards) -> list[str]:
        run, here = self.context.run(wildcards), f"plans.{wildcards.plan}.runs.{wildcards.run}"
        program = run.program
        if (
            program
            and not program.repository
            and here not in self.context.looked
            and not os.access(program.folder, os.F_OK)
        ):
            remedy = f"get the program's files (git clone), or name their folder in {here}.program.folder"
            self.context.say(Finding(f"run {wildcards.run}", "FAIL", f"{program.folder}: no such folder", remedy))
        placed = self.with_fetched_folder(run).program
        contained = self.context.site.engine != "none" or bool(program and program.image)
        if placed and here not in self.context.looked:
            found = probe_script(wildcards.run, f"{here}.program.command", placed, contained)
            self.context.say(found) if found else None
        self.context.looked.add(here)
        return self.named_files(run)

    def out_folder(self, wildcards: Wildcards) -> str:
        """Return the folder `{out}` of a run's program, whose files are kept between tries."""
        return self.context.paths.run(OUT, wildcards.plan, wildcards.run)

    def sources(self, wildcards: Wildcards, input: Any) -> str:
        """Return a digest of all parameters that a program's results depend on.

        A try may resume from the files of an earlier try with the same digest.
        """
        stage = json.dumps(self.params("program", self.context.run(wildcards)), sort_keys=True)
        return hashlib.sha256(stage.encode()).hexdigest()

    def params(self, stage: str, run: Run) -> Params:
        """Return the parameters of an external program's stage; if one changes, the stage runs again.

        The parameters include the program's command, and so all settings that the program gets.
        """
        if not STAGES[stage].program:
            self.context.refuse(
                f"{stage}: a run of an external program has no such stage; request the files of one of its stages "
                f"({', '.join(name for name, row in STAGES.items() if row.program)}), or the run's plan"
            )
        seen = run.slice(stage)
        own = ("program", "geometry", "dataset", *STAGES[stage].settings)
        settings = json.dumps({key: seen[key] for key in own})
        # A user may replace a file with an older file, which Snakemake's comparison of times does not notice.
        digests = {file: sha256(file) for file in self.named_files(run)}
        return self.context.params([str(STAGES[stage].program)], settings) | {"files": digests}

    def candidates(self, wildcards: Wildcards) -> list[Any]:
        """Return the candidates that tuning tries for an external program; empty for other runs.

        A candidate is a list: the changed settings, and all settings for the stage `throughput`.
        """
        asked = self.context.plans[wildcards.plan][wildcards.run].asked
        if asked is None:
            return []
        cores = (
            slurm.cpus_per_task(self.context.site.scheduler, asked.geometry)
            if self.context.site.scheduler
            else os.cpu_count() or 1
        )
        assert asked.program is not None
        found = asked.program.candidates(asked, cores)
        return [[changes, self.with_fetched_folder(run).slice("throughput")] for changes, run in found]

    def tune_candidates(self, wildcards: Wildcards, input: Any) -> list[str]:
        found = self.candidates(wildcards)
        return ["--candidates", json.dumps(found)] if found else []

    def start(self, wildcards: Wildcards, input: Any) -> list[str]:
        run = self.context.run(wildcards)
        return ["--start", json.dumps(self.launch(input, run)[1])] if run.program else []

    def launch(self, paths: Iterable[str], run: Run, secrets: bool = False) -> tuple[list[str], list[str]]:
        """Return the command of a program's stage, and the arguments to put before the program's own command."""
        placed = self.with_fetched_folder(run)
        assert placed.program
        place = self.commands.place([*paths, placed.program.folder])
        try:
            outer, inner = launch_program(self.context.site, place, placed)
        except UserError as error:
            self.context.refuse(error)
        return self.commands.completed(outer, secrets), inner


def probe_script(run: str, key: str, program: Any, contained: bool) -> Finding | None:
    """Return a finding if the script of a run's external program is missing; `key` is the key of its command."""
    script = program.missing_script(contained)
    remedy = f"correct {key}, or get the program's files"
    return Finding(f"run {run}", "FAIL", f"{script}: no such file", remedy) if script else None


def probe_scripts(configuration: Configuration, plans: Collection[str] | None = None) -> list[Finding]:
    """Report each run whose external program lacks its script; skip programs whose repository is fetched later."""
    workflow = configuration.workflow
    return [
        found
        for plan in (workflow.targets if plans is None else plans)
        for name, resolved in configuration.plans[plan].items()
        if (program := resolved.run.program) and not program.repository
        if (found := probe_script(f"{plan}.{name}", "program.command", program, workflow.site.engine != "none"))
    ]
