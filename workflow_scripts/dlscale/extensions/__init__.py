"""Extensions: removable folders, each with an `extension.py` that lists its additions.

The core imports none of them. `dlscale.core.registry.extensions` finds them; deleting a folder removes its commands,
stages, studies and kinds of datasets. Installed packages add further extensions by an entry point (docs/adding.md).
"""
