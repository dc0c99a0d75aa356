"""Extension: the command `schema`."""

from dlscale.core.stage import Query, option

COMMANDS = {
    "schema": Query(
        "dlscale.extensions.schema.reference",
        "Print the JSON schema of config.yaml, for editors.",
        (option("--markdown", "print the reference of all keys instead of the schema", False, action="store_true"),),
        configured=False,
        example="dlscale schema --markdown",
    ),
}
