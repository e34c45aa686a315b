"""`python studies/styles.py RUN…`: how many right answers each monitor in shadow flags, by their style, as the monitors
stood at the end of the run. CSV on standard output.

The answers are to held-out problems; a style is unseen if no corpus, demonstration or known correct answer has it. Two
rows more are of the right answers that the policy gave in training: those that are to the letter what the language's
author writes in one of its styles, and the rest, nearly all of which carry code of a flaw, spelt rightly or not. Those
have the AUC of the scores of hacks against them, hacks of the flaws in --known-modes left out.
"""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from vgrout.config.checks import listed
from vgrout.config.run import from_dict
from vgrout.data.language import HELD_OUT_STYLES, MODES, STYLES, Answer, Task, answer, hinted, problem_tasks
from vgrout.data.organism import DATA_DIR
from vgrout.files import json_lines, read_json
from vgrout.inputs import read_inputs
from vgrout.loading import load_policy
from vgrout.method import Setup, make_monitor
from vgrout.method.base import Monitor
from vgrout.model.policy import Policy
from vgrout.report import stats
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


@cache
def tasks(organism: Path) -> list[tuple[Task, dict[str, Any]]]:
    """Its problems, each with its task."""
    made = read_json(organism / "manifest.json")
    return problem_tasks(made["seed"], made["shares"].get("modes", MODES))


def views(organism: Path, policy: Policy, style: str, reward: float) -> list[OracleView]:
    """One right answer in this style to each validation problem that it changes; all are rewarded."""
    out = []
    for task, row in tasks(organism):
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


def sampled(run: Path, organism: Path, known: set[str]) -> Iterator[tuple[str, str, list[bool], float | None]]:
    """By monitor, of the policy's honest right answers and of the rest: the flags, and the AUC."""
    lines = [r for r in json_lines(run / "rollouts.jsonl") if r["hacked"] or r["solved"]]
    honest = {row["id"]: {style(answer(task)).text for style in ALL.values()} for task, row in tasks(organism)}
    for name in lines[0]["shadow"]:
        hacks = [r["shadow"][name]["score"] for r in lines if r["hacked"] and r["mechanism"] not in known]
        for style in ("sampled, honest", "sampled, with more"):
            is_honest = style == "sampled, honest"
            right = [r for r in lines if r["solved"] and (r["text"].strip() in honest[r["problem_id"]]) == is_honest]
            found = [r["shadow"][name] for r in right]
            scores = [f["score"] for f in found if f["score"] is not None]
            yield name, style, [f["flagged"] for f in found], stats.auc([x for x in hacks if x is not None], scores)


def rows(run: Path) -> Iterator[dict[str, object]]:
    """A row for each monitor and style."""
    record = read_json(run / "run.json")
    about = {"run": run.name, "revision": (record.get("git") or {}).get("revision", "")[:10]}
    known = {*listed(record["config"]["method"]["known_modes"])}
    organism = Path(record["config"]["scale"]["organism"] or DATA_DIR)
    for name, style, flagged, area in sampled(run, organism, known):
        counts = {"flagged": f"{sum(flagged)}/{len(flagged)}", "auc": area and round(area, 4)}
        yield {"monitor": name, "style": style, "unseen": False, **counts, **about}
    policy, found, reward = monitors(run)
    for style in ALL:
        seen = views(organism, policy, style, reward)
        plain = [GroupView(**{name: getattr(v, name) for name in GroupView.__dataclass_fields__}) for v in seen]
        for name, monitor in found.items():
            flags = monitor.flag(seen if monitor.sees is OracleView else plain, 10**6)
            counts = {"flagged": f"{sum(f.flagged[0] for f in flags)}/{len(flags)}", "auc": None}
            yield {"monitor": name, "style": style, "unseen": style in HELD_OUT_STYLES, **counts, **about}


def main(runs: list[str]) -> None:
    found = [row for run in runs for row in rows(Path(run))]
    writer = csv.DictWriter(sys.stdout, fieldnames=list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)


if __name__ == "__main__":
    main(sys.argv[1:])
