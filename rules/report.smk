checkpoint promote:
    """Choose the trials that come to the next rung of successive halving."""
    input:
        plan=f"{RESULTS}/plans/{{plan}}/plan.yaml",
        runs=JOBS.promote_inputs,
    output:
        f"{RESULTS}/plans/{{plan}}/rung{{rung}}.json",
    log:
        f"{RESULTS}/logs/promote/{{plan}}/rung{{rung}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/promote/{{plan}}/rung{{rung}}.tsv"
    params:
        stage=JOBS.promote_params,
        launch=JOBS.stage_launch,
    message:
        "Choose the trials of {wildcards.plan} for rung {wildcards.rung}"
    shell:
        "{params.launch:q} promote --plan {input.plan:q} --rung {wildcards.rung} --out {output:q} --log {log:q}"


rule collect:
    """Tabulate a plan's runs."""
    input:
        plan=f"{RESULTS}/plans/{{plan}}/plan.yaml",
        runs=JOBS.collect_inputs,
    output:
        report(
            f"{RESULTS}/plans/{{plan}}/summary.csv",
            caption=f"{CAPTIONS}/summary.rst",
            category="Tables",
            labels={"plan": "{plan}"},
        ),
    log:
        f"{RESULTS}/logs/collect/{{plan}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/collect/{{plan}}.tsv"
    priority: JOBS.sooner
    params:
        stage=JOBS.collect_params,
        launch=JOBS.stage_launch,
        page=JOBS.live_page,
    message:
        "Tabulate plan {wildcards.plan}"
    shell:
        "{params.launch:q} collect --plan {input.plan:q} --out {output:q} {params.page:q} --log {log:q}"


rule report:
    """Write the page of all target plans."""
    input:
        **JOBS.report_files(CONFIG.workflow.targets),
        runs=JOBS.report_runs,
    output:
        report(
            PAGE,
            caption=f"{CAPTIONS}/page.rst",
            category="Report",
        ),
    log:
        f"{RESULTS}/logs/report.log",
    benchmark:
        f"{RESULTS}/benchmarks/report.tsv"
    params:
        stage=JOBS.report_params(CONFIG.workflow.report.title, CONFIG.workflow.targets),
        launch=JOBS.stage_launch,
        call=JOBS.call_again,
        datasets=JOBS.report_folders,
    message:
        "Write the report"
    shell:
        "{params.launch:q} report --title {params.stage[settings][title]:q} --plans {input.plans:q}"
        " --datasets {params.datasets:q} --references {input.references:q} --call {params.call:q}"
        " --out {output:q} --log {log:q}"


rule report_plan:
    """Write the page of one plan."""
    input:
        unpack(JOBS.report_plan_files),
        runs=JOBS.collect_inputs,
    output:
        report(
            f"{RESULTS}/plans/{{plan}}/report.html",
            caption=f"{CAPTIONS}/page.rst",
            category="Report",
            labels={"plan": "{plan}"},
        ),
    log:
        f"{RESULTS}/logs/report/{{plan}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/report/{{plan}}.tsv"
    params:
        stage=JOBS.report_plan_params,
        launch=JOBS.stage_launch,
        call=JOBS.call_again,
        datasets=JOBS.report_folders,
    message:
        "Write the report of plan {wildcards.plan}"
    shell:
        "{params.launch:q} report --title {params.stage[settings][title]:q} --plans {input.plans:q}"
        " --datasets {params.datasets:q} --references {input.references:q} --call {params.call:q}"
        " --out {output:q} --log {log:q}"
