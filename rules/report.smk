rule collect:
    """Tabulate a plan's runs."""
    input:
        plan=PATHS.plan(),
        runs=PLANS.runs,
    output:
        report(
            PATHS.table(),
            caption=f"{CAPTIONS}/summary.rst",
            category="Tables",
            labels={"plan": "{plan}"},
        ),
    log:
        PATHS.log("collect", "{plan}"),
    benchmark:
        PATHS.benchmark("collect", "{plan}")
    priority: PLANS.sooner
    params:
        stage=PLANS.collect_params,
        launch=COMMANDS.launch,
        page=PLANS.live_page,
    message:
        "Tabulate plan {wildcards.plan}"
    shell:
        "{params.launch:q} collect --plan {input.plan:q} --out {output:q} {params.page:q} --log {log:q}"


rule report:
    """Write the page of all target plans."""
    input:
        **PLANS.files_of_page(CONFIG.workflow.targets),
        runs=PLANS.target_runs,
    output:
        report(
            PAGE,
            caption=f"{CAPTIONS}/page.rst",
            category="Report",
        ),
    log:
        PATHS.log("report"),
    benchmark:
        PATHS.benchmark("report")
    params:
        stage=PLANS.page_params(CONFIG.workflow.report.title, CONFIG.workflow.targets),
        launch=COMMANDS.launch,
        call=CONTEXT.call_again,
        datasets=PLANS.page_folders,
    message:
        "Write the report"
    shell:
        "{params.launch:q} report --title {params.stage[settings][title]:q} --plans {input.plans:q}"
        " --datasets {params.datasets:q} --references {input.references:q} --call {params.call:q}"
        " --out {output:q} --log {log:q}"


rule report_plan:
    """Write the page of one plan."""
    input:
        unpack(PLANS.page_files),
        runs=PLANS.runs,
    output:
        report(
            PATHS.plan_page(),
            caption=f"{CAPTIONS}/page.rst",
            category="Report",
            labels={"plan": "{plan}"},
        ),
    log:
        PATHS.log("report", "{plan}"),
    benchmark:
        PATHS.benchmark("report", "{plan}")
    params:
        stage=PLANS.plan_page_params,
        launch=COMMANDS.launch,
        call=CONTEXT.call_again,
        datasets=PLANS.page_folders,
    message:
        "Write the report of plan {wildcards.plan}"
    shell:
        "{params.launch:q} report --title {params.stage[settings][title]:q} --plans {input.plans:q}"
        " --datasets {params.datasets:q} --references {input.references:q} --call {params.call:q}"
        " --out {output:q} --log {log:q}"
