"""The live view: plain lines where there is no terminal, a redrawn table where there is one, hostile text in
both."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

from torchspec.config import Config
from torchspec.live import Live

METRICS = {
    "reward/mean": 0.51234,
    "spec/accept_len": 2.5,
    "train/logprob_gap": 3e-6,
    "time/step": 1.23,
    "draft/loss": None,
}


def test_plain_lines(capsys):
    with Live(Config(), terminal=False) as live:
        for done in range(100):
            live.phase("rollout", done, 100)  # quick: not worth a line
        live.step(3, METRICS)
        live.sample("a \x1b[31m [red]text[/red] \x07")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "step 3/100  reward 0.512  accept len 2.50  logp gap 3.0e-06  seconds 1.2"
    assert out[1] == r"  a \x1b[31m [red]text[/red] \x07" and len(out) == 2


def test_a_long_phase_is_told_now_and_then(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("torchspec.live.time.monotonic", lambda: clock[0])
    with Live(Config(), terminal=False) as live:
        for done in range(0, 31):
            live.phase("warm start", done, 30, detail=f"loss {done}")
            clock[0] += 1
        live.phase("eval", 0, 5)
        clock[0] += 3
        live.phase("eval", 5, 5)
    assert capsys.readouterr().out.splitlines() == [
        "  warm start 10/30  10 s  loss 10",
        "  warm start 20/30  20 s  loss 20",
        "  warm start 30/30  30 s  loss 30",
    ]


def test_an_ascii_output_stands_any_text(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with Live(Config()) as live:
        assert live.terminal is False
        live.sample("caf\u00e9 \U0001f600 \ud800")
    assert raw.getvalue() == b"  caf\\xe9 \\U0001f600 \\ud800\n"


def test_a_terminal_gets_a_table_and_bars():
    code = (
        "from torchspec.config import Config\nfrom torchspec.live import Live\nc = Config()\nc.train.steps ="
        " 3\nwith Live(c) as live:\n  assert live.terminal\n  live.phase('warm start', 1, 2, detail='loss"
        " 1')\n  for s in (1, 2, 3):\n    live.phase('rollout', 5, 8)\n    print('from elsewhere', s)\n   "
        f" live.step(s, {METRICS!r} | {{'reward/mean': s}})\n    live.sample('[b]hi[/b] \\x1b[2J')\n"
    )
    master, slave = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=slave,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(slave)
    seen = b""
    try:
        while chunk := os.read(master, 65536):
            seen += chunk
    except OSError:
        pass  # the other end closed
    assert done.wait(timeout=60) == 0, done.stderr.read().decode()
    text = seen.decode()
    for words in ("reward", "accept len", "3.000", "steps", "3/3", "from elsewhere 2", "[b]hi[/b] \\x1b[2J"):
        assert words in text, words
    assert "\x1b[2J" not in text, "a response must not drive the terminal"
    assert "draft loss" in text and "eval" not in text
