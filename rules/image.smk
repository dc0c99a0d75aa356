# The image that the stages run in, where they run in containers.


rule image:
    """Make the site's image usable: build or pull it, and migrate it for podman-hpc. The engine knows what is new."""
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
