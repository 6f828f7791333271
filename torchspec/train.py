"""The command: ``torchspec train | eval | export | report``. Errors are caught here, once.

Exit status: 0 done, 1 the run failed, 2 the config or the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torchspec.errors import ConfigError, Interrupted, RunError

USAGE = """\
TorchSpec: reinforcement learning of a policy and, beside it, of its draft; rollouts by vLLM.

  torchspec train CONFIG.toml [--setting value ...]        train; `torchspec train --help` lists every setting
  torchspec train CONFIG.toml --checkpoint.resume          go on from the newest checkpoint
  torchspec eval CONFIG.toml --policy DIR [--draft DIR]    serve both on held-out items: reward, acceptance
  torchspec export RUN [--step N] --to DIR                 write policy/ and draft/ of a checkpoint, for vLLM
  torchspec report RUN                                     write RUN/report.html anew
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status and never raises, but for tyro's and argparse's own
    SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if args else 2
    commands = {"train": train, "eval": evaluate, "export": export, "report": report}
    if args[0] not in commands:
        return _say(f"'{args[0]}' is no command; it can be {', '.join(commands)}.", 2)
    scene = Scene()
    try:
        commands[args[0]](args[1:], scene)
        return 0
    except ConfigError as error:
        return _fail(error, str(error), 2, scene)
    except Interrupted as error:
        return _say(str(error), 130)
    except KeyboardInterrupt:
        return _say("Interrupted.", 130)
    except RunError as error:
        return _fail(error, str(error), 1, scene)
    except Exception as error:  # anything unforeseen: one line here, all of it in error.log
        return _fail(error, f"{type(error).__name__}: {error}", 1, scene)


class Scene:
    """Where a failure leaves its traceback: the run's output folder, once it is known and ours."""

    output_dir: Path | None = None


def _say(sentence: str, status: int) -> int:
    sys.stdout.flush()
    print(f"torchspec: {sentence}", file=sys.stderr, flush=True)
    return status


def _fail(error: BaseException, sentence: str, status: int, scene: Scene) -> int:
    """The sentence to stderr and the traceback to error.log; where there is no folder for it, to stderr if it
    helps."""
    text = "".join(traceback.format_exception(error))
    rank, world = _ranks()
    if world > 1:
        sentence = f"rank {rank}: {sentence}"
    if scene.output_dir is not None:
        log = scene.output_dir / _error_log(rank)
        try:
            log.write_text(text, encoding="utf-8")
            return _say(f"{sentence}\n(traceback: {log})", status)
        except OSError as problem:
            sentence += f"\n(error.log could not be written: {problem})"
            return _say(f"{sentence}\n{text}", status)
    if not isinstance(error, (ConfigError, RunError)):
        sentence = f"{sentence}\n{text}"
    return _say(sentence, status)


def _ranks() -> tuple[int, int]:
    """This process's rank and their number, as torchrun tells them."""
    world = int(os.environ.get("WORLD_SIZE") or 1)
    return (int(os.environ.get("RANK") or 0) if world > 1 else 0), world


def _error_log(rank: int) -> str:
    return f"error-rank{rank}.log" if rank else "error.log"


# -- train --------------------------------------------------------------------------------------------------


def train(args: list[str], scene: Scene) -> None:
    """``torchspec train CONFIG.toml [overrides]``: settings first, then everything heavy."""
    from torchspec.config_file import config_to_toml, load_config, overlay

    if any(a in ("-h", "--help") for a in args) and (not args or args[0].startswith("-")):
        from torchspec.config import Config

        overlay(Config(), ["--help"])  # leaves through SystemExit(0)
    path, overrides = _config_argument(args, "train")
    config = load_config(path, overrides, prog=f"torchspec train {path}")
    text = config_to_toml(config)

    from torchspec.installation import check_installation

    check_installation()
    output_dir = Path(config.output_dir)
    rank, world = _ranks()
    # Rank 0 owns the folder; if it is refused here, torchrun ends the other ranks.
    lock = _open_folder(output_dir, config.checkpoint.resume) if rank == 0 else nullcontext()
    with lock:
        scene.output_dir = output_dir
        (output_dir / _error_log(rank)).unlink(missing_ok=True)
        if rank == 0:  # before the seconds that importing torch takes
            print(f"TorchSpec: {path} -> {output_dir}", flush=True)
        from torchspec.plugins import load_object

        trainer_class = load_object(config.trainer)
        try:
            with _settings_written(output_dir, text) if rank == 0 else nullcontext():
                trainer_class(config, output_dir).run()
        except Interrupted as error:
            if rank > 0:
                raise Interrupted("Stopped with the other ranks; rank 0 prints the command that goes on.") from error
            if not _checkpoints(output_dir):
                raise
            resume = [arg for arg in overrides if arg != "--checkpoint.resume"] + ["--checkpoint.resume"]
            raise Interrupted(f"{error}\n  {shlex.join([*_program(world), 'train', path, *resume])}") from error
    if rank == 0:
        print(f"Done. Everything is in {output_dir}; look at {output_dir / 'report.html'}.", flush=True)


def _checkpoints(folder: Path) -> list[str]:
    """Names of the complete checkpoints of the run in ``folder``."""
    return sorted(path.parent.name for path in folder.glob("checkpoints/step-*/COMPLETE"))


@contextmanager
def _settings_written(folder: Path, text: str) -> Iterator[None]:
    """config.toml says what the newest checkpoint was made with: a resume that fails before it has made one
    of its own puts the earlier file back, so that the run can still be exported."""
    from torchspec.files import write_atomically

    path = folder / "config.toml"
    earlier = path.read_text(encoding="utf-8") if path.exists() else None
    known = _checkpoints(folder)
    write_atomically(path, text)
    try:
        yield
    except BaseException:
        if earlier is not None and _checkpoints(folder) == known:
            write_atomically(path, earlier)
        raise


def _program(world: int = 1) -> list[str]:
    """How the user can call this program again: by name where the PATH finds it, else by its path."""
    if world > 1:
        return [
            "torchrun",
            "--nproc-per-node",
            os.environ.get("LOCAL_WORLD_SIZE", str(world)),
            "--module",
            "torchspec.train",
        ]
    called = sys.argv[0]
    if Path(called).name != "torchspec" or shutil.which("torchspec") == called:
        return ["torchspec"]
    return [min(called, os.path.relpath(called), key=len)]


def _config_argument(args: list[str], command: str) -> tuple[str, list[str]]:
    if not args or args[0].startswith("-"):
        raise ConfigError(
            f"Name a config file first: torchspec {command} CONFIG.toml [--setting value ...]; "
            "train_configs/quickstart.toml is one."
        )
    return args[0], args[1:]


def _open_folder(folder: Path, resume: bool):
    """Make the output folder and hold its lock; refuse to write over an earlier run. Returns the open lock
    file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        raise ConfigError(f"output_dir = '{folder}' cannot be written: {error}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the kernel whenever this process ends
    except OSError:
        lock.close()
        raise ConfigError(
            f"output_dir = '{folder}' is being written by another run that is still alive; stop that one, or "
            "give this one its own --output-dir."
        ) from None
    # A run that was stopped before its first checkpoint has none of these, and may simply be started again.
    earlier = [n for n in ("metrics.jsonl", "samples.jsonl", "policy", "draft") if (folder / n).exists()]
    earlier += _checkpoints(folder)
    if earlier and not resume:
        lock.close()
        raise ConfigError(
            f"output_dir = '{folder}' already holds a run ({', '.join(earlier)}); go on with it by "
            "--checkpoint.resume, or give this one its own --output-dir, or remove the folder."
        )
    return lock


# -- eval, export, report -----------------------------------------------------------------------------------


def evaluate(args: list[str], scene: Scene) -> None:
    """``torchspec eval CONFIG.toml --policy DIR [--draft DIR] [overrides]``."""
    parser = argparse.ArgumentParser(
        prog="torchspec eval",
        allow_abbrev=False,
        description=(
            "Serve a policy, with a draft or alone, in vLLM on the environment's held-out items, and print"
            " reward, acceptance and tokens/s. Any setting of `torchspec train --help` can follow as an"
            " override."
        ),
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="settings: environment, eval, rollout")
    parser.add_argument("--policy", required=True, metavar="DIR", help="Hugging Face folder of the policy")
    parser.add_argument("--draft", default="", metavar="DIR", help="folder of the draft; without it: no speculation")
    options, overrides = parser.parse_known_args(args)
    from torchspec.config_file import ONE_RANK, load_config

    config = load_config(options.config, [*overrides, *ONE_RANK], prog="torchspec eval CONFIG.toml")
    for flag, folder in (("--policy", options.policy), ("--draft", options.draft)):
        if folder and not (Path(folder) / "config.json").is_file():
            raise ConfigError(f"{flag} {folder} is not a Hugging Face folder: it has no config.json.")
    from torchspec.installation import check_installation

    check_installation()
    from torchspec.evaluate import evaluate as run_evaluation

    run_evaluation(config, policy=options.policy, draft=options.draft)


def export(args: list[str], scene: Scene) -> None:
    """``torchspec export RUN [--step N] --to DIR [--dtype D]``; RUN is an output folder or a config that
    names one."""
    parser = argparse.ArgumentParser(
        prog="torchspec export",
        allow_abbrev=False,
        description="Write policy/ and draft/ of a checkpoint as folders that vLLM loads.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="output folder of a run, or the config file that it was started from"
    )
    parser.add_argument("--step", type=int, default=None, metavar="N", help="checkpoint; the newest without this")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to make policy/ and draft/ in")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    options = parser.parse_args(args)
    run_dir = run_folder(options.run)
    from torchspec.export import export as run_export

    run_export(run_dir, options.step, Path(options.to), options.dtype)


def report(args: list[str], scene: Scene) -> None:
    """``torchspec report RUN``."""
    parser = argparse.ArgumentParser(
        prog="torchspec report",
        allow_abbrev=False,
        description="Write report.html from a run's metrics.jsonl, samples.jsonl, config.toml.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="output folder of a run, or the config file that it was started from"
    )
    options = parser.parse_args(args)
    run_dir = run_folder(options.run)
    from torchspec.report import write_report

    print(write_report(run_dir))


def run_folder(name: str) -> Path:
    """The output folder that ``name`` means: itself, or the output_dir of that config file."""
    path = Path(name)
    if path.is_file():
        from torchspec.config_file import config_from_toml, read_text

        config = config_from_toml(read_text(path), name)
        path = Path(config.output_dir or Path("outputs") / path.stem)
    if not path.is_dir():
        raise ConfigError(f"There is no run in {path}: it is not a folder.")
    return path


if __name__ == "__main__":
    sys.exit(main())
