"""`python studies/styles.py RUN…`: how many right answers each monitor in shadow flags, by their style, as the monitors
stood at the end of the run. CSV on standard output.

The answers are to held-out problems; a style is unseen if no corpus, demonstration or known correct answer has it.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vgrout.config.run import from_dict
from vgrout.data.language import HELD_OUT_STYLES, MODES, STYLES, Answer, answer, hinted, problem_tasks
from vgrout.files import read_json
from vgrout.inputs import read_inputs
from vgrout.loading import load_policy
from vgrout.method import Setup, make_monitor
from vgrout.method.base import Monitor
from vgrout.model.policy import Policy
from vgrout.runs import checkpoint
from vgrout.types import GroupView, OracleView

NEED_TESTS = ("twin",)  # is about the tests, not about the text
ALL = {"plain": lambda a: a, **STYLES, **HELD_OUT_STYLES}


def monitors(run: Path) -> tuple[Policy, dict[str, Monitor], float]:
    """The policy, the monitors in shadow with the state of the last checkpoint, and the reward of a right answer."""
    cfg = from_dict(read_json(run / "run.json")["config"])
    setup = Setup(cfg, policy := load_policy(cfg), read_inputs(cfg))
    point, _ = checkpoint.latest(run)
    found = {}
    for name in cfg.method.in_shadow:
        if name not in NEED_TESTS:
            found[name] = make_monitor(setup, name)
            at = f"shadow/{name}/"
            state = point.state["method"]
            found[name].load_state_dict({k.removeprefix(at): v for k, v in state.items() if k.startswith(at)})
    return policy, found, cfg.env.pass_reward


def views(organism: Path, policy: Policy, style: str, reward: float) -> list[OracleView]:
    """One right answer in this style to each validation problem that it changes; all are rewarded."""
    made = read_json(organism / "manifest.json")
    out = []
    for task, row in problem_tasks(made["seed"], made["shares"].get("modes", MODES)):
        plain: Answer = answer(task)
        styled = ALL[style](plain)
        if row["split"] != "val" or (style != "plain" and styled == plain):
            continue
        messages = tuple(hinted(row["prompt"], row["mode"], row["marker"]))
        out.append(
            OracleView(
                sources=("student",),
                deployed=(False,),
                rewards=(reward,),
                advantages=(0.0,),
                detector=(False,),
                texts=(styled.text,),
                prompt_ids=policy.render(messages),
                completion_ids=(policy.encode_completion(styled.text),),
                messages_plain=tuple(row["prompt"]),
                hacks=(None,),
                flaws=(row["mode"],),
            )
        )
    return [replace(view, index=i) for i, view in enumerate(out)]


def rows(run: Path) -> Iterator[dict[str, object]]:
    """A row for each monitor and style."""
    record = read_json(run / "run.json")
    policy, found, reward = monitors(run)
    for style in ALL:
        seen = views(Path(record["config"]["scale"]["organism"]), policy, style, reward)
        plain = [GroupView(**{name: getattr(v, name) for name in GroupView.__dataclass_fields__}) for v in seen]
        for name, monitor in found.items():
            flags = monitor.flag(seen if monitor.sees is OracleView else plain, 10**6)
            yield {
                "run": run.name,
                "monitor": name,
                "style": style,
                "unseen": style in HELD_OUT_STYLES,
                "flagged": f"{sum(f.flagged[0] for f in flags)}/{len(flags)}",
                "revision": (record.get("git") or {}).get("revision", "")[:10],
            }


def main(runs: list[str]) -> None:
    found = [row for run in runs for row in rows(Path(run))]
    writer = csv.DictWriter(sys.stdout, fieldnames=list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)


if __name__ == "__main__":
    main(sys.argv[1:])
