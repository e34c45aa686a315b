"""`vgrout NAME …`; alone it lists the commands.

Nothing heavy is imported here.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import vgrout
from vgrout.config.cli import cli_exit, leave
from vgrout.ground.io import nearest

# each command: where its function is, and a line on it
COMMANDS = {
    "train": (
        "vgrout.train:main",
        "one GRPO run: PRESET (smoke, mini, small, sums, fast, full) and flags; --dry-run says what it would do",
    ),
    "evaluate": (
        "vgrout.commands.evaluate:evaluate",
        "score a run's adapter again, on its own held-out problems or on a file",
    ),
    "sample": (
        "vgrout.commands.evaluate:sample",
        "what a run's untrained, trained and deployed model answer to one prompt",
    ),
    "export": (
        "vgrout.export.__main__:main",
        "for other programs: a Hugging Face or PEFT folder, an inspect_ai log",
    ),
    "sweep": (
        "vgrout.sweep.__main__:main",
        "every run of a study file: planned, resumable, one per core",
    ),
    "report": (
        "vgrout.report.__main__:main",
        "finished runs as tables with intervals, figures and a page to read rollouts in; --judge: verdicts",
    ),
    "scorecard": (
        "vgrout.scorecard.__main__:main",
        "how good an intervention or a monitor is: the recorded table of ours, and yours beside it",
    ),
    "direction": (
        "vgrout.direction.__main__:main",
        "extract a hack direction from contrastive pairs, and say how good it is",
    ),
    "teacher": (
        "vgrout.teacher.__main__:main",
        "make a pool of a teacher's own answers",
    ),
    "substrate": (
        "vgrout.teacher.substrate:main",
        "make a pool by elicit-then-strip, one hack per problem",
    ),
    "distill": (
        "vgrout.commands.distill:main",
        "imitate a teacher: MiniLLM, or ULD across tokenizers",
    ),
    "iterative_dpo": (
        "vgrout.commands.iterative_dpo:main",
        "preference rounds against a scorer",
    ),
    "problems": (
        "vgrout.commands.check:problems",
        "check a problem file before anything is trained on it",
    ),
    "grade": (
        "vgrout.commands.check:grade",
        "grade answers offline, with the trainer's own grader",
    ),
    "organism": (
        "organisms.__main__:main",
        "build, tune or verify a model organism: the embedded miniature, or a pretrained model on code or sums; give "
        "one problems whose hacks read like honest answers",
    ),
    "download": (
        "vgrout.commands.download:main",
        "the models of small, sums, fast and full, and problem files",
    ),
    "doctor": (
        "vgrout.commands.doctor:main",
        "the sandbox's layers on this machine, and a self-test of the grader",
    ),
}


def listing() -> str:
    """The commands with a line on each."""
    width = max(map(len, COMMANDS))
    lines = ["usage: vgrout NAME …   (vgrout NAME --help says more)", ""]
    lines += [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(lines)


def _show(text: str) -> int:
    def show() -> int:
        print(text, flush=True)
        return 0

    return cli_exit(show)


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 listed · 2 no such command · else the command's own."""
    words = sys.argv[1:] if argv is None else argv
    name, *rest = words or ["--help"]
    if name in ("-h", "--help", "help", "--version"):
        return _show(f"vgrout {vgrout.__version__}" if name == "--version" else listing())
    if name not in COMMANDS:
        meant = nearest(name, COMMANDS)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(COMMANDS)}"
        print(f"E vgrout {name}: no such command; {hint}", file=sys.stderr)
        return 2
    if name == "organism":  # beside src/, and not in the wheel
        clone = Path(__file__).resolve().parents[2]
        if not (clone / "organisms").is_dir():
            print("E vgrout organism: runs in a clone of the repository alone", file=sys.stderr)
            return 2
        sys.path.insert(0, str(clone))
    module, _, function = COMMANDS[name][0].partition(":")
    sys.argv = [f"vgrout {name}", *rest]

    def run() -> int:
        return getattr(import_module(module), function)()

    return cli_exit(run)


def program() -> NoReturn:
    leave(main())


if __name__ == "__main__":
    program()
