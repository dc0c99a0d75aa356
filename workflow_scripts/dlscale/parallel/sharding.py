"""Names of a model's modules that devices divide or gather (without PyTorch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """Names of modules by which devices divide a study's model; `*` stands for one part of a name.

    `units` are for FSDP. The other fields are for models of tokens [B, N, E], which tensor- and context-parallel
    devices divide between `first` and `last`.
    """

    units: Sequence[str] = ()  #: Modules: FSDP gathers the weights of each at once.
    tokens: int = 0  #: Number of tokens, N.
    first: str = ""  #: Module that returns all tokens; devices divide them after it.
    last: str = ""  #: Module that computes one output per token; its outputs are gathered.
    gather: Sequence[str] = ()  #: Modules that contain `columns` and `rows`, and take all tokens as input.
    columns: Sequence[str] = ()  #: Linear layers divided by outputs: each device computes some of them.
    rows: Sequence[str] = ()  #: Linear layers divided by inputs (outputs of `columns`); partial outputs are summed.
    attend: Sequence[str] = ()  #: Modules that take queries, keys and values [B, heads, N, head dimension].
