"""Extensions: removable folders, each with an `extension.py` that lists its additions.

The core does not import an extension by name: `dlscale.core.registry.extensions` finds the folders. Deleting a folder
removes the commands, stages, studies and kinds of datasets of the extension. Installed packages add further extensions
by an entry point (docs/adding.md).
"""
