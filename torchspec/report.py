"""report.html: one self-contained page of a run, from metrics.jsonl, samples.jsonl and config.toml.

Plots are matplotlib SVGs, inlined. They are drawn in two placeholder colours that CSS fills in, so that the
page follows the
reader's light or dark setting. One colour means one thing throughout: POLICY, DRAFT, SERVED (by vLLM), EVAL.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchspec.config import Config
from torchspec.config_file import config_from_toml, getattr_dotted, setting_names
from torchspec.files import write_atomically
from torchspec.metrics import read_rows

Rows = Sequence[Mapping[str, Any]]

POLICY, DRAFT, SERVED, EVAL, OTHER = "#4878cf", "#e8833a", "#3fa66b", "#c44e8a", "#8a8f98"
RAMP = (
    "#e8833a",
    "#d96c6c",
    "#b55f9e",
    "#7f6fc4",
    "#4d86c6",
    "#3a9ea5",
    "#4fae74",
    "#93ad4c",
)  # per pass, per position
INK, GRID = "#010203", "#040506"  # placeholders: replaced by var(--ink) and var(--grid)
PHASES = (
    ("rollout", SERVED),
    ("score", "#93ad4c"),
    ("policy", POLICY),
    ("draft", DRAFT),
    ("optimizer", "#7f6fc4"),
    ("refit", "#3a9ea5"),
    ("eval", EVAL),
    ("checkpoint", "#c9a227"),
)
LAST_SAMPLES = 12


def write_report(output_dir: str | Path) -> Path:
    """Write ``report.html`` of the run in ``output_dir`` and return its path.

    Works at any time, also while the run goes on. Raises RunError where a log is broken.
    """
    folder = Path(output_dir)
    rows = read_rows(folder / "metrics.jsonl")
    samples = read_rows(folder / "samples.jsonl")
    settings = folder / "config.toml"
    config = config_from_toml(settings.read_text(encoding="utf-8"), str(settings)) if settings.exists() else None
    path = folder / "report.html"
    write_atomically(path, page(folder.resolve().name, rows, samples, config))
    return path


# -- plots --------------------------------------------------------------------------------------------------


class Plot:
    """One figure: a title, one pair of axes with the step below, and helpers that skip metrics a run does not
    have."""

    def __init__(self, rows: Rows, title: str, ylabel: str) -> None:
        from matplotlib.figure import Figure

        self.rows, self.title, self.ylabel = rows, title, ylabel
        self.figure = Figure(figsize=(5.6, 3.1))  # fixed margins: matplotlib's layout engines draw everything twice
        self.figure.subplots_adjust(left=0.125, right=0.985, bottom=0.155, top=0.905)
        self.axes = self.figure.add_subplot()
        self.drawn = False

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values of a metric where it has one."""
        pairs = [(row["step"], row[name]) for row in self.rows if isinstance(row.get(name), (int, float))]
        return [s for s, _ in pairs], [float(v) for _, v in pairs]

    def line(
        self, name: str, label: str, colour: str, *, smooth: bool = False, marks: bool = False, **style: Any
    ) -> None:
        """A metric over steps; ``smooth`` adds its running mean and pales the raw values."""
        steps, values = self.series(name)
        if not values:
            return
        self.drawn = True
        mark = "o" if marks or len(values) == 1 else None
        style = {"linewidth": 1.6, "markersize": 4.5, **style}
        if smooth and len(values) >= 10:
            self.axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
            values = running_mean(values, max(3, len(values) // 20))
        self.axes.plot(steps, values, color=colour, label=label, marker=mark, **style)

    def log_scale(self) -> None:
        """A logarithmic axis where the values are positive and span more than a factor of twenty."""
        values = [float(v) for drawn in self.axes.get_lines() for v in drawn.get_ydata()]
        if values and min(values) > 0 and max(values) > 20 * min(values):
            self.axes.set_yscale("log")

    def finish(self, legend_beside: bool = False) -> str:
        """The SVG, or '' where nothing was drawn."""
        if not self.drawn:
            return ""
        axes = self.axes
        axes.set_title(self.title, loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.set_xlabel("step", color=INK)
        axes.set_ylabel(self.ylabel, color=INK)
        axes.tick_params(which="both", colors=INK, labelsize=8.5, length=3)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.margins(x=0.02)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")  # no "1e-7" above the axis
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(INK)
        handles = axes.get_legend_handles_labels()[1]
        if handles:
            if legend_beside:
                self.figure.subplots_adjust(right=0.79)
            place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "reverse": True} if legend_beside else {}
            axes.legend(frameon=False, fontsize=8, labelcolor=INK, handlelength=1.4, **place)
        return to_svg(self.figure, self.title)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the ``width`` - 1 before it."""
    return [
        sum(values[max(0, i + 1 - width) : i + 1]) / len(values[max(0, i + 1 - width) : i + 1])
        for i in range(len(values))
    ]


def to_svg(figure: Any, title: str) -> str:
    """The figure as an inline <svg>: text stays text, ids are the title's own, colours follow the page."""
    import matplotlib

    buffer = io.StringIO()
    style = {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<svg ", f'<svg role="img" aria-label="{html.escape(title, quote=True)}" ', text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r" font-family: [^;\"]*;", "", text)  # the page's own font
    return text.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")


def numbered(rows: Rows, prefix: str) -> list[int]:
    """The numbers k of the metrics ``prefix``k."""
    names = {name for row in rows for name in row if name.startswith(prefix)}
    return sorted(int(name[len(prefix) :]) for name in names if name[len(prefix) :].isdigit())


def plot_reward(rows: Rows) -> str:
    plot = Plot(rows, "Reward", "reward")
    plot.line("reward/mean", "rollouts", POLICY, smooth=True)
    plot.line("eval/reward", "held-out items", EVAL, marks=True)
    return plot.finish()


def plot_acceptance(rows: Rows) -> str:
    plot = Plot(rows, "Acceptance length", "tokens per verification")
    plot.line("spec/accept_len", "served, rollouts", SERVED, smooth=True)
    plot.line("eval/accept_len", "served, held-out items", EVAL, marks=True)
    plot.line("draft/expected_accept_len", "expected in training", DRAFT, linestyle="--")
    return plot.finish()


def plot_positions(rows: Rows) -> str:
    plot = Plot(rows, "Acceptance by position", "share of drafts accepted up to it")
    for position in numbered(rows, "spec/accept_rate_pos_"):
        plot.line(f"spec/accept_rate_pos_{position}", f"token {position + 1}", RAMP[position % len(RAMP)])
    plot.axes.set_ylim(0, 1.02)
    return plot.finish()


def plot_draft_loss(rows: Rows) -> str:
    plot = Plot(rows, "Draft loss", "loss")
    passes = numbered(rows, "draft/loss_pass_")
    for k in passes:
        plot.line(f"draft/loss_pass_{k}", f"pass {k}", RAMP[k % len(RAMP)], linewidth=1.1)
    plot.line("draft/loss", "all passes" if passes else "", OTHER, linewidth=2.2)
    return plot.finish()


def plot_top1(rows: Rows) -> str:
    plot = Plot(rows, "Draft's first choice is the policy's", "share of tokens")
    for k in numbered(rows, "draft/top1_pass_"):
        plot.line(f"draft/top1_pass_{k}", f"pass {k}", RAMP[k % len(RAMP)])
    plot.axes.set_ylim(0, 1.02)
    return plot.finish()


def plot_gap(rows: Rows) -> str:
    plot = Plot(rows, "Log-probability gap, engine against trainer", "|difference|")
    plot.line("train/logprob_gap", "largest", POLICY)
    plot.line("train/logprob_gap_mean", "mean", POLICY, linestyle=":")
    plot.log_scale()
    return plot.finish()


def plot_entropy(rows: Rows) -> str:
    plot = Plot(rows, "Policy", "nats, shares")
    plot.line("policy/entropy", "entropy", POLICY, smooth=True)
    for name, label, colour in (
        ("policy/kl", "KL to the start", OTHER),
        ("policy/clip_fraction", "clipped share", DRAFT),
    ):
        if any(plot.series(name)[1]):  # zero throughout: not in use
            plot.line(name, label, colour)
    return plot.finish()


def plot_gradients(rows: Rows) -> str:
    plot = Plot(rows, "Gradient norms, before clipping", "norm")
    plot.line("policy/grad_norm", "policy", POLICY, smooth=True)
    plot.line("draft/grad_norm", "draft", DRAFT, smooth=True)
    plot.log_scale()
    return plot.finish()


def plot_length(rows: Rows) -> str:
    plot = Plot(rows, "Response length", "tokens")
    plot.line("rollout/length_mean", "mean", POLICY)
    plot.line("rollout/length_max", "longest", OTHER, linestyle=":")
    return plot.finish()


def plot_speed(rows: Rows) -> str:
    plot = Plot(rows, "Rollout speed", "tokens/s")
    plot.line("rollout/tokens_per_s", "", SERVED, smooth=True)
    plot.axes.set_ylim(bottom=0)
    return plot.finish()


def plot_phases(rows: Rows) -> str:
    """Seconds of each phase of a step, stacked; what no phase claims is 'other'."""
    plot = Plot(rows, "Seconds per phase", "seconds")
    rows = [row for row in rows if isinstance(row.get("time/step"), (int, float))]
    if not rows:
        return ""
    steps = [row["step"] for row in rows]
    stacks, colours, labels = [], [], []
    for name, colour in PHASES:
        values = [row.get(f"time/{name}") or 0.0 for row in rows]
        if any(values):
            stacks.append(values)
            colours.append(colour)
            labels.append(name)
    # The time to save comes after a step's own clock has stopped.
    inside = (
        [
            sum(v for v, name in zip(column, labels, strict=True) if name != "checkpoint")
            for column in zip(*stacks, strict=True)
        ]
        if stacks
        else [0.0] * len(rows)
    )
    stacks.append([max(0.0, row["time/step"] - claimed) for row, claimed in zip(rows, inside, strict=True)])
    colours.append(OTHER)
    labels.append("other")
    if len(rows) > 40:
        plot.axes.stackplot(steps, *stacks, colors=colours, labels=labels, linewidth=0, step="mid")
    else:
        base = [0.0] * len(rows)
        for values, colour, label in zip(stacks, colours, labels, strict=True):
            plot.axes.bar(steps, values, width=0.8, bottom=base, color=colour, label=label, linewidth=0)
            base = [b + v for b, v in zip(base, values, strict=True)]
    plot.drawn = True
    return plot.finish(legend_beside=True)


PLOTS: tuple[Callable[[Rows], str], ...] = (
    plot_reward,
    plot_acceptance,
    plot_positions,
    plot_draft_loss,
    plot_top1,
    plot_speed,
    plot_phases,
    plot_gap,
    plot_entropy,
    plot_gradients,
    plot_length,
)


# -- page ---------------------------------------------------------------------------------------------------


def page(name: str, rows: Rows, samples: Rows, config: Config | None) -> str:
    """The whole page as text; everything that comes from the run is escaped."""
    if rows:
        plots = "\n".join(f"<figure>{svg}</figure>" for svg in (draw(rows) for draw in PLOTS) if svg)
        body = f"<div class=tiles>{tiles(rows)}</div>\n<div class=plots>{plots}</div>"
    else:
        body = "<p>No step has been finished yet.</p>"
    title = html.escape(name)
    steps = f"{len(rows)} steps" if len(rows) != 1 else "1 step"
    return (
        f'<!doctype html>\n<html lang=en><head><meta charset="utf-8"><title>{title} -'
        " TorchSpec</title>\n<meta name=viewport"
        f' content="width=device-width"><style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1><p'
        " class=sub>TorchSpec,"
        f" {steps}</p>\n{body}\n{sample_table(samples)}\n{settings_table(config)}\n</body></html>\n"
    )


def tiles(rows: Rows) -> str:
    """The run in a few numbers: first -> last value, or a total."""

    def ends(name: str, form: str) -> str | None:
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float))]
        if not values:
            return None
        return (
            form.format(values[-1])
            if len(values) == 1
            else f"{form.format(values[0])} &rarr; {form.format(values[-1])}"
        )

    def total(name: str) -> float:
        return sum(row[name] for row in rows if isinstance(row.get(name), (int, float)))

    gaps = [row["train/logprob_gap"] for row in rows if isinstance(row.get("train/logprob_gap"), (int, float))]
    numbers = [
        ("Held-out reward", ends("eval/reward", "{:.3f}")),
        ("Rollout reward", ends("reward/mean", "{:.3f}")),
        ("Acceptance length, served", ends("spec/accept_len", "{:.2f}")),
        ("First token accepted", ends("spec/accept_rate_pos_0", "{:.0%}")),
        ("Draft loss", ends("draft/loss", "{:.3f}")),
        ("Largest log-probability gap", f"{max(gaps):.1e}" if gaps else None),
        ("Rollout speed, tokens/s", ends("rollout/tokens_per_s", "{:,.0f}")),
        ("Sampled tokens", f"{total('rollout/tokens'):,.0f}" if total("rollout/tokens") else None),
        (
            "Steps skipped for NaN or Inf",
            ends("skipped/steps", "{:.0f}") if rows[-1].get("skipped/steps") else None,
        ),
        ("Time in steps", duration(total("time/step")) if total("time/step") else None),
    ]
    return "".join(f"<div class=tile><b>{value}</b><span>{label}</span></div>" for label, value in numbers if value)


def duration(seconds: float) -> str:
    """12 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def sample_table(samples: Rows) -> str:
    """The last step's samples."""
    if not samples:
        return ""
    last = samples[-1]["step"]
    chosen = [row for row in samples if row["step"] == last][:LAST_SAMPLES]
    columns = [
        ("prompt", "prompt"),
        ("response", "response"),
        ("answer", "answer"),
        ("reward", "reward"),
        ("advantage", "advantage"),
        ("finish_reason", "finished"),
        ("accepted", "accept length"),
    ]
    columns = [(key, label) for key, label in columns if any(row.get(key) is not None for row in chosen)]
    head = "".join(f"<th>{label}</th>" for _, label in columns)
    body = "".join("<tr>" + "".join(_sample_cell(row, key) for key, _ in columns) + "</tr>" for row in chosen)
    return (
        f"<h2>Samples of step {last}</h2><div class=wide><table class=samples><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _sample_cell(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "accepted" and row.get("drafts"):
        return f"<td class=number>{1 + value / row['drafts']:.2f}</td>"
    if isinstance(value, float):
        return f"<td class=number>{value:.3f}</td>"
    if isinstance(value, (list, dict)):
        value = json.dumps(value, ensure_ascii=False)
    return f"<td class=text>{html.escape('' if value is None else str(value))}</td>"


def settings_table(config: Config | None) -> str:
    """Every setting; those that differ from the default are bold."""
    if config is None:
        return ""
    default = Config()
    sections: dict[str, list[str]] = {}
    for name in setting_names():
        value = getattr_dotted(config, name)
        if hasattr(value, "__dataclass_fields__"):
            continue
        table, _, field = name.rpartition(".")
        changed = " class=changed" if value != getattr_dotted(default, name) else ""
        shown = html.escape(json.dumps(value, ensure_ascii=False))
        sections.setdefault(table, []).append(f"<tr{changed}><td>{html.escape(field)}</td><td>{shown}</td></tr>")
    return (
        "<h2>Settings</h2><p class=sub>Bold where they differ from the default.</p><div class=settings>"
        + "".join(
            f"<table><caption>{html.escape(table or 'run')}</caption>{''.join(lines)}</table>"
            for table, lines in sections.items()
        )
        + "</div>"
    )


STYLE = """
:root { color-scheme: light dark; --ink: #3a4048; --grid: #e3e6ea; --paper: #ffffff; --card: #f6f7f9; --faint:
#737b86; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #c9cfd8; --grid: #343a43; --paper: #16191e; --card: #1e2228; --faint: #8d96a3; } }
body { font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1240px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { margin: 0; font-size: 1.7rem } h2 { margin: 2.2rem 0 .4rem; font-size: 1.2rem } .sub { margin: 0 0 1rem;
color: var(--faint) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: .7rem; margin:
1.2rem 0 }
.tile { background: var(--card); border-radius: 8px; padding: .7rem .9rem } .tile b { display: block;
font-size: 1.15rem;
  font-variant-numeric: tabular-nums; white-space: nowrap } .tile span { color: var(--faint); font-size:
  .85rem }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: .9rem }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: .6rem } figure svg { width: 100%;
height: auto; display: block }
table { border-collapse: collapse; font-size: .86rem; width: 100% } caption { text-align: left; font-weight:
600; padding: .2rem 0 }
th { text-align: left; color: var(--faint); font-weight: 600 } td, th { padding: .22rem .6rem .22rem 0;
vertical-align: top;
  border-bottom: 1px solid var(--grid) } .wide { overflow-x: auto }
.samples .text { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .8rem; white-space:
pre-wrap;
  overflow-wrap: anywhere; min-width: 4rem } .number { font-variant-numeric: tabular-nums; white-space: nowrap
  }
.settings { columns: 3 320px; column-gap: 2rem } .settings table { break-inside: avoid; margin-bottom: 1rem }
.settings td { overflow-wrap: anywhere } .settings td:first-child { white-space: nowrap; color: var(--faint);
width: 45% }
.changed td, .settings .changed td:first-child { font-weight: 600; color: var(--ink) }
"""
