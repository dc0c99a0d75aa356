# The runs of a plan, for its tables and pages. Settings of runs and datasets are kept by the stages that make these.


rule configure_plan:
    """Write which runs a plan consists of."""
    output:
        f"{RESULTS}/plans/{{plan}}/plan.yaml",
    log:
        f"{RESULTS}/logs/configure/plans/{{plan}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/configure/plans/{{plan}}.tsv"
    params:
        stage=JOBS.configure_params,
        launch=JOBS.stage_launch,
    message:
        "Runs of plan {wildcards.plan}"
    shell:
        "{params.launch:q} configure --settings {params.stage[settings]:q} --out {output:q} --log {log:q}"
