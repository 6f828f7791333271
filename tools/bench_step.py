"""Where the time of an RL step goes, and what speculation buys: one table.

    python tools/bench_step.py train_configs/quickstart.toml --run outputs/quickstart
    python tools/bench_step.py train_configs/quickstart.toml --quick

With ``--run`` the steps go on from that run's newest checkpoint (its folder is only read), so that the draft is a
trained one; without it they start from random weights, whose draft is hardly ever accepted. The serving rows are the
same requests on the same weights with the draft and without it, alternating, medians.

Columns of ``--json``: phase, seconds (a step, median), share, speculation ("on" or "off"), and for the serving rows
tokens_per_s and accept_len; memory_peak_bytes on the row of the whole step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import tempfile
from pathlib import Path

from torchspec.collect import eval_seeds, sample_responses, spec_metrics
from torchspec.config_file import load_config
from torchspec.plugins import load_object

PHASES = ("rollout", "score", "policy", "draft", "optimizer", "refit")


def train_steps(config, run: Path | None, steps: int, folder: Path) -> list[dict]:
    """The metrics of ``steps`` RL steps, from the newest checkpoint of ``run`` or from the start."""
    done = 0
    if run is not None:
        from torchspec.checkpoint import complete_steps

        done = complete_steps(run / "checkpoints")[-1]
        shutil.copytree(run / "checkpoints" / f"step-{done}", folder / "checkpoints" / f"step-{done}")
    config = dataclasses.replace(
        config,
        output_dir=str(folder),
        train=dataclasses.replace(config.train, steps=done + steps),
        eval=dataclasses.replace(config.eval, every=0, items=0),
        checkpoint=dataclasses.replace(config.checkpoint, every=0, resume=run is not None),
        metrics=dataclasses.replace(config.metrics, tensorboard=False, wandb=False),
    )
    load_object(config.trainer)(config, folder).run()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def serve(config, folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Tokens per second on training prompts, with the draft and without it, alternating (vLLM serves one at a time)."""
    trainer = load_object(config.trainer)(config, folder)
    trainer.setup()
    drafts = {"on": trainer.draft, "off": None}
    rl = config.rl
    prompts = [trainer.prompts.next() for _ in range(rl.prompts_per_step * rl.samples_per_prompt)]
    speeds: dict[str, list[float]] = {"on": [], "off": []}
    accept = 1.0
    for _ in range(repeats):
        for name, trainer.draft in drafts.items():
            engine = trainer.build_engine()
            for _ in range(2):  # the first warms caches up
                samples, stats, seconds = sample_responses(
                    engine,
                    trainer.tokenizer,
                    prompts,
                    eval_seeds(config.seed, len(prompts)),
                    trainer.sampling,
                    deadline_s=config.rollout.deadline_s,
                )
            speeds[name].append(sum(len(s.completion.token_ids) for s in samples) / seconds)
            accept = spec_metrics(stats).get("spec/accept_len", accept)
            engine.close()
    return {
        name: {"tokens_per_s": statistics.median(values), "accept_len": accept if name == "on" else 1.0}
        for name, values in speeds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="train_configs/quickstart.toml")
    parser.add_argument("--run", type=Path, default=None, help="output folder of a run to go on from")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three steps without a warm start, one repeat")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    config = load_config(options.config)
    if options.quick:
        options.steps, options.repeats = 3, 1
        config = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, steps=0))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        steps = train_steps(config, options.run, options.steps, folder)
        served = serve(dataclasses.replace(config, output_dir=scratch), folder, options.repeats)
    steps = steps[1:] or steps  # the first step of a process is slower
    whole = statistics.median(s["time/step"] for s in steps)
    speculation = "on" if config.draft.enabled and config.rollout.num_speculative_tokens else "off"
    rows = []
    for phase in PHASES:
        seconds = statistics.median(s.get(f"time/{phase}", 0.0) for s in steps)
        rows.append({"phase": phase, "seconds": seconds, "share": seconds / whole, "speculation": speculation})
    rows.append(
        {"phase": "step", "seconds": whole, "share": 1.0, "speculation": speculation}
        | {"memory_peak_bytes": max(s["memory/peak_bytes"] for s in steps)}
    )
    rows += [{"phase": "serve", "speculation": name, **values} for name, values in served.items()]
    print(f"{'phase':<12}{'seconds':>10}{'share':>8}  {'speculation':<12}")
    for row in rows:
        if row["phase"] == "serve":
            print(
                f"{'serve':<12}{row['tokens_per_s']:>10.0f} tokens/s  {row['speculation']:<5} accept_len "
                f"{row['accept_len']:.2f}"
            )
        else:
            print(f"{row['phase']:<12}{row['seconds']:>10.3f}{row['share']:>8.1%}  {row['speculation']:<12}")
    print(
        f"speculation on / off: {served['on']['tokens_per_s'] / served['off']['tokens_per_s']:.2f} x tokens/s; "
        f"peak memory {rows[len(PHASES)]['memory_peak_bytes'] / 2**20:.0f} MiB"
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
