# Write the list of a plan's runs, which the plan's tables and pages read. Other stages record the settings of their run
# or dataset themselves.


rule configure_plan:
    """Write the list of a plan's runs."""
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
        "List the runs of plan {wildcards.plan}"
    shell:
        "{params.launch:q} configure --settings {params.stage[settings]:q} --out {output:q} --log {log:q}"
