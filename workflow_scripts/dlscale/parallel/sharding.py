"""Names of the modules at which devices shard a model, and divide or gather its tokens.

This file does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """Names of modules by which devices divide a study's model; `*` matches one part of a dotted name.

    FSDP uses `units`. The other fields are for models of tokens [B, N, E]: tensor- and context-parallel devices divide
    the part of the model between `first` and `last`.
    """

    units: Sequence[str] = ()  #: Modules that FSDP shards separately: all weights of one module are gathered together.
    tokens: int = 0  #: Number of tokens, N.
    first: str = ""  #: Module that returns all tokens; devices divide the tokens after this module.
    last: str = ""  #: Module that computes one output per token; devices gather the outputs after this module.
    #: Modules that contain `columns` and `rows`; the tokens in their first argument are gathered before these modules.
    gather: Sequence[str] = ()
    columns: Sequence[str] = ()  #: Linear layers sharded by outputs: each device computes some of the outputs.
    rows: Sequence[str] = ()  #: Linear layers sharded by inputs (outputs of `columns`); partial outputs are summed.
    #: Modules that take queries, keys and values [B, heads, N, head dimension]. Further arguments, such as a mask of
    #: keys, must be for all tokens, and must not have an axis of queries.
    attend: Sequence[str] = ()
