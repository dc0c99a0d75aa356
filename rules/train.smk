rule train:
    """Train one run. What a retry goes on from is no declared output, which would be deleted when a job fails."""
    input:
        manifest=run_manifest,
        data=run_data,
        weights=run_weights,
    output:
        metrics=f"{RESULTS}/plans/{{plan}}/{{run}}/metrics.jsonl",
        provenance=f"{RESULTS}/plans/{{plan}}/{{run}}/provenance.json",
        model=f"{RESULTS}/plans/{{plan}}/{{run}}/model.pt",
        prediction=report(
            f"{RESULTS}/plans/{{plan}}/{{run}}/prediction.png",
            caption="../workflow_scripts/dlscale/report/captions/prediction.rst",
            category="Predictions",
            subcategory="{plan}",
            labels={"plan": "{plan}", "run": "{run}"},
        ),
        telemetry=f"{RESULTS}/plans/{{plan}}/{{run}}/telemetry/train.csv",
    log:
        f"{RESULTS}/logs/train/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/train/{{plan}}/{{run}}.tsv"
    threads: train_threads
    resources:
        **run_resources("train"),
    params:
        stage=run_params("train"),
        launch=run_launch,
        device=run_device,
        sources=checkpoint_sources,
        folder=subpath(output.metrics, parent=True),
        checkpoints=checkpoint_folder,
    message:
        "Train {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} train --config {params.stage[settings]:q} --manifest {input.manifest:q}"
        " --device {params.device:q} --threads {threads} --sources {params.sources:q}"
        " --checkpoints {params.checkpoints:q} --out {params.folder:q}"
        " --telemetry {output.telemetry:q} --log {log:q}"
