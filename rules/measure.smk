rule throughput:
    """Measure a run's samples/s: IO alone, SYNTHETIC, FULL."""
    input:
        manifest=JOBS.run_manifest,
        data=JOBS.run_data,
        first=JOBS.first_data,
        program=JOBS.program_files,
        checkout=JOBS.run_checkout,
    output:
        throughput=f"{RESULTS}/plans/{{plan}}/{{run}}/throughput.json",
        telemetry=f"{RESULTS}/plans/{{plan}}/{{run}}/telemetry/throughput.csv",
    log:
        f"{RESULTS}/logs/throughput/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/throughput/{{plan}}/{{run}}.tsv"
    priority: JOBS.sooner
    # All cores of one machine, so that no other job disturbs what is timed.
    threads: ALL_CORES
    resources:
        **JOBS.resources("throughput"),
    params:
        stage=JOBS.throughput_params,
        settings=JOBS.run_settings,
        record=f"{RESULTS}/plans/{{plan}}/{{run}}/config.yaml",
        launch=JOBS.run_launch,
        device=JOBS.run_device,
        beside=JOBS.throughput_beside,
        start=JOBS.program_start,
    message:
        "Measure throughput of {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} throughput --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " {params.beside:q} {params.start:q} --device {params.device:q} --threads {threads} --out {output.throughput:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"


rule profile:
    """Profile some steps of a run. Its traces lie beside the files that are named here."""
    input:
        manifest=JOBS.run_manifest,
        data=JOBS.run_data,
    output:
        profile=f"{RESULTS}/plans/{{plan}}/{{run}}/profile/profile.json",
        summary=f"{RESULTS}/plans/{{plan}}/{{run}}/profile/profile_summary.csv",
        telemetry=f"{RESULTS}/plans/{{plan}}/{{run}}/telemetry/profile.csv",
    log:
        f"{RESULTS}/logs/profile/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/profile/{{plan}}/{{run}}.tsv"
    priority: JOBS.sooner
    # All cores of one machine, so that no other job disturbs what is timed.
    threads: ALL_CORES
    resources:
        **JOBS.resources("profile"),
    params:
        stage=JOBS.run_params("profile"),
        settings=JOBS.run_settings,
        record=f"{RESULTS}/plans/{{plan}}/{{run}}/config.yaml",
        launch=JOBS.run_launch,
        device=JOBS.run_device,
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
        manifest=JOBS.run_manifest,
        data=JOBS.run_data,
        program=JOBS.program_files,
        checkout=JOBS.run_checkout,
    output:
        record=f"{RESULTS}/plans/{{plan}}/{{run}}/tune.json",
        settings=f"{RESULTS}/plans/{{plan}}/{{run}}/tuned.yaml",
        telemetry=f"{RESULTS}/plans/{{plan}}/{{run}}/telemetry/tune.csv",
    log:
        f"{RESULTS}/logs/tune/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/tune/{{plan}}/{{run}}.tsv"
    # All cores of one machine, so that no other job disturbs what is timed.
    threads: ALL_CORES
    resources:
        **JOBS.resources("tune"),
    params:
        stage=JOBS.tune_params,
        settings=JOBS.run_settings,
        record=f"{RESULTS}/plans/{{plan}}/{{run}}/config.yaml",
        launch=JOBS.run_launch,
        device=JOBS.run_device,
        call=JOBS.call_again,
        candidates=JOBS.tune_candidates,
        folder=subpath(output.record, parent=True),
    message:
        "Tune {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} tune --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads}"
        " --run {wildcards.plan:q}.{wildcards.run:q} --call {params.call:q} {params.candidates:q} --out {params.folder:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"
