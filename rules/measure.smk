rule throughput:
    """Measure a run's samples/s: loading, computing and training."""
    input:
        manifest=RUNS.manifest,
        data=RUNS.data_files,
        first=RUNS.first_data,
        program=PROGRAMS.files,
        checkout=PROGRAMS.checkout,
    output:
        throughput=PATHS.run("throughput.json"),
        telemetry=PATHS.run("telemetry/throughput.csv"),
    log:
        PATHS.log("throughput", "{plan}", "{run}"),
    benchmark:
        PATHS.benchmark("throughput", "{plan}", "{run}")
    priority: PLANS.sooner
    # All cores of one machine, so that no other job disturbs the timing.
    threads: ALL_CORES
    resources:
        **COMMANDS.resources("throughput"),
    params:
        stage=RUNS.throughput_params,
        settings=RUNS.settings,
        record=PATHS.run("config.yaml"),
        launch=RUNS.launch,
        device=COMMANDS.device,
        beside=RUNS.throughput_beside,
        start=PROGRAMS.start,
    message:
        "Measure throughput of {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} throughput --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " {params.beside:q} {params.start:q} --device {params.device:q} --threads {threads} --out {output.throughput:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"


rule profile:
    """Profile some steps of a run. Traces are files in the folder of `profile.json` that are not declared outputs."""
    input:
        manifest=RUNS.manifest,
        data=RUNS.data_files,
    output:
        profile=PATHS.run("profile/profile.json"),
        summary=PATHS.run("profile/profile_summary.csv"),
        telemetry=PATHS.run("telemetry/profile.csv"),
    log:
        PATHS.log("profile", "{plan}", "{run}"),
    benchmark:
        PATHS.benchmark("profile", "{plan}", "{run}")
    priority: PLANS.sooner
    # All cores of one machine, so that no other job disturbs the timing.
    threads: ALL_CORES
    resources:
        **COMMANDS.resources("profile"),
    params:
        stage=RUNS.profile_params,
        settings=RUNS.settings,
        record=PATHS.run("config.yaml"),
        launch=RUNS.launch,
        device=COMMANDS.device,
        folder=subpath(output.profile, parent=True),
    message:
        "Profile {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} profile --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} --out {params.folder:q} --telemetry {output.telemetry:q}"
        " --log {log:q}"


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
        stage=RUNS.tune_params,
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
