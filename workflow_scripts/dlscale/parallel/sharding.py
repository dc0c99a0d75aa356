"""Module names by which devices share a study's model (no PyTorch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """Module names in a study's model, by which devices share it; `*` stands for one part of a name.

    `units` are for FSDP; the rest is for models of tokens [B, N, E], which tensor- and context-parallel devices divide
    between `first` and `last`.
    """

    units: Sequence[str] = ()  #: Modules whose weights are gathered at once.
    tokens: int = 0  #: N.
    first: str = ""  #: Module that returns all tokens.
    last: str = ""  #: Module that computes an output of each token; what follows sees all outputs.
    gather: Sequence[str] = ()  #: Modules with `columns` and `rows` in them, which take all tokens.
    columns: Sequence[str] = ()  #: Linear layers of which each device computes some outputs.
    rows: Sequence[str] = ()  #: Linear layers that each take these as input; their outputs are summed.
    attend: Sequence[str] = ()  #: Modules that take queries, keys, values [B, heads, N, head dimension].
