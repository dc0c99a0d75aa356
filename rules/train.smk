rule train:
    """Train one run. What a retry goes on from is no declared output, which would be deleted when a job fails."""
    input:
        manifest=JOBS.run_manifest,
        data=JOBS.run_data,
        weights=JOBS.run_weights,
    output:
        metrics=f"{RESULTS}/plans/{{plan}}/{{run}}/metrics.jsonl",
        provenance=f"{RESULTS}/plans/{{plan}}/{{run}}/provenance.json",
        model=f"{RESULTS}/plans/{{plan}}/{{run}}/model.pt",
        prediction=report(
            f"{RESULTS}/plans/{{plan}}/{{run}}/prediction.png",
            caption=f"{CAPTIONS}/prediction.rst",
            category="Predictions",
            subcategory="{plan}",
            labels={"plan": "{plan}", "run": "{run}"},
        ),
        telemetry=f"{RESULTS}/plans/{{plan}}/{{run}}/telemetry/train.csv",
    log:
        f"{RESULTS}/logs/train/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train/{{plan}}/{{run}}.tsv"
    threads: JOBS.train_threads
    resources:
        **JOBS.resources("train"),
    params:
        stage=JOBS.run_params("train"),
        settings=JOBS.run_settings,
        record=f"{RESULTS}/plans/{{plan}}/{{run}}/config.yaml",
        launch=JOBS.run_launch,
        device=JOBS.run_device,
        sources=JOBS.checkpoint_sources,
        folder=subpath(output.metrics, parent=True),
        checkpoints=JOBS.checkpoint_folder,
    message:
        "Train {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} train --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} --sources {params.sources:q}"
        " --checkpoints {params.checkpoints:q} --out {params.folder:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"


rule checkout:
    """Fetch the revision of a program that a run names, ahead: compute nodes have no network."""
    output:
        directory(f"{RESULTS}/programs/{{revision}}"),
    log:
        f"{RESULTS}/logs/checkout/{{revision}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/checkout/{{revision}}.tsv"
    wildcard_constraints:
        revision="[0-9a-f]{40}",
    params:
        stage=JOBS.checkout_params,
        launch=JOBS.checkout_launch,
        repository=JOBS.checkout_repository,
    message:
        "Fetch revision {wildcards.revision} of {params.repository}"
    shell:
        "{params.launch:q} checkout --repository {params.repository:q} --revision {wildcards.revision:q}"
        " --out {output:q} --log {log:q}"


rule program:
    """Run another program in place of dlscale's training, to its end."""
    input:
        manifest=JOBS.run_manifest,
        data=JOBS.run_data,
        weights=JOBS.run_weights,
        program=JOBS.program_files,
        checkout=JOBS.run_checkout,
    output:
        program=f"{RESULTS}/plans/{{plan}}/{{run}}/program.json",
        telemetry=f"{RESULTS}/plans/{{plan}}/{{run}}/telemetry/program.csv",
    log:
        f"{RESULTS}/logs/program/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/program/{{plan}}/{{run}}.tsv"
    # All cores of one machine, so that no other job disturbs what is timed.
    threads: ALL_CORES
    resources:
        **JOBS.resources("program"),
    params:
        stage=JOBS.run_params("program"),
        settings=JOBS.run_settings,
        record=f"{RESULTS}/plans/{{plan}}/{{run}}/config.yaml",
        launch=JOBS.run_launch,
        device=JOBS.run_device,
        start=JOBS.program_start,
        sources=JOBS.program_sources,
        folder=subpath(output.program, parent=True),
        keep=JOBS.program_folder,
    message:
        "Run program {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} program --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} --sources {params.sources:q} {params.start:q}"
        " --keep {params.keep:q} --out {params.folder:q} --telemetry {output.telemetry:q} --log {log:q}"
