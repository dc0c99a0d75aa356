"""Leaks, peaks outside of training, and recompilations are named; a clean program causes no such finding."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dlscale.config.places import MEASURED
from dlscale.extensions.vitals.records import FILE, Vitals
from dlscale.report.evidence import Finding
from dlscale.report.verdict import judge_run
from dlscale.results import read_alone
from tests.conftest import ROOT

#: Causes of this extension.
OURS = ("leak", "peak", "recompilation", "breaks")

#: Program of three epochs with validations; its argument is the defect.
PROGRAM = """
    import sys, time, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    defect, kept, cache = sys.argv[1], [], {}
    data = TensorDataset(torch.randn(400, 32), torch.randn(400, 8))
    train, valid = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=100)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def scaled(x, factor):
        return x * factor.bit_length()

    def printed(x):
        y = x + 1
        print(end="")
        return y * 2

    fixed = torch.compile(scaled, backend="eager", dynamic=False)
    broken = torch.compile(printed, backend="eager")
    for epoch in range(3):
        for step, (x, y) in enumerate(train):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if defect == "leak":
                kept.append(torch.ones(25_000))
            elif defect == "clean":
                cache.setdefault(step, torch.ones(500_000))
            elif defect == "size":
                fixed(torch.ones(2 + step), 1)
            elif defect == "number":
                fixed(torch.ones(2), 2 ** step)
            elif defect == "breaks":
                broken(x)
            time.sleep(0.005)
        with torch.no_grad():
            for x, y in valid:
                model(x)
                if defect == "peak":
                    torch.ones(25_000_000).sum()
"""


def measure(folder: Path, defect: str) -> str:
    """Measure the program with a defect; return what `dlscale measure` prints."""
    (folder / "train.py").write_text(textwrap.dedent(PROGRAM))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "workflow_scripts"), "DLSCALE_STEPS_EVERY": "0.05"}
    command = [sys.executable, "-m", "dlscale", "measure", "--", sys.executable, "train.py", defect]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stderr


def findings(folder: Path) -> dict[str, Finding]:
    """Return the findings of this extension for the measured program, by cause."""
    found = judge_run(read_alone(folder / "results/plans" / MEASURED / "train")).findings
    return {each.cause: each for each in found if each.cause in OURS}
