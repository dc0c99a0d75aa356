# Rule `headroom`: measure external programs with a loader that costs nothing.


rule headroom:
    """Measure how much faster an external program would be with a loader that costs nothing."""
    input:
        manifest=RUNS.manifest,
        data=RUNS.data_files,
        program=PROGRAMS.files,
        checkout=PROGRAMS.checkout,
    output:
        record=PATHS.run("headroom.json"),
        telemetry=PATHS.run("telemetry/headroom.csv"),
    log:
        PATHS.log("headroom", "{plan}", "{run}"),
    benchmark:
        PATHS.benchmark("headroom", "{plan}", "{run}")
    # All cores of one machine, so that no other job disturbs the timing.
    threads: ALL_CORES
    resources:
        **COMMANDS.resources("headroom"),
    params:
        stage=RUNS.params("headroom"),
        settings=RUNS.settings,
        record=PATHS.run("config.yaml"),
        launch=RUNS.launch,
        device=COMMANDS.device,
        start=PROGRAMS.start,
    message:
        "Measure {wildcards.plan}.{wildcards.run} with a loader that costs nothing"
    shell:
        "{params.launch:q} headroom --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} {params.start:q} --out {output.record:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"
