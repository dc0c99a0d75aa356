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
