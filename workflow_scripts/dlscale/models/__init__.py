"""Pure `nn.Module`s: no I/O, no globals, no distributed code."""
