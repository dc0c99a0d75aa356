rule throughput:
    """Measure a run's samples/s: IO alone, SYNTHETIC, FULL."""
    input:
        manifest=run_manifest,
        data=run_data,
    output:
        f"{RESULTS}/plans/{{plan}}/{{run}}/throughput.json",
    log:
        f"{RESULTS}/logs/throughput/{{plan}}/{{run}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/throughput/{{plan}}/{{run}}.tsv"
    # All cores of one machine, so that no other job disturbs what is timed.
    threads: 64
    resources:
        **run_resources("throughput"),
    params:
        stage=run_params("throughput"),
        launch=run_launch,
    message:
        "Measure throughput of {wildcards.plan}.{wildcards.run}"
    shell:
        "{params.launch:q} throughput --config {params.stage[settings]:q} --manifest {input.manifest:q}"
        " --threads {threads} --out {output:q} --log {log:q}"
