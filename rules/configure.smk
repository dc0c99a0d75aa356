# The runs of a plan, for its tables and pages. Settings of runs and datasets are kept by the stages that make these.


rule configure_plan:
    """Write which runs a plan consists of."""
    output:
        PATHS.plan(),
    log:
        PATHS.log("configure", "plans", "{plan}"),
    benchmark:
        PATHS.benchmark("configure", "plans", "{plan}")
    params:
        stage=PLANS.configure_params,
        launch=COMMANDS.launch,
    message:
        "Runs of plan {wildcards.plan}"
    shell:
        "{params.launch:q} configure --settings {params.stage[settings]:q} --out {output:q} --log {log:q}"
