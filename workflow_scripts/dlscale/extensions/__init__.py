"""Removable parts: a folder each, whose `extension.py` lists what it adds.

The core imports none of them. `dlscale.core.registry.extensions` finds them; deleting a folder removes its commands,
studies and kinds of datasets.
"""
