# Run external programs in place of dlscale's training.


localrules:
    checkout,


rule checkout:
    """Fetch the revision of a run's program in advance, because compute nodes may have no network."""
    output:
        directory(PATHS.program()),
    log:
        PATHS.log("checkout", "{revision}"),
    benchmark:
        PATHS.benchmark("checkout", "{revision}")
    wildcard_constraints:
        revision="[0-9a-f]{40}",
    params:
        stage=PROGRAMS.checkout_params,
        launch=PROGRAMS.checkout_launch,
        repository=PROGRAMS.checkout_repository,
    message:
        "Fetch revision {wildcards.revision} of {params.repository}"
    shell:
        "{params.launch:q} checkout --repository {params.repository:q} --revision {wildcards.revision:q}"
        " --out {output:q} --log {log:q}"


rule program:
    """Run an external program to its end, in place of dlscale's training."""
    input:
        manifest=RUNS.manifest,
        data=RUNS.data_files,
        weights=RUNS.weights,
        program=PROGRAMS.files,
        checkout=PROGRAMS.checkout,
    output:
        program=PATHS.run("program.json"),
        telemetry=PATHS.run("telemetry/program.csv"),
    log:
        PATHS.log("program", "{plan}", "{run}"),
    benchmark:
        PATHS.benchmark("program", "{plan}", "{run}")
    # All cores of one machine, so that no other job disturbs the timing.
    threads: ALL_CORES
    resources:
        **COMMANDS.resources("program"),
    params:
        stage=RUNS.params("program"),
        settings=RUNS.settings,
        record=PATHS.run("config.yaml"),
        launch=RUNS.launch,
        device=COMMANDS.device,
        start=PROGRAMS.start,
        sources=PROGRAMS.sources,
        folder=subpath(output.program, parent=True),
        keep=PROGRAMS.out_folder,
    message:
        "Run program {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} program --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} --sources {params.sources:q} {params.start:q}"
        " --keep {params.keep:q} --out {params.folder:q} --telemetry {output.telemetry:q} --log {log:q}"
