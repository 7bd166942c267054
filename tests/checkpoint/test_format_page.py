"""docs/reference/checkpoints.md: its Python reads a run of version 0.1 without deepnmt, to the logits of its model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepnmt.checkpoint.checkpoint import load_model
from deepnmt.tokens import BOS, EOS

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "run_of_0_1"


@torch.no_grad()
def test_the_page_reads_a_checkpoint_and_data(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "reference" / "checkpoints.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    folder = FIXTURE / "run" / "checkpoints" / "update-00000008"
    code = code.replace("runs/my/checkpoints/update-00001000", str(folder)).replace("data/my", str(FIXTURE / "data"))
    assert "deepnmt" not in re.sub(r"Path\(.*?\)", "", code)
    page: dict[str, Any] = {}
    exec(compile(code, "checkpoints.md", "exec"), page)
    assert capsys.readouterr().out.strip()

    loaded = load_model(folder)
    source, target = [*page["first"].tolist(), EOS], [BOS, 20, 30, 40]
    memory = loaded.model.encode(torch.tensor([source]), torch.tensor([len(source)]))
    hidden = loaded.model.decode(torch.tensor([target]), memory, torch.tensor([len(source)]))
    expected = loaded.model.logits(hidden)[0].numpy()
    possible = np.isfinite(expected)  # all but pad
    assert possible.sum() == expected.size - len(target)
    np.testing.assert_allclose(page["logits"](source, target)[possible], expected[possible], rtol=1e-4, atol=1e-4)
