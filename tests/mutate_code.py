"""Put known mistakes into the code, one at a time, and report which mistakes the tests catch.

`python -m tests.mutate_code` makes each mutation in a copy of the repository, and runs the test that should catch the
mutation. The exit status is 1 if a mutation survives, and 2 if a test fails in unchanged code. Arguments
select mutations by name; names may contain `*` and `?`: `python -m tests.mutate_code 'schedule*' lock`.
`test_mutate_code.py` fails if the list no longer matches the code. With `--draw N`, arguments are paths in the package,
and N random mutations are drawn from their modules. Up to three test files that import the module should catch each
mutation; a person judges the survivors.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import fnmatch
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import changed

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "workflow_scripts/dlscale"

#: Names that are not copied, because tests do not need them: in the top folder only, and in any folder (`CACHES`).
EXCLUDED_FOLDERS = {".git", ".venv", "results", "shared", "build", "dist", ".snakemake", ".hypothesis"}
CACHES = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")

#: Time limit of a test, seconds. After some mistakes, processes wait for each other forever.
LIMIT_S = 600.0

#: Marker expression of the tests of `make test`, which run before each change.
FAST = "not (slow or long or parallel or cluster or container)"


@dataclass(frozen=True)
class Mutation:
    """A mistake: the text `old`, which occurs once in `file`, is replaced by `new`."""

    name: str
    file: str  #: Path in the package, or path in the repository for rules of the workflow.
    old: str
    new: str
    test: str  #: Test that catches the mistake quickly: FILE::NAME in tests/, or FILE for a drawn mutation.
    options: tuple[str, ...] = ()  #: Further arguments of pytest.

    @property
    def path(self) -> str:
        """Path of the file in the repository."""
        return self.file if self.file.endswith(".smk") else f"{PACKAGE}/{self.file}"

    @property
    def node(self) -> str:
        """Test identifier for pytest."""
        return f"tests/{self.test}"

    def applied(self, text: str) -> str:
        """Return the file's text with the mistake."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"mutation {self.name}: {self.path} has {self.old!r} {count} times, expected once: the code changed; "
                "adapt the mutation in tests/mutate_code.py or tests/mutate_defects.py"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """Result of a mutation."""

    name: str
    caught: bool
    by: str  #: The test that failed (caught) or passed (survived), or the reason why no test ran to its end.
    seconds: float

    def line(self) -> str:
        """Return the result as a line of text."""
        return f"{self.name:34}  {'caught' if self.caught else 'SURVIVED':8}  {self.seconds:5.0f} s  {self.by}"


class Copy:
    """A copy of the repository for changing code and running tests."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(
            root,
            folder,
            symlinks=True,
            ignore=lambda place, names: {
                *CACHES(place, names),
                *(EXCLUDED_FOLDERS.intersection(names) if Path(place) == root else ()),
            },
        )
        self._environment = {
            **os.environ,
            # no cached bytecode, which could match another source with the same time and size
            "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(folder / "workflow_scripts"),
        }
        # The installed package belongs to the unchanged repository. Check that Python imports the copy.
        command = [sys.executable, "-c", "import dlscale; print(dlscale.__file__)"]
        found = subprocess.run(command, cwd=folder, env=self._environment, capture_output=True, text=True, check=True)
        assert Path(found.stdout.strip()).is_relative_to(folder), f"not the copy in {folder}: {found.stdout}"

    def test(self, nodes: Sequence[str], **environment: str) -> tuple[int | None, str]:
        """Run tests until the first failure; return pytest's exit status (None after a timeout) and pytest's output."""
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={self._folder}-tmp", "--rootdir=."]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "-c", "pyproject.toml", *nodes],
            cwd=self._folder,
            env={**self._environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=LIMIT_S * len(nodes))
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kill the processes that the tests started
            process.wait()
        return process.returncode, said

    def look(self, mutation: Mutation) -> Outcome:
        """Apply the mutation, run its test and restore the file."""
        start, file = time.perf_counter(), self._folder / mutation.path
        text, times = file.read_text(), file.stat()
        try:
            file.write_text(mutation.applied(text))
            # Python identifies compiled code by size and time, so compiled code of the mistake must not be kept.
            status, said = self.test([mutation.node, *mutation.options], PYTHONDONTWRITEBYTECODE="1")
        finally:
            file.write_text(text)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?([^\s[]+)", said, re.MULTILINE)
        by = failed[1] if failed else f"status {status}" if status is not None else f"no end within {LIMIT_S:.0f} s"
        if caught := status not in (0, 2, 3, 4, 5):
            return Outcome(mutation.name, caught, by, time.perf_counter() - start)
        words = mutation.test if status == 0 else f"no test ran:\n{said[-3000:]}"
        return Outcome(mutation.name, caught, words, time.perf_counter() - start)


def run(
    root: Path, mutations: Sequence[Mutation], jobs: int, show: Callable[[str], object] = print
) -> list[Outcome] | None:
    """Return the outcome of each mutation; None if a test fails in unchanged code.

    Tests of drawn mutations run in unchanged code at the end, and only if they caught a mutation.
    """
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def look(mutation: Mutation) -> Outcome:
        copy = copies.get()
        try:
            return copy.look(mutation)
        finally:
            copies.put(copy)

    outcomes = []
    with tempfile.TemporaryDirectory(prefix="dlscale-mutations-") as folder, ThreadPoolExecutor(jobs) as pool:
        made = [Copy(root, Path(folder).resolve() / f"{number}") for number in range(jobs)]

        def pass_unchanged(nodes: Iterable[str]) -> bool:
            tests = list(dict.fromkeys(nodes))
            parts = [(copy, part) for number, copy in enumerate(made) if (part := tests[number::jobs])]
            for status, said in pool.map(lambda each: each[0].test(each[1]), parts):
                if status != 0:
                    show(f"{said}\nthe tests fail without a mutation (status {status}); repair them first")
                    return False
            return True

        if not pass_unchanged(mutation.node for mutation in mutations if not mutation.options):
            return None
        for copy in made:
            copies.put(copy)
        for outcome in pool.map(look, mutations):
            show(outcome.line())
            outcomes.append(outcome)
        drawn = [each for each, mutation in zip(outcomes, mutations, strict=True) if mutation.options and each.caught]
        return outcomes if pass_unchanged(f"tests/{each.by}" for each in drawn if "::" in each.by) else None


def chosen(patterns: Iterable[str]) -> list[Mutation]:
    """Return the mutations that match the given names or patterns; without patterns, return all mutations."""
    wanted = list(patterns) or ["*"]
    for pattern in wanted:
        if not fnmatch.filter((mutation.name for mutation in MUTATIONS), pattern):
            raise SystemExit(f"{pattern}: no mutation has this name")
    return [each for each in MUTATIONS if any(fnmatch.fnmatch(each.name, pattern) for pattern in wanted)]


#: Operators and functions, each with its replacement in drawn mutations.
SWAPS: dict[Any, Any] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{"min": "max", "max": "min", "any": "all", "all": "any"},
}


def mutated(part: ast.AST) -> Iterator[str]:
    """Yield the source of a statement or an expression with each possible mistake."""
    if isinstance(part, ast.Raise | ast.AugAssign | ast.Expr):
        yield "pass"
    if isinstance(part, ast.Return) and part.value is not None:
        yield "return None"
    for number in range(len(list(ast.walk(part)))):
        twin = copy.deepcopy(part)
        match list(ast.walk(twin))[number]:
            case ast.Compare() as node if type(node.ops[0]) in SWAPS:
                node.ops = [SWAPS[type(node.ops[0])](), *node.ops[1:]]
            case ast.BinOp() | ast.BoolOp() | ast.AugAssign() as node if type(node.op) in SWAPS:
                node.op = SWAPS[type(node.op)]()
            case ast.Name(id=name) as node if name in SWAPS:
                node.id = SWAPS[name]
            case ast.Constant(value=bool() | int() | float()) as node:
                node.value = not node.value if isinstance(node.value, bool) else node.value + 1
            case ast.IfExp() as node:
                node.body, node.orelse = node.orelse, node.body
            case _:
                continue
        yield ast.unparse(twin)


def draw(paths: Iterable[str], count: int, seed: int) -> list[Mutation]:
    """Return random mutations of modules in the package; each statement that has mutations is equally likely.

    Statements whose value is a constant are left out. In `if` and `while`, only the condition is mutated.
    """
    found, choose, folder = list[Mutation](), random.Random(seed), ROOT / PACKAGE
    files = sorted({file for path in paths for file in [*folder.glob(path), *folder.glob(f"{path}/**/*.py")]})
    places = [
        (file, node)
        for file in files
        if file.suffix == ".py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.stmt) and not isinstance(getattr(node, "value", None), ast.Constant)
    ]
    # Most tests in folders need a cluster, a container engine or a complete workflow.
    tests = sorted((ROOT / "tests").glob("test_*.py"), key=lambda test: len(changed.reached(test)))
    for file, node in choose.sample(places, len(places)):
        part: Any = node if not hasattr(node, "body") else getattr(node, "test", None)
        choices = [] if part is None else [*mutated(part), *([] if part is node else [f"not ({ast.unparse(part)})"])]
        if part is None or not choices or len(found) == count:
            continue
        text, new = file.read_bytes(), choose.choice(choices)
        starts = [0, *(match.end() for match in re.finditer(rb"\n", text))]
        first, last = starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset
        name = f"{file.relative_to(folder)}:{part.lineno}: {ast.unparse(part)} -> {new}"
        module = ".".join(file.relative_to(folder.parent).with_suffix("").parts)
        users = next(
            users
            for used in (file, file.parent / "__init__.py", file.parents[1] / "__init__.py")
            if (users := [test for test in tests if used in changed.reached(test)])
        )
        users.sort(key=lambda test: module not in changed._imported(test))
        test, *more = [str(test.relative_to(ROOT)) for test in users[:3]]
        result = (text[:first] + new.encode() + text[last:]).decode()
        options = (*more, "-m", FAST)
        found.append(
            Mutation(name, str(file.relative_to(folder)), text.decode(), result, test.removeprefix("tests/"), options)
        )
    return found


def main() -> int:
    """Print a line per mutation; return 1 if a mutation survived, 2 if the tests fail in unchanged code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", metavar="NAME", help="mutations, by name or pattern (default: all)")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="copies in parallel")
    arguments.add_argument("--draw", type=int, metavar="N", help="draw N mutations of the modules and folders NAME")
    arguments.add_argument("--seed", type=int, default=0, help="seed of the drawn mutations (default: 0)")
    args = arguments.parse_args()
    start = time.perf_counter()
    mutations = draw(args.names, args.draw, args.seed) if args.draw else chosen(args.names)
    jobs = max(1, min(args.jobs, len(mutations)))
    outcomes = run(ROOT, mutations, jobs, lambda text: print(text, flush=True))
    if outcomes is None:
        return 2
    caught = sum(outcome.caught for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} caught in {time.perf_counter() - start:.0f} s")
    return int(caught < len(outcomes))


MUTATIONS = [
    # ---- config ----------------------------------------------------------------------------------
    Mutation(
        "compute_without_precision",
        "config/compute.py",
        '"optimizer", "precision", "compile"),',
        '"optimizer", "compile"),',
        "test_jobs.py::test_settings_of_computing_repeat_all_stages",
    ),
    Mutation(
        "scaling_weak_for_strong",
        "config/blocks.py",
        '"local_batch_size" if weak else "batch_size": batch,',
        '"batch_size" if weak else "local_batch_size": batch,',
        "test_scaling.py::test_weak_scaling_keeps_each_devices_batch",
    ),
    Mutation(
        "scaling_nodes_of_all_devices",
        "config/blocks.py",
        '"gpus_per_node": count // nodes}',
        '"gpus_per_node": count}',
        "test_scaling.py::test_strong_scaling_keeps_the_batch_of_all",
    ),
    Mutation(
        "sweep_rung_of_all_trials",
        "config/blocks.py",
        "for times, size in zip(reversed(longer), sizes, strict=False)",
        "for times, size in zip(reversed(longer), [trials, *sizes], strict=False)",
        "test_sweep.py::test_rungs",
    ),
    # ---- core ------------------------------------------------------------------------------------
    Mutation(
        "fingerprint_without_samples",
        "core/fingerprint.py",
        "registry.studies()[study].module, samples, ",
        "registry.studies()[study].module, ",
        "test_architecture.py::test_a_run_imports_only_the_modules_of_one_study",
    ),
    Mutation(
        "fingerprint_without_files",
        "core/fingerprint.py",
        "table[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()",
        'table[file.name] = ""',
        "test_architecture.py::test_the_digest_depends_only_on_content",
    ),
    Mutation(
        "fingerprint_by_names_alone",
        "core/fingerprint.py",
        "json.dumps(digests, sort_keys=True)",
        "json.dumps(sorted(digests.values()))",
        "test_architecture.py::test_two_modules_that_swap_their_contents_are_seen",
    ),
    Mutation(
        "lock_that_is_shared",
        "core/process.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "test_board.py::test_a_folder_has_one_writer",
    ),
    Mutation(
        "link_followed",
        "core/files.py",
        "flags | os.O_NOFOLLOW",
        "flags",
        "test_board.py::test_a_lock_is_a_file",
    ),
    Mutation(
        "secret_shown",
        "core/urls.py",
        "'***' if LOGINS.fullmatch(key)",
        "value if LOGINS.fullmatch(key)",
        "test_download.py::test_hidden",
    ),
    Mutation(
        "login_shown",
        "core/urls.py",
        'netloc=parts.netloc.rpartition("@")[2], query',
        "query",
        "test_download.py::test_hidden",
    ),
    Mutation(
        "interval_without_its_factor",
        "core/noise.py",
        "return centre, standard_errors(len(kept)) * error",
        "return centre, error",
        "test_speedup.py::test_few_values_use_students_t",
    ),
    Mutation(
        "energy_is_power",
        "core/telemetry.py",
        "(used * sample.seconds, 0.0)",
        "(used, 0.0)",
        "test_telemetry.py::test_energy_is_the_integral_of_power",
    ),
    Mutation(
        "better_is_worse",
        "core/metrics.py",
        'sign = 1 if self.better == "lower" else -1',
        'sign = -1 if self.better == "lower" else 1',
        "test_knobs.py::test_better_is_lower_or_higher",
    ),
    Mutation(
        "size_in_kib",
        "core/text.py",
        "bytes_ /= 1000",
        "bytes_ /= 1024",
        "test_report.py::test_units_times_and_sizes",
    ),
    # ---- data ------------------------------------------------------------------------------------
    Mutation(
        "order_same_each_epoch",
        "data/sampling.py",
        'np.random.SeedSequence([seed, epoch, *b"order"])',
        'np.random.SeedSequence([seed, *b"order"])',
        "test_samples.py::test_order_is_a_permutation",
    ),
    Mutation(
        "seed_without_effect",
        "data/sampling.py",
        "np.random.SeedSequence([seed, epoch, *stream.encode()])",
        "np.random.SeedSequence([epoch, *stream.encode()])",
        "test_samples.py::test_seeds_epochs_and_streams_are_independent",
    ),
    Mutation(
        "last_batch_dropped",
        "data/loaders/base.py",
        "return -(-samples // self.batch_size)",
        "return samples // self.batch_size",
        "test_samples.py::test_slices_of_ranks_cover_every_batch_evenly",
    ),
    Mutation(
        "shares_overlap",
        "data/loaders/base.py",
        "first + count * (self.rank + 1) // self.size)",
        "first + count * (self.rank + 1) // self.size + (self.rank + 1 < self.size))",
        "test_samples.py::test_slices_of_ranks_cover_every_batch_evenly",
    ),
    Mutation(
        "ranks_weigh_the_same",
        "data/loaders/base.py",
        "return len(self.indices(step, samples)) * self.size / self.count(step, samples)",
        "return 1.0",
        "test_loaders.py::test_weighted_means_of_ranks_are_that_of_the_batch",
    ),
    Mutation(
        "prefetched_last_first",
        "data/loaders/direct_loader.py",
        "self._deliver(*ahead.popleft().result())",
        "self._deliver(*ahead.pop().result())",
        "test_samples.py::test_direct_delivers_rows_bit_for_bit",
    ),
    Mutation(
        "loader_begins_anew",
        "data/loaders/torch_loader.py",
        "for step in range(start, len(self))]",
        "for step in range(len(self))]",
        "test_samples.py::test_workers_resume_and_abandoned_epochs_do_not_change_samples",
    ),
    Mutation(
        "own_collate_ignored",
        "data/loaders/base.py",
        "(samples.collate or stack)(read)",
        "stack(read)",
        "test_trees.py::test_sequences_are_padded_by_the_study[0]",
    ),
    Mutation(
        "tuples_become_lists",
        "data/loaders/torch_loader.py",
        "return _Sent(read_batch(self.samples, *key))",
        "return _Sent([*read_batch(self.samples, *key)])",
        "test_loaders.py::test_every_loader_serves_every_study[starter_ocean-torch]",
    ),
    Mutation(
        "graph_keeps_other_tensors",
        "train/step.py",
        "zip(memory, given, strict=True)",
        "zip(memory[:1], given[:1], strict=True)",
        "test_trees.py::test_graphs_replay_on_the_tensors_of_dicts",
    ),
    Mutation(
        "parts_of_another_target",
        "train/step.py",
        "leaves, tree = tree_flatten((x, y))",
        "leaves, tree = tree_flatten((x, tree_map(torch.Tensor.flipud, y)))",
        "test_trees.py::test_dicts_train_as_on_the_plain_path[{'accumulation_steps': 3}]",
    ),
    Mutation(
        "clock_of_other_samples",
        "extensions/era5_vit/era5/informed.py",
        "numbers[indices.start : indices.stop]",
        "numbers[: len(indices)]",
        "test_loaders.py::test_every_loader_adds_history_and_time",
    ),
    Mutation(
        "transform_sign",
        "data/manifest.py",
        "y = x * self.scale + self.offset",
        "y = x * self.scale - self.offset",
        "test_data.py::test_transforms_invert",
    ),
    Mutation(
        "downsampled_by_sum",
        "data/source.py",
        "np.float32(1.0 / factor ** len(axes))",
        "np.float32(1.0)",
        "test_data.py::test_block_average_equals_a_slow_loop",
    ),
    Mutation(
        "moments_without_their_distance",
        "data/store.py",
        "self.m2 + other.m2 + np.square(delta) * (self.count * other.count / count)",
        "self.m2 + other.m2",
        "test_data.py::test_merged_moments_equal_moments_of_all_values",
    ),
    Mutation(
        "std_of_n_less_1",
        "data/store.py",
        "np.sqrt(self.m2 / max(self.count, 1))",
        "np.sqrt(self.m2 / max(self.count - 1, 1))",
        "test_data.py::test_merged_moments_equal_moments_of_all_values",
    ),
    Mutation(
        "normalised_by_the_factor",
        "data/samples.py",
        "numbers = mean, 1 / std, 0 * mean",
        "numbers = mean, std, 0 * mean",
        "test_samples.py::test_pairs_differ_by_dt_within_a_file_and_are_standardised",
    ),
    Mutation(
        "changed_data_not_read_again",
        "data/staging.py",
        "record.get(file.path) != _seen(manifest, file)]",
        "file.path not in record]",
        "test_staging.py::test_files_are_verified_once",
    ),
    Mutation(
        "manifest_without_its_seal",
        "data/manifest.py",
        "if manifest.own != manifest.sealed().own:",
        "if not manifest.own:",
        "test_staging.py::test_a_number_that_was_changed_in_a_manifest_is_refused",
    ),
    Mutation(
        "resumed_one_byte_late",
        "data/acquire.py",
        'f"bytes={offset}-"',
        'f"bytes={offset + 1}-"',
        "test_download.py::test_an_interrupted_download_resumes_at_the_exact_byte",
    ),
    Mutation(
        "stale_copy",
        "data/staging.py",
        "if not target.is_file() or stamp(target) != stamp(source)",
        "if not target.is_file()",
        "test_staging.py::test_a_damaged_copy_heals",
    ),
    # ---- datasets --------------------------------------------------------------------------------
    Mutation(
        "vector_not_reflected",
        "extensions/cosmo_unet/cosmo/samples.py",
        "components[symmetry.axes[axis]], symmetry.flips[axis]",
        "components[symmetry.axes[axis]], False",
        "test_samples.py::test_vectors_turn_with_the_grid",
    ),
    Mutation(
        "reflection_missing",
        "extensions/cosmo_unet/cosmo/samples.py",
        '"full": SYMMETRIES,',
        '"full": SYMMETRIES[:47],',
        "test_samples.py::test_all_symmetries_of_a_setting_are_equally_likely",
    ),
    Mutation(
        "last_crop_missing",
        "extensions/cosmo_unet/cosmo/samples.py",
        "self._offsets = edges - self.crop + 1",
        "self._offsets = edges - self.crop",
        "test_samples.py::test_every_offset_of_every_volume_is_equally_likely",
    ),
    Mutation(
        "split_without_its_gap",
        "data/kind.py",
        "(gap if low > 0 else 0)",
        "0",
        "test_data.py::test_fractions_are_disjoint_volumes",
    ),
    Mutation(
        "pairs_one_step_apart",
        "extensions/era5_vit/era5/samples.py",
        "for time in (row - self._back, row + self._dt))",
        "for time in (row - self._back, row + 1))",
        "test_samples.py::test_pairs_differ_by_dt_within_a_file_and_are_standardised",
    ),
    Mutation(
        "last_pair_missing",
        "extensions/era5_vit/era5/samples.py",
        "pairs = max(file.rows - self._dt, 0)",
        "pairs = max(file.rows - self._dt - 1, 0)",
        "test_data.py::test_every_pair_is_used_once_an_epoch_whatever_the_files_lengths",
    ),
    Mutation(
        "no_leap_years",
        "extensions/era5_vit/era5/simulator.py",
        "days = min(365 + calendar.isleap(year), days or 366)",
        "days = min(365, days or 366)",
        "test_era5_simulator.py::test_a_year_has_the_right_number_of_days",
    ),
    Mutation(
        "no_leap_year_in_the_outline",
        "extensions/era5_vit/era5/kind.py",
        "whole = 365 + calendar.isleap(year)",
        "whole = 365",
        "test_cost.py::test_an_outline_has_the_days_of_leap_years",
    ),
    Mutation(
        "humidity_over_water_alone",
        "extensions/era5_vit/era5/source.py",
        "share * water + (1.0 - share) * ice",
        "water",
        "test_era5_arco.py::test_relative_humidity_is_that_of_the_ifs",
    ),
    Mutation(
        "image_not_mirrored",
        "extensions/imagenet_resnet50/imagenet/samples.py",
        "bool(chosen.flip[number])",
        "False",
        "test_imagenet.py::test_training_samples_are_resized_crops",
    ),
    Mutation(
        "last_image_crop_missing",
        "extensions/imagenet_resnet50/imagenet/samples.py",
        "edge_N - crops_N4[:, 2 + axis] + 1)",
        "edge_N - crops_N4[:, 2 + axis])",
        "test_imagenet.py::test_random_crops_are_torchvisions",
    ),
    Mutation(
        "image_rounded_up",
        "extensions/imagenet_resnet50/imagenet/pack.py",
        "return (edge, int(edge * width / height))",
        "return (edge, -(-edge * width // height))",
        "test_imagenet.py::test_validation_samples_are_the_middle",
    ),
    # ---- launch ----------------------------------------------------------------------------------
    Mutation(
        "slurm_tasks_of_all_nodes",
        "launch/slurm.py",
        '"tasks_per_node": processes.gpus_per_node}',
        '"tasks_per_node": processes.world_size}',
        "test_launcher.py::test_the_request_of_a_run_on_nodes",
    ),
    Mutation(
        "warning_to_the_batch_shell",
        "launch/slurm.py",
        'f"--signal=USR2@',
        'f"--signal=B:USR2@',
        "test_launcher.py::test_the_request_of_a_run_on_one_gpu",
    ),
    Mutation(
        "killed_process_of_another_status",
        "launch/ranks.py",
        "failed[0] if failed[0] > 0 else 128 - failed[0]",
        "failed[0] if failed[0] > 0 else 128 + failed[0]",
        "test_starters.py::test_torchrun_ends_with_the_message_of_a_process",
    ),
    Mutation(
        "data_may_be_written",
        "launch/launcher.py",
        '*(f"--volume={path}:{path}:ro" for',
        '*(f"--volume={path}:{path}" for',
        "test_launcher.py::test_engines_that_run",
    ),
    # ---- measure ---------------------------------------------------------------------------------
    Mutation(
        "flops_halved",
        "measure/roofline.py",
        "backward_flops=2 * forward,",
        "backward_flops=forward,",
        "test_counting.py::test_the_stage_records_mfu_and_mbu",
    ),
    Mutation(
        "work_of_functions_between_modules",
        "extensions/profile/operators.py",
        "{None, *(tensor.grad_fn for tensor in tensors_in(args))}",
        "{None}",
        "test_counting.py::test_functions_between_parts_are_the_modules_own",
    ),
    Mutation(
        "rate_of_one_rank",
        "measure/throughput.py",
        "rates.append(sum(world.gather(count if world.lead else 0)) / seconds)",
        "rates.append(count / seconds)",
        "test_throughput.py::test_each_rank_counts_only_local_samples",
    ),
    Mutation(
        "std_of_a_population",
        "measure/throughput.py",
        "std=statistics.stdev(rates) if",
        "std=statistics.pstdev(rates) if",
        "test_throughput.py::test_the_numbers_count_the_samples_that_were_processed",
    ),
    Mutation(
        "device_not_waited_for",
        "measure/turns.py",
        "    synchronize(device)\n    seconds = time.perf_counter() - start\n",
        "    seconds = time.perf_counter() - start\n",
        "test_throughput.py::test_a_trial_waits_for_the_device_at_both_ends",
    ),
    Mutation(
        "halving_keeps_the_slowest",
        "extensions/tune/tune.py",
        "key=lambda number: -statistics.geometric_mean(rates[number])",
        "key=lambda number: statistics.geometric_mean(rates[number])",
        "test_tune.py::test_without_noise_halving_equals_exhaustive_search",
    ),
    Mutation(
        "turns_in_one_order",
        "measure/turns.py",
        "for turn in (order, order[::-1]):",
        "for turn in (order, order):",
        "test_throughput.py::test_each_run_goes_first_equally_often",
    ),
    Mutation(
        "ring_sends_all",
        "extensions/predict/model.py",
        "around = sweeps * (count - 1) / count * size",
        "around = sweeps * size",
        "test_scaling_model.py::test_the_time_of_a_ring_equals_simulated_messages",
    ),
    # ---- models ----------------------------------------------------------------------------------
    Mutation(
        "relative_l2_without_root",
        "extensions/era5_vit/scores.py",
        "return difference / torch.linalg.vector_norm(target_BC, dim=rest)",
        "return difference.square() / torch.linalg.vector_norm(target_BC, dim=rest).square()",
        "test_losses_metrics.py::test_relative_l2_is_each_samples_ratio",
    ),
    Mutation(
        "attention_drops_in_evaluation",
        "extensions/era5_vit/model.py",
        "F.scaled_dot_product_attention(q_BANK, k_BANK, v_BANK)",
        "F.scaled_dot_product_attention(q_BANK, k_BANK, v_BANK, dropout_p=0.1)",
        "test_models.py::test_dropouts_act_in_training_and_are_off_in_evaluation",
    ),
    Mutation(
        "latitudes_in_radians",
        "extensions/era5_vit/scores.py",
        "torch.cos(torch.deg2rad(latitude))",
        "torch.cos(latitude)",
        "test_losses_metrics.py::test_latitude_weights_are_cosines_with_mean_one",
    ),
    Mutation(
        "metrics_by_batch",
        "train/validation.py",
        "self._count += len(next(iter(values.values()), ()))",
        "self._count += 1",
        "test_losses_metrics.py::test_sums_over_batches_are_those_over_all_at_once",
    ),
    Mutation(
        "skill_turned_round",
        "studies/scores.py",
        "1 - error / naive, torch.nan)",
        "1 - naive / error, torch.nan)",
        "test_losses_metrics.py::test_cosmo_metrics_are_plain_numpy_in_physical_units",
    ),
    Mutation(
        "image_not_normalised",
        "extensions/imagenet_resnet50/model.py",
        "x_BCHW = (x_BCHW - self.mean) / self.std",
        "x_BCHW = x_BCHW / self.std",
        "test_models.py::test_logits_are_those_of_the_layers_one_by_one",
    ),
    # ---- parallel --------------------------------------------------------------------------------
    Mutation(
        "gradients_not_averaged",
        "parallel/strategy.py",
        "return Replicated(world, parallel) if copies > 1 and parallel.sync else Strategy(world)",
        "return Strategy(world)",
        "test_ddp.py::test_two_ranks_learn_like_one_process",
    ),
    Mutation(
        "batch_norm_of_one_rank",
        "parallel/strategy.py",
        "variance = all_reduce(centred.square().sum(axes)) / count",
        "variance = centred.square().sum(axes) / here",
        "test_ddp.py::test_ranks_normalise_like_one_process",
    ),
    Mutation(
        "batch_norm_gradient_of_one_rank",
        "parallel/strategy.py",
        "variance = all_reduce(centred.square().sum(axes)) / count",
        "squares = centred.square().sum(axes)\n"
        "        variance = (all_reduce(squares.detach()) + squares - squares.detach()) / count",
        "test_ddp.py::test_ranks_normalise_like_one_process",
    ),
    Mutation(
        "running_variance_with_n",
        "parallel/strategy.py",
        "variance.detach() * count / (count - 1).clamp(min=1)",
        "variance.detach()",
        "test_ddp.py::test_ranks_normalise_like_one_process",
    ),
    Mutation(
        "tensor_parallel_counts_twice",
        "parallel/model.py",
        'self.loss_weight = 1.0 / mesh.size("tp")',
        "self.loss_weight = 1.0",
        "test_parallel.py::test_several_train_as_one_does[tensor parallel]",
    ),
    Mutation(
        "context_without_the_others",
        "parallel/model.py",
        "k, v = (_gathered(x, self._cp, TOKENS_OF_HEADS, Partial()) for x in (k, v))",
        "k, v = (torch.cat([x] * self._cp.size(), TOKENS_OF_HEADS) for x in (k, v))",
        "test_mesh.py::test_each_strategy_learns_like_one_process[2 cp]",
    ),
    Mutation(
        "loss_of_one_rank",
        "parallel/world.py",
        "        if self.data_size > 1:\n            dist.all_reduce(values,",
        "        if self.data_size > 2:\n            dist.all_reduce(values,",
        "test_parallel.py::test_several_train_as_one_does[sharded]",
    ),
    # ---- preflight -------------------------------------------------------------------------------
    Mutation(
        "cost_without_nodes",
        "preflight/cost.py",
        'node_hours = hours * asked["nodes"] * slurm.part(',
        "node_hours = hours * slurm.part(",
        "test_cost.py::test_nodes",
    ),
    Mutation(
        "time_limit_below_the_estimate",
        "preflight/cost.py",
        "math.ceil(1.5 * seconds / 60) + 10",
        "math.ceil(seconds / 90) + 10",
        "test_cost.py::test_minutes",
    ),
    Mutation(
        "published_rate_of_all_devices",
        "preflight/cost.py",
        "figure.speed / figure.gpus for figure",
        "figure.speed for figure",
        "test_cost.py::test_a_published_figure_of_several_devices_counts_once",
    ),
    Mutation(
        "planned_hours_of_one_node",
        "extensions/predict/predict.py",
        "node_hours=None if total is None else nodes * total / 3600",
        "node_hours=None if total is None else total / 3600",
        "test_scaling_model.py::test_an_hour_of_a_node_and_a_gigabyte",
    ),
    # ---- report ----------------------------------------------------------------------------------
    Mutation(
        "compared_the_wrong_way",
        "extensions/compare/compare.py",
        "over(after, before, looks=looks)",
        "over(before, after, looks=looks)",
        "test_compare.py::test_two_results_are_compared_run_by_run",
    ),
    Mutation(
        "gate_never_fails",
        "extensions/compare/compare.py",
        "    return 1 if args.gate and slower else 0\n\n\ndef _print",
        "    return 0\n\n\ndef _print",
        "test_compare.py::test_slower_runs_are_named",
    ),
    Mutation(
        "gate_of_gains",
        "extensions/compare/compare.py",
        "found.high < 1 for found",
        "found.low > 1 for found",
        "test_compare.py::test_slower_runs_are_named",
    ),
    Mutation(
        "mean_for_median",
        "results.py",
        "return statistics.median(speeds[1:] or speeds)",
        "return statistics.fmean(speeds[1:] or speeds)",
        "test_report.py::test_times_are_of_one_loader",
    ),
    Mutation(
        "worst_is_first",
        "results.py",
        'value if better == "lower" else -value)',
        '-value if better == "lower" else value)',
        "test_sweep.py::test_a_trial_that_ends_early_at_a_target_is_ranked",
    ),
    Mutation(
        "worst_promoted",
        "extensions/tune/promote.py",
        "best = [run.name for run in ranked if",
        "best = [run.name for run in reversed(ranked) if",
        "test_sweep.py::test_the_best_trials_continue_and_the_page_shows_all",
    ),
    Mutation(
        "figure_of_another_loss",
        "report/curves.py",
        'curve(run, "validation", lambda epoch: epoch.valid_loss)',
        'curve(run, "validation", lambda epoch: epoch.train_loss)',
        "test_report.py::test_curves_are_where_the_numbers_are",
    ),
    Mutation(
        "milliseconds_are_seconds",
        "extensions/profile/section.py",
        "scale = 1e3 / ((each.samples or 1) if sample else 1)",
        "scale = 1.0 / ((each.samples or 1) if sample else 1)",
        "test_report.py::test_a_step_is_drawn_part_by_part",
    ),
    Mutation(
        "communication_turned_round",
        "report/speedup.py",
        "ratio = together.mean / apart.mean",
        "ratio = apart.mean / together.mean",
        "test_scaling.py::test_efficiency_and_communication_equal_values_by_hand",
    ),
    Mutation(
        "pooled_with_n",
        "core/noise.py",
        "freedom = sum(len(group) - 1 for group in groups)",
        "freedom = sum(len(group) for group in groups)",
        "test_speedup.py::test_the_pooled_spread_is_that_within_groups",
    ),
    # ---- studies ---------------------------------------------------------------------------------
    Mutation(
        "flops_doubled",
        "extensions/mnist_cnn/study.py",
        "return 2.0 * (convolutions +",
        "return 4.0 * (convolutions +",
        "test_counting.py::test_each_studys_formula_equals_the_counted_forward_pass",
    ),
    Mutation(
        "rmse_of_mean_roots",
        "extensions/era5_vit/study.py",
        'rmse = means["square"].sqrt() * self.scale',
        'rmse = means["root"] * self.scale',
        "test_losses_metrics.py::test_era5_metrics_are_plain_numpy_in_physical_units[1]",
    ),
    Mutation(
        "top5_is_top1",
        "extensions/imagenet_resnet50/study.py",
        "(answer[:, :count] == y[:, None])",
        "(answer[:, :1] == y[:, None])",
        "test_imagenet.py::test_metrics_are_fractions_of_correct_answers",
    ),
    # ---- train -----------------------------------------------------------------------------------
    Mutation(
        "schedule_one_step_ahead",
        "train/trainer.py",
        "set_learning_rate(self.step.optimizer, self.rate(number))",
        "set_learning_rate(self.step.optimizer, self.rate(number + 1))",
        "test_training.py::test_the_unet_trains_like_a_plain_loop[two epochs]",
    ),
    Mutation(
        "schedule_warmup_from_zero",
        "train/trainer.py",
        "return peak * (step + 1) / warmup",
        "return peak * step / warmup",
        "test_schedule.py::test_each_form_after_each_warm_up_is_pytorchs",
    ),
    Mutation(
        "schedule_linear_for_sqrt",
        "train/trainer.py",
        'ratio if schedule.scaling == "linear" else math.sqrt(ratio)',
        'ratio if schedule.scaling == "sqrt" else math.sqrt(ratio)',
        "test_schedule.py::test_scaling_with_the_batch",
    ),
    Mutation(
        "weight_decay_left_out",
        "train/build.py",
        'exclude={"kind", "lr", "fused", "clip_norm"}',
        'exclude={"kind", "lr", "fused", "clip_norm", "weight_decay"}',
        "test_rungs.py::test_the_optimiser_is_pytorchs_own",
    ),
    Mutation(
        "clipped_before_unscaling",
        "train/step.py",
        "                self.scaler.unscale_(self.optimizer)\n",
        "",
        "test_rungs.py::test_a_scaled_gradient_is_clipped_after_unscaling",
    ),
    Mutation(
        "parts_count_the_same",
        "train/step.py",
        "samples_in(a) / max(samples, 1), weight,",
        "1 / parts, weight,",
        "test_rungs.py::test_each_rung_trains_like_the_plain_step[era5_vit-accumulation 4]",
    ),
    Mutation(
        "prediction_in_training_mode",
        "train/step.py",
        "            self.model.eval()\n",
        "            pass\n",
        "test_training.py::test_validation_runs_without_drop_out",
    ),
    Mutation(
        "optimiser_not_restored",
        "train/step.py",
        "                shard.tensor.copy_(shards[name].tensor)",
        '                if name.startswith("model."):\n                    shard.tensor.copy_(shards[name].tensor)',
        "test_rungs.py::test_a_restored_step_continues_bit_by_bit[bf16_master-fused-era5_vit]",
    ),
    Mutation(
        "random_state_not_restored",
        "train/trainer.py",
        "        self._set_random(state)\n",
        "",
        "test_training.py::test_a_killed_run_resumes_bit_by_bit[2 workers]",
    ),
    Mutation(
        "resumed_at_the_epochs_first_step",
        "train/trainer.py",
        "first = max(before.step - done, 0)",
        "first = 0",
        "test_interruption.py::test_a_training_continues_bit_by_bit_with_another_loader",
    ),
    Mutation(
        "statistics_of_each_rank",
        "train/validation.py",
        "    world.broadcast(step.model.buffers())\n",
        "",
        "test_ddp.py::test_processes_validate_with_the_same_statistics",
    ),
    Mutation(
        "damaged_checkpoint_taken",
        "train/checkpoint.py",
        "if sha256(path / Path(name).name) != digest:",
        "if not (path / Path(name).name).exists():",
        "test_training.py::test_a_damaged_checkpoint_falls_back_to_the_one_before[flipped]",
    ),
    Mutation(
        "checkpoint_of_other_settings_taken",
        "train/checkpoint.py",
        "if (record.run or self.folder.name, record.step) != (self.folder.name, step):",
        "if record.step != step:",
        "test_training.py::test_a_checkpoint_of_another_training_is_not_used",
    ),
    Mutation(
        "one_checkpoint_too_many",
        "train/checkpoint.py",
        "max(0, len(earlier) + 1 - self.keep)",
        "max(0, len(earlier) - self.keep)",
        "test_training.py::test_the_newest_are_kept",
    ),
    Mutation(
        "checkpoints_without_the_seed",
        "train/train.py",
        '    "threads": True,\n    "loader": True,',
        '    "threads": True,\n    "seed": True,\n    "loader": True,',
        "test_training.py::test_the_fingerprint_changes_only_with_settings_of_the_training",
    ),
    Mutation(
        "memory_without_gradients",
        "extensions/memory/prediction.py",
        "gradients=gradients + grown,",
        "gradients=gradients,",
        "test_memory.py::test_predicted_memory_equals_the_allocators_memory",
    ),
    # ---- rules -----------------------------------------------------------------------------------
    Mutation(
        "runs_ask_for_cpu_nodes",
        "rules/context.py",
        "geometry, processes = settings.geometry, settings.processes",
        "pass",
        "workflow/test_profiles.py::test_the_slurm_request_of_profiles",
    ),
    Mutation(
        "runs_start_one_process",
        "rules/runs.py",
        "return self.commands.start(input, run.processes, redact",
        "return self.commands.start(input, None, redact",
        "workflow/test_profiles.py::test_profiles_run_in_the_container_and_four_by_srun",
    ),
    # ---- user interface of a call -----------------------------------------------------------------
    Mutation(
        "live_page_is_the_whole_one",
        "report/report.py",
        'given | {"out": live}',
        "given",
        "test_report.py::test_a_live_page_shows_available_results",
    ),
    Mutation(
        "dataset_shown_before_it_is_drawn",
        "report/report.py",
        "if all(Path(path, name).exists()",
        "if any(Path(path, name).exists()",
        "test_report.py::test_a_live_page_shows_available_results",
    ),
    Mutation(
        "turns_count_all_before",
        "measure/turns.py",
        "    counts = list[int]()\n",
        "    counts = timed_steps.__dict__.setdefault('counts', list[int]())\n",
        "test_throughput.py::test_each_turn_counts_only_samples_of_the_turn",
    ),
    Mutation(
        "call_goes_on_unseen",
        "../snakemake_logger_plugin_dlscale/__init__.py",
        "                os.kill(os.getpid(), signal.SIGINT)",
        "                pass",
        "test_live.py::test_a_call_with_closed_output_ends",
    ),
    Mutation(
        "jobs_wait_for_each_other",
        "preflight/cost.py",
        "sum(job.seconds * share for",
        "sum(job.seconds for",
        "test_status.py::test_parallel_runs_take_the_time_of_one_run",
    ),
    Mutation(
        "trials_that_were_left_behind_wait",
        "preflight/status.py",
        "cost.expected_runs(configuration.plans[plan], results).items()",
        "configuration.plans[plan].items()",
        "test_status.py::test_only_trials_that_may_train_are_expected",
    ),
]


if __name__ == "__main__":
    sys.exit(main())
