# Search for the fastest settings of a run.


rule tune:
    """Search for the fastest loader, threads and batch size of a run."""
    input:
        manifest=RUNS.manifest,
        data=RUNS.data_files,
        program=PROGRAMS.files,
        checkout=PROGRAMS.checkout,
    output:
        record=PATHS.run("tune.json"),
        settings=PATHS.run("tuned.yaml"),
        telemetry=PATHS.run("telemetry/tune.csv"),
    log:
        PATHS.log("tune", "{plan}", "{run}"),
    benchmark:
        PATHS.benchmark("tune", "{plan}", "{run}")
    # All cores of one machine, so that no other job disturbs the timing.
    threads: ALL_CORES
    resources:
        **COMMANDS.resources("tune"),
    params:
        stage=RUNS.params("tune"),
        settings=RUNS.settings,
        record=PATHS.run("config.yaml"),
        launch=RUNS.launch,
        device=COMMANDS.device,
        call=CONTEXT.call_again,
        candidates=PROGRAMS.tune_candidates,
        folder=subpath(output.record, parent=True),
    message:
        "Tune {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} tune --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads}"
        " --run {wildcards.plan:q}.{wildcards.run:q} --call {params.call:q} {params.candidates:q} --out {params.folder:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"


localrules:
    promote,


checkpoint promote:
    """Choose the trials for the next rung of successive halving."""
    input:
        plan=PATHS.plan(),
        runs=PLANS.promote_inputs,
    output:
        PATHS.rung(),
    log:
        PATHS.log("promote", "{plan}", "rung{rung}"),
    benchmark:
        PATHS.benchmark("promote", "{plan}", "rung{rung}")
    params:
        stage=PLANS.promote_params,
        launch=COMMANDS.launch,
    message:
        "Choose the trials of {wildcards.plan} for rung {wildcards.rung}"
    shell:
        "{params.launch:q} promote --plan {input.plan:q} --rung {wildcards.rung} --out {output:q} --log {log:q}"
