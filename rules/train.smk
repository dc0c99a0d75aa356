rule train:
    """Train one run. Checkpoints are not declared outputs: Snakemake would delete them if a job fails."""
    input:
        manifest=RUNS.manifest,
        data=RUNS.data_files,
        weights=RUNS.weights,
    output:
        metrics=PATHS.run("metrics.jsonl"),
        provenance=PATHS.run("provenance.json"),
        model=PATHS.run("model.pt"),
        prediction=report(
            PATHS.run("prediction.png"),
            caption=f"{CAPTIONS}/prediction.rst",
            category="Predictions",
            subcategory="{plan}",
            labels={"plan": "{plan}", "run": "{run}"},
        ),
        telemetry=PATHS.run("telemetry/train.csv"),
    log:
        PATHS.log("train", "{plan}", "{run}"),
    benchmark:
        PATHS.benchmark("train", "{plan}", "{run}")
    threads: RUNS.train_threads
    resources:
        **COMMANDS.resources("train"),
    params:
        stage=RUNS.params("train"),
        settings=RUNS.settings,
        record=PATHS.run("config.yaml"),
        launch=RUNS.launch,
        device=COMMANDS.device,
        sources=RUNS.checkpoint_sources,
        folder=subpath(output.metrics, parent=True),
        checkpoints=RUNS.checkpoint_folder,
    message:
        "Train {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} train --config {params.settings:q} --record {params.record:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} --sources {params.sources:q}"
        " --checkpoints {params.checkpoints:q} --out {params.folder:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"
