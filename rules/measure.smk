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
