# Make a dataset from raw files: acquire, preprocess (scatter), assemble (gather), describe.


rule acquire:
    """Make one raw file without a network: simulate the file, or read a folder or store of this machine."""
    output:
        PATHS.raw_file(),
    log:
        PATHS.log("acquire", "{dataset}", "{file}"),
    benchmark:
        PATHS.benchmark("acquire", "{dataset}", "{file}")
    wildcard_constraints:
        dataset=exactly(name for name in CONFIG.workflow.datasets if name not in FETCHED),
    resources:
        **COMMANDS.resources("data"),
    params:
        stage=DATASETS.acquire_params,
        launch=DATASETS.acquire_launch,
        dataset=DATASETS.settings,
    message:
        "Acquire {wildcards.file} of dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} acquire --config {params.dataset:q} --file {wildcards.file:q} --out {output:q} --log {log:q}"


use rule acquire as fetch with:
    # This rule needs the network, which compute nodes may lack.
    wildcard_constraints:
        dataset=exactly(FETCHED),
    message:
        "Fetch {wildcards.file} of dataset {wildcards.dataset}"


rule preprocess:
    """Stream one piece of one part through cropping, downsampling and transforms."""
    input:
        sources=DATASETS.part_sources,
    output:
        temp(PATHS.piece()),
    log:
        PATHS.log("preprocess", "{dataset}", "{split}", "{part}-{piece}"),
    benchmark:
        PATHS.benchmark("preprocess", "{dataset}", "{split}", "{part}-{piece}")
    resources:
        **COMMANDS.resources("data"),
    params:
        stage=DATASETS.preprocess_params,
        words=DATASETS.source_words,
        launch=COMMANDS.launch,
        dataset=DATASETS.settings,
    message:
        "Preprocess {wildcards.dataset} {wildcards.split}/{wildcards.part}, piece {wildcards.piece}"
    shell:
        "{params.launch:q} preprocess --config {params.dataset:q} --part {wildcards.split}/{wildcards.part}"
        " --piece {wildcards.piece} {params.words:q} --out {output:q} --log {log:q}"


rule assemble:
    """Join the pieces of one part into its final file."""
    input:
        pieces=DATASETS.part_pieces,
    output:
        PATHS.part(),
    log:
        PATHS.log("assemble", "{dataset}", "{split}", "{part}"),
    benchmark:
        PATHS.benchmark("assemble", "{dataset}", "{split}", "{part}")
    resources:
        **COMMANDS.resources("data"),
    params:
        stage=DATASETS.assemble_params,
        launch=COMMANDS.launch,
        dataset=DATASETS.settings,
    message:
        "Assemble {wildcards.dataset} {wildcards.split}/{wildcards.part}"
    shell:
        "{params.launch:q} assemble --config {params.dataset:q} --pieces {input.pieces:q} --out {output:q} --log {log:q}"


rule describe:
    """Write a dataset's manifest, and the statistics of its training part."""
    input:
        files=DATASETS.files,
    output:
        manifest=PATHS.manifest(),
        stats=directory(PATHS.stats()),
    log:
        PATHS.log("describe", "{dataset}"),
    benchmark:
        PATHS.benchmark("describe", "{dataset}")
    resources:
        **COMMANDS.resources("data"),
    params:
        stage=DATASETS.describe_params,
        launch=COMMANDS.launch,
        dataset=DATASETS.settings,
        sources=DATASETS.prepared_sources,
        record=PATHS.dataset_settings(),
    message:
        "Describe dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} describe --config {params.dataset:q} --record {params.record:q} {params.sources:q} --manifest {output.manifest:q}"
        " --stats {output.stats:q} --log {log:q}"


rule preview:
    """Draw a dataset's channels."""
    input:
        manifest=PATHS.manifest(),
        files=DATASETS.files,
    output:
        report(
            PATHS.preview(),
            caption=f"{CAPTIONS}/preview.rst",
            category="Data",
            labels={"dataset": "{dataset}"},
        ),
    log:
        PATHS.log("preview", "{dataset}"),
    benchmark:
        PATHS.benchmark("preview", "{dataset}")
    priority: 2  # before timed jobs, which run alone: the picture appears early on the live page
    params:
        stage=DATASETS.preview_params,
        launch=COMMANDS.launch,
        page=PLANS.live_page,
    message:
        "Draw dataset {wildcards.dataset}"
    shell:
        "{params.launch:q} preview --manifest {input.manifest:q} --out {output:q} {params.page:q} --log {log:q}"
