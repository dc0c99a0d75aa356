"""Put the tutorials' defects back into the code, one at a time, and report whether their tests fail.

`python -m tests.mutate_defects` treats the rows of DEFECTS.md like `tests.mutate_code` treats other mistakes: each test
must pass in unchanged code and fail with the defect. Arguments select rows by name, as in `tests.mutate_code`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests import mutate_code
from tests.mutate_code import Mutation

TABLE = Path(__file__).with_name("DEFECTS.md")


def rows() -> dict[str, list[str]]:
    """Return the tests of each row, as FILE::NAME, by the text of the row's first cell."""
    found = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        tests, file = [], ""
        for here, name in re.findall(r"`([\w./]*)::(\w+)`", cells[-1]):
            file = here or file
            tests.append(f"{file}::{name}")
        if tests:
            found[cells[0]] = tests
    return found


#: Key: beginning of a defect's row in DEFECTS.md. Value: the defect's mutation, the name of a mutation in
#: `tests.mutate_code`, or the reason why the defect has no mutation.
DEFECTS: dict[str, Mutation | str] = {
    # ---- U-Net
    "DALI's flip takes the first of the box's three axes as the axis of frames": Mutation(
        "flips_of_all_axes",
        "extensions/cosmo_unet/cosmo/samples.py",
        "s.axes == (0, 1, 2) and not s.flips[0])",
        "s.axes == (0, 1, 2))",
        "published/test_curves.py::test_the_published_flips_equal_dalis_operator",
    ),
    "rotations are computed, then the flip is applied to the unrotated data": Mutation(
        "flip_of_the_unrotated",
        "extensions/cosmo_unet/cosmo/samples.py",
        "turned = turned[(slice(None), *steps)]",
        "turned = x_CDHW[(slice(None), *steps)]",
        "test_samples.py::test_apply_is_the_index_loop",
    ),
    "the grid is rotated without its vectors": Mutation(
        "vectors_not_turned",
        "extensions/cosmo_unet/cosmo/samples.py",
        "= components[symmetry.axes[axis]], symmetry.flips[axis]",
        "= components[axis], False",
        "test_samples.py::test_vectors_turn_with_the_grid",
    ),
    "of the 24 «rotations», 8": Mutation(
        "reflections_among_rotations",
        "extensions/cosmo_unet/cosmo/samples.py",
        "key=lambda s: (-s.determinant, s.axes, s.flips)",
        "key=lambda s: (s.axes, s.flips)",
        "test_samples.py::test_the_symmetries_are_the_group_of_the_cube",
    ),
    "every rank, in training and validation, is seeded with 12345": "shares_overlap",
    "the last crop offset is excluded": Mutation(
        "last_offset_excluded",
        "extensions/cosmo_unet/cosmo/samples.py",
        "self._offsets = edges - self.crop + 1",
        "self._offsets = edges - self.crop",
        "test_samples.py::test_every_offset_of_every_volume_is_equally_likely",
    ),
    "validation on random, augmented crops": Mutation(
        "validation_at_random",
        "extensions/cosmo_unet/cosmo/samples.py",
        "        if self._training:\n            table",
        "        if True:\n            table",
        "test_samples.py::test_validation_crops_are_fixed_disjoint_and_not_turned",
    ),
    "no seeds, no `set_epoch`, colliding worker seeds": Mutation(
        "epochs_all_the_same",
        "extensions/cosmo_unet/cosmo/samples.py",
        'sampling.words(self._seed, epoch, "crops", self.size)',
        'sampling.words(self._seed, 0, "crops", self.size)',
        "test_samples.py::test_a_sample_depends_on_seed_epoch_and_index_alone",
    ),
    "`--enable_jit` compiles nothing": Mutation(
        "model_not_compiled",
        "train/step.py",
        "self._loss_of = compiled(self.strategy.wrapped, mode, self.device)",
        'self._loss_of = compiled(self.strategy.wrapped, "none", self.device)',
        "test_models.py::test_a_compiled_step_is_the_eager_one",
    ),
    "command-line defaults overwrite": Mutation(
        "later_layers_lose",
        "config/resolve.py",
        "        if not isinstance(value, Mapping):\n            base[key] = copy.deepcopy(value)",
        "        if not isinstance(value, Mapping):\n            base.setdefault(key, copy.deepcopy(value))",
        "test_config.py::test_later_layers_win_and_the_rest_stays",
    ),
    "timing starts after two fetched batches": Mutation(
        "two_batches_fetched_before",
        "measure/turns.py",
        "    start = time.perf_counter()\n    run_steps(consume",
        "    next(batches), next(batches)\n    start = time.perf_counter()\n    run_steps(consume",
        "test_throughput.py::test_the_wait_for_data_counts",
    ),
    "`.item()` in every step": Mutation(
        "item_in_every_step",
        "train/trainer.py",
        "alone = means[0] if means.dim() else means",
        "alone = torch.tensor((means[0] if means.dim() else means).item())",
        "test_training.py::test_no_step_waits_for_the_device",
    ),
    "the copy to the device holds up the loop": "only timings on a GPU show that the host waits",
    "throughput is overstated if": Mutation(
        "batches_count_as_full",
        "measure/turns.py",
        "return sum(counts), seconds",
        "return len(counts) * max(counts), seconds",
        "test_throughput.py::test_the_numbers_count_the_samples_that_were_processed",
    ),
    "figures of weak scaling use the first of three trials": Mutation(
        "spread_left_out",
        "report/speedup.py",
        "math.hypot(spread(before), spread(after), floor)",
        "floor",
        "test_scaling.py::test_noise_grows_with_the_spread_of_the_trials",
    ),
    "under warm-up the cosine ends at 4 % of the initial rate": Mutation(
        "cosine_over_all_steps",
        "train/trainer.py",
        "progress = min((step - warmup) / max(total - warmup, 1), 1.0)",
        "progress = min((step - warmup) / max(total, 1), 1.0)",
        "test_schedule.py::test_the_cosine_reaches_the_end_rate",
    ),
    "iterations count from 1": Mutation(
        "rate_of_the_next_step",
        "train/trainer.py",
        "set_learning_rate(self.step.optimizer, self.rate(number))",
        "set_learning_rate(self.step.optimizer, self.rate(number + 1))",
        "published/test_curves.py::test_the_unet_takes_the_published_steps",
    ),
    "the density loss's exponential": Mutation(
        "exponential_always",
        "extensions/cosmo_unet/scores.py",
        "    if density_weight:\n",
        "    if True:\n",
        "test_losses_metrics.py::test_without_a_weight_the_exponential_is_not_computed",
    ),
    "Apex is imported even if unused": Mutation(
        "apex_imported",
        "train/build.py",
        '    options = settings.model_dump(exclude={"kind"',
        '    import apex\n    options = settings.model_dump(exclude={"kind"',
        "test_rungs.py::test_the_optimiser_is_pytorchs_own",
    ),
    "SYNTHETIC includes the copy to the device for some loaders only": Mutation(
        "synthetic_loads",
        "measure/throughput.py",
        '"SYNTHETIC": (itertools.repeat(cached), step)',
        '"SYNTHETIC": (session.training_batches(loader, 1), step)',
        "test_throughput.py::test_synthetic_is_one_resident_batch_for_every_loader",
    ),
    "the CUDA-graph script fails on a partial batch": Mutation(
        "one_graph_for_all_shapes",
        "train/step.py",
        "        shape = shapes(given)\n",
        "        shape = tuple(each[1:] for each in shapes(given))\n",
        "test_rungs.py::test_graphs_are_chosen_by_shape_and_rare_shapes_have_none",
    ),
    "the rendezvous port is fixed": Mutation(
        "port_fixed",
        "parallel/rendezvous.py",
        "str(20000 + (int(job) + 97 * int(step or 0) if known else os.getppid()) % 20000)",
        '"29500"',
        "test_parallel.py::test_ports_of_two_jobs_differ",
    ),
    # ---- ViT
    "sample 0 is never used": Mutation(
        "every_file_as_the_first",
        "extensions/era5_vit/era5/samples.py",
        "row = self._first[run] + number\n",
        "row = self._first[run] + number.clip(min=1)\n",
        "test_data.py::test_every_pair_is_used_once_an_epoch_whatever_the_files_lengths",
    ),
    "attention drop-out is on in evaluation": "attention_drops_in_evaluation",
    "validation is shuffled": Mutation(
        "validation_shuffled",
        "data/sampling.py",
        "order(seed, epoch, count)[:wanted] if training else evenly(count, wanted)",
        "order(seed, epoch, count)[:wanted]",
        "test_samples.py::test_validation_rows_are_in_order_and_evenly_spread",
    ),
    "the RMSE's weights assume": Mutation(
        "weights_from_pole_to_pole",
        "extensions/era5_vit/study.py",
        "latitude_weights(torch.tensor(extra.latitude[: info.grid[0]], **tensor))",
        "latitude_weights(torch.linspace(90, -90, info.grid[0], **tensor))",
        "test_losses_metrics.py::test_era5_metrics_are_plain_numpy_in_physical_units",
    ),
    "workers are restarted every epoch": Mutation(
        "workers_restarted",
        "data/loaders/torch_loader.py",
        "persistent_workers=settings.workers > 0",
        "persistent_workers=False",
        "test_samples.py::test_workers_resume_and_abandoned_epochs_do_not_change_samples",
    ),
    "zero epochs are a success": Mutation(
        "zero_epochs",
        "config/run.py",
        'epochs: PositiveInt | None = Field(None, description="Passes',
        'epochs: NonNegativeInt | None = Field(None, description="Passes',
        "test_config.py::test_a_mistake_is_reported_once_where_it_was_written",
    ),
    "the program fails outside Slurm": Mutation(
        "group_of_one",
        "parallel/rendezvous.py",
        "    if geometry.world_size == 1:\n",
        "    if geometry.world_size == 0:\n",
        "test_parallel.py::test_one_device_runs_without_rendezvous",
    ),
    "context parallelism: the final": Mutation(
        "gradients_of_parts_of_a_sample",
        "parallel/strategy.py",
        '"process_group": self.world.replicas,',
        '"process_group": self.world.mesh.group("dp") if self.world.mesh else self.world.replicas,',
        "test_mesh.py::test_each_strategy_learns_like_one_process[2 cp]",
    ),
    "a model's normalisations have eps 1e-5 on several devices": Mutation(
        "eps_of_blocks",
        "extensions/era5_vit/model.py",
        "self.norm1 = nn.LayerNorm(embed_dim, eps=1e-6)",
        "self.norm1 = nn.LayerNorm(embed_dim, eps=1e-5)",
        "published/test_curves.py::test_devices_that_share_a_sample_normalise_with_the_eps_of_one",
    ),
    "`all_reduce` on a non-contiguous input loses the result": Mutation(
        "sum_of_a_copy",
        "parallel/world.py",
        'dist.all_reduce(values, group=self.mesh.group("dp") if self.mesh else None)',
        'dist.all_reduce(values.clone(), group=self.mesh.group("dp") if self.mesh else None)',
        "test_mesh.py::test_ranks_agree_on_sums",
    ),
    "the tutorial's tests of model parallelism check no gradients of weights": "context_without_the_others",
    "two error paths end": Mutation(
        "message_with_an_unknown_name",
        "config/laws.py",
        'lambda run: run.geometry.model_size > 1 and run.parallel.kind == "dp"',
        'lambda run: geometry.model_size > 1 and run.parallel.kind == "dp"',
        "test_config.py::test_impossible_settings_of_model_parallel_runs_are_refused[one process]",
    ),
    "memory is read from NVML by local rank": Mutation(
        "gpus_by_number",
        "measure/telemetry.py",
        "[pynvml.nvmlDeviceGetHandleByPciBusId(address) for address in addresses]",
        "[pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(count)]",
        "test_telemetry.py::test_gpus_are_sampled_in_the_order_of_cuda",
    ),
    # ---- single to multi-GPU, MNIST, ImageNet
    "checkpoints are written in place": Mutation(
        "checkpoint_in_place",
        "core/files.py",
        "        yield temporary\n",
        "        temporary = path\n        yield temporary\n",
        "test_training.py::test_a_checkpoint_is_written_atomically",
    ),
    "checkpoints lack the random state": "random_state_not_restored",
    "`module.` is stripped": Mutation(
        "module_not_stripped",
        "train/weight_files.py",
        'PREFIXES = ("module.", "_orig_mod.", "module.")',
        'PREFIXES = ("_orig_mod.",)',
        "test_knobs.py::test_published_weights_load_by_name",
    ),
    "one process without a process group fails at the end": Mutation(
        "tail_of_validation_dropped",
        "data/loaders/base.py",
        "return -(-samples // self.batch_size)",
        "return samples // self.batch_size",
        "test_training.py::test_validation_is_fixed_and_counts_each_sample_once",
    ),
    "the loss scaler's state": Mutation(
        "scaler_not_restored",
        "train/step.py",
        "        self.scaler.load_state_dict({name: type(value)(scaler[name]) for name, value in known.items()})\n",
        "",
        "test_training.py::test_a_killed_run_resumes_bit_by_bit[loss scaling]",
    ),
    "the best loss (or accuracy) is lost on resume": Mutation(
        "best_lost_on_resume",
        "train/trainer.py",
        "self._best = self._judge.best(self.history) if self._judge else None",
        "self._best = None",
        "test_knobs.py::test_the_best_survives_an_interruption_and_a_worse_epoch_after_it",
    ),
    "a desired accuracy of 0.75 is compared with per cent": Mutation(
        "target_in_per_cent",
        "core/metrics.py",
        'return value <= target if self.better == "lower" else value >= target',
        'return value <= target if self.better == "lower" else 100 * value >= target',
        "test_knobs.py::test_better_is_lower_or_higher",
    ),
    "data are downloaded on a compute node": Mutation(
        "downloads_are_jobs",
        "preflight/cost.py",
        'scheduler.acquire == "here" and parts.fetched(dataset)',
        "False",
        "test_cost.py::test_a_download_is_not_a_scheduler_job",
    ),
    "timings without synchronisation": "device_not_waited_for",
    "the script lacks the profiled function's decorator": "functions are timed without a decorator",
    "top-5 accuracy fails on": Mutation(
        "top5_of_views",
        "extensions/imagenet_resnet50/study.py",
        'best = prediction.topk(self.most["top5"]',
        'best = prediction.view(-1).view(len(prediction), -1).topk(self.most["top5"]',
        "test_imagenet.py::test_top5_of_answers_in_any_order_in_memory",
    ),
    "on several GPUs, validation repeats images": Mutation(
        "means_over_batches",
        "train/validation.py",
        "            total = value.detach().double().sum(dim=0)\n"
        "            self._sums[name] = self._sums[name] + total if name in self._sums else total\n"
        "        self._count += len(next(iter(values.values()), ()))\n",
        "            total = value.detach().double().mean(dim=0)\n"
        "            self._sums[name] = self._sums[name] + total if name in self._sums else total\n"
        "        self._count += 1\n",
        "test_training.py::test_validation_is_fixed_and_counts_each_sample_once",
    ),
    "throughput counts the last, smaller batch as a full batch": Mutation(
        "last_batch_counts_as_full",
        "measure/turns.py",
        "return sum(counts), seconds",
        "return len(counts) * max(counts), seconds",
        "test_throughput.py::test_the_numbers_count_the_samples_that_were_processed",
    ),
    "`--local_rank` fails": Mutation(
        "ranks_of_torchrun_unknown",
        "core/process.py",
        '    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun\n',
        "",
        "test_starters.py::test_each_starter_gives_each_process_a_rank",
    ),
    "the program fails if it is not distributed": Mutation(
        "not_distributed",
        "parallel/rendezvous.py",
        "    if geometry.world_size == 1:\n",
        "    if geometry.world_size == 0:\n",
        "test_parallel.py::test_one_device_runs_without_rendezvous",
    ),
    "`delay_allreduce=True`": Mutation(
        "averaged_after_the_backward_pass",
        "parallel/strategy.py",
        '"bucket_cap_mb": settings.bucket_mb,',
        '"bucket_cap_mb": 1e6,',
        "test_ddp.py::test_averaging_begins_while_gradients_are_computed",
    ),
    "each node has a TensorBoard writer": Mutation(
        "every_process_writes",
        "train/train.py",
        "        if world.main:\n            _lead(",
        "        if True:\n            _lead(",
        "test_parallel.py::test_several_train_as_one_does[sharded]",
    ),
    "one script scales the learning rate twice": Mutation(
        "rate_scaled_twice",
        "train/trainer.py",
        'return lr * (ratio if schedule.scaling == "linear"',
        'return lr * ratio * (ratio if schedule.scaling == "linear"',
        "test_imagenet.py::test_the_published_plan_has_the_settings_of_the_program",
    ),
}


def mutations() -> dict[str, Mutation]:
    """Return the mutations by row of DEFECTS.md, without rows that have no mutation.

    A string in `DEFECTS` may name a mutation of `tests.mutate_code`.
    """
    known = {each.name: each for each in mutate_code.MUTATIONS}
    found = {row: known.get(each) if isinstance(each, str) else each for row, each in DEFECTS.items()}
    return {row: each for row, each in found.items() if each}


if __name__ == "__main__":
    mutate_code.MUTATIONS[:] = list({each.name: each for each in mutations().values()}.values())
    sys.exit(mutate_code.main())
