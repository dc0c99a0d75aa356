"""Names in a study's model by which devices may share it (no PyTorch here)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """Names of modules in a study's model, by which devices share it; `*` stands for one part of a name.

    `units` are for FSDP; the rest is for models of tokens [B, N, E], which tensor- and context-parallel devices share
    between `first` and `last`. There they divide the tokens; `gather` sees those of all tensor-parallel devices, each
    of which computes some of the outputs of `columns` and takes some of the inputs of `rows`.
    """

    units: Sequence[str] = ()  #: The modules whose weights are put together at once.
    tokens: int = 0  #: N.
    first: str = ""  #: Module that leaves all tokens.
    last: str = ""  #: Module that computes an output of each token; all that follows sees the outputs of all.
    gather: Sequence[str] = ()  #: Modules with `columns` and `rows` in them: their input is that of all tokens.
    columns: Sequence[str] = ()  #: Linear layers of which each device computes a part of the outputs.
    rows: Sequence[str] = ()  #: Linear layers that each take this part as input; their outputs are summed.
    attend: Sequence[str] = ()  #: Modules that take queries, keys, values [B, heads, N, head dimension].
