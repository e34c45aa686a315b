"""Monitors in shadow flag and are scored, and the run is the same to the last bit."""

import pytest

from methods import batch, make, poisoned
from runs import adapter_bytes, flags, rows, run
from tiny import policy as tiny_policy
from vgrout.config.method import MethodConfig
from vgrout.config.presets import resolve
from vgrout.config.specs import MONITORS, watchers
from vgrout.ground.io import json_lines

# a run without a monitor; one whose own draws and remembers, so that a shadow could disturb it
OWN = {"none": [], "route2-online-probe": ["--random-flags"]}


def lines(path):
    """rollouts.jsonl without what a shadow adds and the seconds of the sandbox."""
    found = json_lines(path / "rollouts.jsonl")
    return [{k: v for k, v in line.items() if k not in ("shadow", "cpu_s")} for line in found]


@pytest.mark.long
@pytest.mark.parametrize("method", OWN)
def test_a_shadow_changes_nothing_and_survives_a_resume(method, shared_run, tmp_path):
    # a judge has a test of its own
    others = {"llm_judge"} if method == "none" else {"llm_judge", "online_probe"}
    watching = [name for name in watchers() if name not in others]
    own = flags(method, "--group", "8", *OWN[method])
    shadowed = flags(
        method,
        "--group",
        "8",
        *OWN[method],
        "--seed-monitor",
        "labels",
        "--shadow",
        ",".join(watching),
    )
    plain, watched = shared_run(*own), shared_run(*shadowed)
    assert rows(watched, "shadow") == rows(plain)
    assert lines(watched) == lines(plain)
    assert adapter_bytes(watched) == adapter_bytes(plain)
    assert not any("shadow" in row for row in rows(plain))
    assert {*rows(watched)[0]["shadow"]} == {*watching}
    stopped = shared_run.copy(
        shared_run(*shadowed, "--checkpoint-every", "1", stop_after=2), tmp_path
    )
    assert run(tmp_path, "smoke", "--resume", "latest", "--threads", "1") == stopped
    assert rows(stopped) == rows(watched)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--shadow gate",
            "--shadow: unknown watcher 'gate'; legal: labels, source, detector, online_probe, syntax_edge",
        ),
        (
            "--shadow detector,none",
            "--shadow: unknown watcher 'none'; legal: labels, source, detector, online_probe, syntax_edge",
        ),
        ("--shadow labels,labels", "--shadow: labels is there twice; legal: "),
        (
            "--intervention penalty --monitor labels --shadow labels",
            "--shadow labels: is the run's own monitor; leave it out there",
        ),
        ("--shadow detector --known-modes exit_code", "--known-modes: not read by"),
        ("--shadow syntax_edge --monitor-quantile 0.9", "--monitor-quantile: not read by"),
        (
            "--shadow online_probe --seed-monitor online_probe",
            "--seed-monitor: unknown seed 'online_probe'; legal: labels,",
        ),
    ],
)
def test_what_cannot_be_a_shadow_is_refused_in_one_line(given, message):
    words = given.split()
    with pytest.raises(ValueError, match=rf"\A{message}.*\Z"):
        resolve(["mini", *([] if "--intervention" in words else ["--intervention=none"]), *words])
    with pytest.raises(
        ValueError,
        match="--shadow syntax_edge: it reads correct answers; give --known-correct FILE",
    ):
        resolve(["full", "--intervention=none", "--shadow=syntax_edge"])


def test_flags_give_a_shadow_its_settings_and_the_run_keeps_its_name():
    plain, watched = (
        resolve(["mini", "--intervention=none", *more])
        for more in (
            [],
            ["--shadow=online_probe", "--seed-monitor=labels", "--known-modes=exit_code"],
        )
    )
    assert watched.run_id == plain.run_id
    assert watched.method.watching == ("none", "online_probe", "labels")
    assert (watched.method.modes_known, watched.method.modes_acted_on) == (("exit_code",), ())
    assert watched.method.needs_known_correct
    by_labels = MethodConfig(
        intervention="penalty", monitor="labels", shadow="detector", known_modes="exit_code"
    )
    assert by_labels.modes_acted_on == ("exit_code",)


def test_a_shadow_looks_at_every_group_and_sees_a_label_only_if_its_class_declares_it():
    """As poisoned labels do in test_method.py for the monitor that is acted on."""
    policy, of = tiny_policy(), batch(same=True)
    watching = [name for name in watchers() if name != "detector"]
    one, two = (make(policy, "penalty", "detector", shadow=",".join(watching)) for _ in range(2))
    for seen, turned in zip(one.flag(of).groups, two.flag(poisoned(of)).groups, strict=True):
        assert [*seen.shadows] == watching
        for name in watching:
            assert len(seen.shadows[name].flagged) == len(seen)
            if seen.index == 0:
                assert (seen.shadows[name] == turned.shadows[name]) != MONITORS[name].sees_labels, (
                    name
                )


def test_each_shadow_remembers_by_itself():
    policy = tiny_policy()
    one = make(policy, "penalty", "labels", shadow="online_probe")
    two = make(policy, "penalty", "labels", shadow="online_probe")
    one.flag(batch())
    state = one.state_dict()
    names = ("sum", "count", "mean", "root", "judge")
    assert {*state} == {f"shadow/online_probe/probe_{name}" for name in names}
    assert int(state["shadow/online_probe/probe_count"]) == 2
    two.load_state_dict(state)
    assert one.flag(batch(step=1)) == two.flag(batch(step=1))
