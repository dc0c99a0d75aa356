# Profile some steps of a run.


rule profile:
    """Profile some steps of a run. The traces, next to `profile.json`, are not declared outputs."""
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
        stage=RUNS.params("profile"),
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
