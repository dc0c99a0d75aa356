# From raw files to a described dataset: acquire, preprocess (scatter), assemble (gather), describe.


rule acquire:
    """Make one raw file of what is at hand: simulate it, or read a folder or store of this machine."""
    output:
        f"{RESULTS}/data/{{dataset}}/source/{{file}}",
    log:
        f"{RESULTS}/logs/acquire/{{dataset}}/{{file}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/acquire/{{dataset}}/{{file}}.tsv"
    wildcard_constraints:
        dataset=exactly(name for name in CONFIG.workflow.datasets if name not in FETCHED),
    resources:
        **JOBS.resources("data"),
    params:
        stage=JOBS.acquire_params,
        launch=JOBS.acquire_launch,
        dataset=JOBS.dataset_settings,
    message:
        "Acquire {wildcards.file} of dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} acquire --config {params.dataset:q} --file {wildcards.file:q} --out {output:q} --log {log:q}"


use rule acquire as fetch with:
    # Needs the network: a login or transfer node.
    wildcard_constraints:
        dataset=exactly(FETCHED),
    message:
        "Fetch {wildcards.file} of dataset {wildcards.dataset}"


rule preprocess:
    """Stream one piece of one part through cropping, downsampling and transforms."""
    input:
        sources=JOBS.part_sources,
    output:
        temp(f"{RESULTS}/data/{{dataset}}/pieces/{{split}}/{{part}}-{{piece}}.h5"),
    log:
        f"{RESULTS}/logs/preprocess/{{dataset}}/{{split}}/{{part}}-{{piece}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/preprocess/{{dataset}}/{{split}}/{{part}}-{{piece}}.tsv"
    resources:
        **JOBS.resources("data"),
    params:
        stage=JOBS.preprocess_params,
        words=JOBS.source_words,
        launch=JOBS.stage_launch,
        dataset=JOBS.dataset_settings,
    message:
        "Preprocess {wildcards.dataset} {wildcards.split}/{wildcards.part}, piece {wildcards.piece}"
    shell:
        "{params.launch:q} preprocess --config {params.dataset:q} --part {wildcards.split}/{wildcards.part}"
        " --piece {wildcards.piece} {params.words:q} --out {output:q} --log {log:q}"


rule assemble:
    """Join the pieces of one part into its final file."""
    input:
        pieces=JOBS.part_pieces,
    output:
        f"{RESULTS}/data/{{dataset}}/{{split}}/{{part}}.h5",
    log:
        f"{RESULTS}/logs/assemble/{{dataset}}/{{split}}/{{part}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/assemble/{{dataset}}/{{split}}/{{part}}.tsv"
    resources:
        **JOBS.resources("data"),
    params:
        stage=JOBS.assemble_params,
        launch=JOBS.stage_launch,
        dataset=JOBS.dataset_settings,
    message:
        "Assemble {wildcards.dataset} {wildcards.split}/{wildcards.part}"
    shell:
        "{params.launch:q} assemble --config {params.dataset:q} --pieces {input.pieces:q} --out {output:q} --log {log:q}"


rule describe:
    """Write a dataset's statistics (of the training part alone) and manifest."""
    input:
        files=JOBS.dataset_files,
    output:
        manifest=f"{RESULTS}/data/{{dataset}}/manifest.json",
        stats=directory(f"{RESULTS}/data/{{dataset}}/stats"),
    log:
        f"{RESULTS}/logs/describe/{{dataset}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/describe/{{dataset}}.tsv"
    resources:
        **JOBS.resources("data"),
    params:
        stage=JOBS.describe_params,
        launch=JOBS.stage_launch,
        dataset=JOBS.dataset_settings,
        sources=JOBS.prepared_sources,
        record=f"{RESULTS}/data/{{dataset}}/config.yaml",
    message:
        "Describe dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} describe --config {params.dataset:q} --record {params.record:q} {params.sources:q} --manifest {output.manifest:q}"
        " --stats {output.stats:q} --log {log:q}"


rule preview:
    """Draw a dataset's channels."""
    input:
        manifest=f"{RESULTS}/data/{{dataset}}/manifest.json",
        files=JOBS.dataset_files,
    output:
        report(
            f"{RESULTS}/data/{{dataset}}/preview.png",
            caption=f"{CAPTIONS}/preview.rst",
            category="Data",
            labels={"dataset": "{dataset}"},
        ),
    log:
        f"{RESULTS}/logs/preview/{{dataset}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/preview/{{dataset}}.tsv"
    priority: 2  # before what is timed, for which it would wait: the first sight of the page
    params:
        stage=JOBS.preview_params,
        launch=JOBS.stage_launch,
        page=JOBS.live_page,
    message:
        "Draw dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} preview --manifest {input.manifest:q} --out {output:q} {params.page:q} --log {log:q}"
