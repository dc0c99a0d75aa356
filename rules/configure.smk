# Settings, resolved and written for whoever reads the results. The stages do not wait for these files: they get
# their settings with their command, and their parameters say which of the settings make them run again.


rule configure_dataset:
    """Write a dataset's settings."""
    output:
        f"{RESULTS}/data/{{dataset}}/config.yaml",
    log:
        f"{RESULTS}/logs/configure/data/{{dataset}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/configure/data/{{dataset}}.tsv"
    params:
        stage=configure_dataset_params,
        launch=stage_launch,
    message:
        "Settings of dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} configure --settings {params.stage[settings]:q} --out {output:q} --log {log:q}"


rule configure_run:
    """Write a run's settings."""
    output:
        f"{RESULTS}/plans/{{plan}}/{{run}}/config.yaml",
    log:
        f"{RESULTS}/logs/configure/plans/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/configure/plans/{{plan}}/{{run}}.tsv"
    params:
        stage=configure_run_params,
        launch=stage_launch,
    message:
        "Settings of run {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} configure --settings {params.stage[settings]:q} --out {output:q} --log {log:q}"


rule configure_plan:
    """Write which runs a plan consists of."""
    output:
        f"{RESULTS}/plans/{{plan}}/plan.yaml",
    log:
        f"{RESULTS}/logs/configure/plans/{{plan}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/configure/plans/{{plan}}.tsv"
    params:
        stage=configure_plan_params,
        launch=stage_launch,
    message:
        "Runs of plan {wildcards.plan}"
    shell:
        "{params.launch:q} configure --settings {params.stage[settings]:q} --out {output:q} --log {log:q}"
