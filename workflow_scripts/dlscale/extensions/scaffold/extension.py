"""Extension: the commands `init` and `new-study`."""

from dlscale.core.stage import Query, option

COMMANDS = {
    "init": Query(
        "dlscale.extensions.scaffold.init",
        "Write a working folder (Snakefile, config.yaml, profiles), so that no clone of the repository is needed.",
        (("folder", {"metavar": "FOLDER", "help": "folder to write into, without Snakefile, config.yaml, profiles"}),),
        configured=False,
        example="dlscale init work",
    ),
    "new-study": Query(
        "dlscale.extensions.scaffold.new_study",
        "Write a small runnable study with tests and configuration, for your network and arrays.",
        (
            ("name", {"metavar": "NAME", "help": "name of the study, and of its Python module"}),
            option("--at", "folder to write into (default: NAME)", False, metavar="FOLDER"),
            option("--images", "write a study of images, with metrics and a figure", False, action="store_true"),
            option(
                "--inside",
                "write a study of images into this repository, next to the shipped studies",
                False,
                action="store_true",
            ),
        ),
        configured=False,
        example="dlscale new-study waves --at studies/waves",
    ),
}
