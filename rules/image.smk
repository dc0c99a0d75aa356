# Build or pull the image of the stages' containers.


rule image:
    """Build or pull the site's image, and migrate it for podman-hpc. The engine skips steps that are up to date."""
    log:
        PATHS.log("image"),
    benchmark:
        PATHS.benchmark("image")
    params:
        options=image_options(),
        launch=launcher.PYTHON_HERE,
    message:
        "Build or pull the image"
    shell:
        "{params.launch:q} image {params.options:q} --log {log:q}"
