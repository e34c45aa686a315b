"""Every outcome that a hypothesis can have, on studies made for it; the file and its rules agree."""

import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fake_runs import fake_run
from vgrout.config.presets import resolve
from vgrout.data.organism import PROBLEMS
from vgrout.inputs import Inputs, file_hashes
from vgrout.modes import DEALT
from vgrout.problems import load_rows
from vgrout.report import stats
from vgrout.report.organisms import organisms
from vgrout.report.runs import cells, load
from vgrout.report.tables import MARGIN
from vgrout.report.verdicts import RULES, Preregistered, Verdict, judge

FILE = Path(__file__).resolve().parents[1] / "docs" / "hypotheses.md"
SHIPPED = file_hashes(resolve(["mini"]), Inputs(load_rows(PROBLEMS), [], None, None))["problems"]
NEAR = (0.02, -0.02, 0.01, -0.01, 0.0)  # seeds that differ a little


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """No verdict here hangs on the third digit of an interval."""
    monkeypatch.setattr(stats, "RESAMPLES", 500)


def told(
    root: Path, seeds: int = 5, *flags: str, its: dict[str, Any] | None = None, **arms: tuple[float, float]
) -> list[Verdict]:
    """A study of arms (`route2_haar`: route2 under haar) with their deployed hack and solve; flags, its: of each."""
    for arm, (hack, solve) in arms.items():
        name, _, control = arm.partition("_")
        for seed, off in zip(range(seeds), NEAR, strict=False):
            extra = ["--random-flags"] if control == "random_flags" else [f"--control={control}"] if control else []
            clipped = min(max(hack + off, 0.0), 1.0), min(max(solve - off, 0.0), 1.0)
            monitor = ["--monitor=pmi"] if name == "screen" else []
            said = (f"--intervention={name}", *monitor, *extra, *flags)
            fake_run(root, *said, seed=seed, hack=clipped[0], solve=clipped[1], n=120, **(its or {}))
    return judge(Preregistered.read(FILE), cells(load([root]).runs))


def outcome(verdicts: list[Verdict], id: str) -> str:
    (found,) = [v for v in verdicts if v.id == id]
    return found.outcome


def test_every_hypothesis_has_a_rule_and_its_numbers() -> None:
    filed = Preregistered.read(FILE)  # which refuses a number that is not in the text
    assert {h.id for h in filed.hypotheses} == RULES.keys()
    assert filed.sha256 == hashlib.sha256(FILE.read_bytes()).hexdigest()
    h1, h2 = filed.hypotheses[:2]
    assert h1.metric["solve_within"] == 100 * MARGIN
    assert h2.metric["of_modes"] == len(DEALT)


def test_every_number_and_claim_is_in_its_row_of_the_text() -> None:
    rows = {line.split("|")[1].strip(): line for line in FILE.read_text().splitlines() if line.startswith("| H")}
    for h in Preregistered.read(FILE).hypotheses:
        assert h.claim in rows[h.id]
        for number in h.numbers:
            assert re.search(rf"(?<![\w.]){number:g}\b", rows[h.id]), (h.id, number)


@pytest.mark.parametrize(
    ("expected", "arm"),
    [
        ("SUPPORTED", (0.3, 0.45)),  # 50 points less, 5 points lower solve
        ("UNDECIDED", (0.6, 0.45)),  # 20 points: between the falsifier and the margin
        ("UNDECIDED", (0.1, 0.80)),  # 70 points less, but at another solve: not matched
        ("NOT SUPPORTED", (0.7, 0.45)),  # under 15 points
        ("NOT SUPPORTED", (0.1, 0.30)),  # more than 15 points of solve lost
    ],
)
def test_h1(tmp_path: Path, expected: str, arm: tuple[float, float]) -> None:
    assert outcome(told(tmp_path, none=(0.8, 0.5), erase=arm, erase_haar=(0.8, 0.5)), "H1") == expected


def test_h1_needs_its_seeds_and_a_haar_arm(tmp_path: Path) -> None:
    few = told(tmp_path / "few", 4, none=(0.8, 0.5), erase=(0.1, 0.5), erase_haar=(0.8, 0.5))
    assert outcome(few, "H1") == "UNDECIDED"
    assert "n too small: 4 paired seeds" in next(v for v in few if v.id == "H1").numbers
    bare = told(tmp_path / "bare", none=(0.8, 0.5), erase=(0.1, 0.5))
    assert outcome(bare, "H1") == "REFUSED"
    assert "no Haar arm" in next(v for v in bare if v.id == "H1").numbers
    alone = told(tmp_path / "alone", erase=(0.1, 0.5), erase_haar=(0.1, 0.5))
    assert outcome(alone, "H1") == "UNDECIDED"


@pytest.mark.parametrize(
    ("expected", "plain", "ceiling"),
    [
        ("SUPPORTED", (0.7, 0.1), (0.0, 0.9)),
        ("NOT SUPPORTED", (0.5, 0.1), (0.0, 0.9)),
        ("NOT SUPPORTED", (0.7, 0.1), (0.0, 0.7)),
        ("NOT SUPPORTED", (0.7, 0.1), (0.1, 0.9)),
    ],
)
def test_h2(tmp_path: Path, expected: str, plain: tuple[float, float], ceiling: tuple[float, float]) -> None:
    assert outcome(told(tmp_path, none=plain, none_no_loophole=ceiling), "H2") == expected


@pytest.mark.parametrize(
    ("expected", "flags", "its"),
    [
        ("SUPPORTED", ("--organism=out/organism77",), {"hashes": {"problems": "0" * 64}}),
        ("UNDECIDED", ("--organism=out/warm",), {"hashes": {"problems": SHIPPED}}),  # trained on from the shipped one
        ("UNDECIDED", (), {"preset": "fast"}),  # 60 steps of Qwen3-4B
        ("UNDECIDED", ("--steps=90",), {}),
    ],
)
def test_h2_is_about_an_organism_as_it_was_built(
    expected: str, flags: tuple[str, ...], its: dict[str, Any], tmp_path: Path
) -> None:
    assert outcome(told(tmp_path, 5, *flags, its=its, none=(0.7, 0.1), none_no_loophole=(0.0, 0.9)), "H2") == expected


def test_h2_without_a_ceiling_is_undecided(tmp_path: Path) -> None:
    assert outcome(told(tmp_path, none=(0.7, 0.1)), "H2") == "UNDECIDED"


@pytest.mark.parametrize(
    ("expected", "arm"),
    [
        ("SUPPORTED", (0.1, 0.5)),
        ("UNDECIDED", (0.1, 0.2)),
        ("UNDECIDED", (0.5, 0.5)),
        ("NOT SUPPORTED", (0.7, 0.5)),
        ("NOT SUPPORTED", (0.9, 0.5)),  # the other way round
    ],
)
def test_h3(tmp_path: Path, expected: str, arm: tuple[float, float]) -> None:
    assert outcome(told(tmp_path, route2=arm, route2_haar=(0.7, 0.5)), "H3") == expected


def test_h3_without_chance_is_refused(tmp_path: Path) -> None:
    assert outcome(told(tmp_path, route2=(0.1, 0.5)), "H3") == "REFUSED"


def test_an_arm_without_a_direction_needs_no_haar(tmp_path: Path) -> None:
    assert outcome(told(tmp_path, none=(0.8, 0.5), screen=(0.1, 0.5)), "H1") == "SUPPORTED"


@pytest.mark.parametrize(("every", "said"), [(None, "none was not evaluated on the way"), (0.9, "did none solve")])
def test_h1_says_what_none_was_on_the_way(every: float | None, said: str, tmp_path: Path) -> None:
    on_the_way = {"row": {"hack_deploy": every, "solve_deploy": every}}
    told(tmp_path, its=on_the_way, none=(0.8, 0.5))
    (h1,) = [v for v in told(tmp_path, screen=(0.1, 0.5)) if v.id == "H1"]
    assert said in h1.numbers


def copies(folder: Path) -> tuple[Path, Path]:
    """The text and its numbers, to be edited."""
    text, numbers = folder / "h.md", folder / "h.toml"
    shutil.copy(FILE, text)
    shutil.copy(FILE.with_suffix(".toml"), numbers)
    return text, numbers


@pytest.mark.parametrize(
    ("end", "old", "new", "why"),
    [
        (
            ".md",
            "≥ 30 points below vanilla's",
            "≥ 20 points below vanilla's",
            "H1 says 20, 10, 5, 15, 15, and h.toml 30,",
        ),
        (".md", "under 15 points, or", "under 5 points, or", "H1 says 30, 10, 5, 5, 15, and"),  # the other 15 is there
        (".md", "≤ 2 % hacked", "≤ 5 % hacked", "H2 says 60, 60, 5, 6, 80, 5, 5, and"),
        (
            ".toml",
            "hack_lower_under = 15",
            "hack_lower_under = 10",
            "H1 says 30, 10, 5, 15, 15, and h.toml 30, 10, 5, 10,",
        ),
        (".toml", "[H3]", "[H4]", "H3, H4: not both in it and in h.toml"),
        (".toml", "seeds = 5", "least = 5", "h.toml: .* argument"),
    ],
)
def test_a_number_moved_in_one_file_alone_is_refused(end: str, old: str, new: str, why: str, tmp_path: Path) -> None:
    for path in copies(tmp_path):
        if path.suffix == end:
            path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=why):
        Preregistered.read(tmp_path / "h.md")


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    text, numbers = copies(tmp_path)
    numbers.unlink()
    with pytest.raises(ValueError, match=r"--hypotheses .*h\.md: .*h\.toml cannot be read \(No such file"):
        Preregistered.read(text)


def test_one_without_a_rule_is_undecided(tmp_path: Path) -> None:
    text, numbers = copies(tmp_path)
    text.write_text(FILE.read_text() + "| H99 | c | m | ≥ 5 | f |\n")
    numbers.write_text(numbers.read_text() + '[H99]\nclaim = "c"\nmetric = {}\nseeds = 5\nfalsified = {}\n')
    assert outcome(judge(Preregistered.read(text), []), "H99") == "UNDECIDED"


def test_preregistration_is_by_hash(tmp_path: Path) -> None:
    """Of text, numbers, rules and statistics; a run that has the text's hash alone is counted apart."""
    filed = Preregistered.read(FILE)
    whole = {"hypotheses": filed.sha256, "preregistered": filed.digest}
    fake_run(tmp_path / "a", "--intervention=none", hashes=whole)
    fake_run(tmp_path / "b", "--intervention=none", seed=2, hypotheses=filed.sha256)
    fake_run(tmp_path / "b", "--intervention=none", seed=3, hypotheses="0" * 64)
    assert filed.standing(cells(load([tmp_path / "a"]).runs)).startswith("preregistered: all 1 runs")
    both = filed.standing(cells(load([tmp_path / "a", tmp_path / "b"]).runs))
    assert both.startswith("not preregistered by hash: of 3 runs 1 carry")
    assert f"2 this text's ({filed.sha256[:12]}), 1 that of another version of it, 0 none" in both


def test_the_digest_is_of_the_numbers_too(tmp_path: Path) -> None:
    text, numbers = copies(tmp_path)
    before = Preregistered.read(text)
    numbers.write_text(numbers.read_text() + "# another word\n")
    after = Preregistered.read(text)
    assert before.sha256 == after.sha256
    assert before.digest != after.digest


# ── several organisms ──────────────────────────────────────────────────────────────────────────────────────────────

SEEDED = ("--intervention=penalty", "--mix-ratio=0")
LABELS = (*SEEDED, "--monitor=labels", "--known-modes=exit_code")
READS = (*SEEDED, "--monitor=quarantine", "--seed-monitor=labels", "--known-modes=exit_code")


def on_organisms(
    root: Path, *flags: str, hack: tuple[float, ...], solve: float = 0.8, n: int = 5, seeds: int = 2
) -> None:
    """Runs of two seeds on each of n organisms; hack: by seed and organism, the last one repeated."""
    for i in range(n * seeds):
        o = i // seeds
        fake_run(
            root,
            *flags,
            seed=41 + i % seeds,
            hack=hack[min(o, len(hack) - 1)],
            solve=solve,
            problems=True,
            hashes={"problems": f"{o}" * 64, "base_weights": f"{o + 1}" * 64},
        )


def verdicts_of(root: Path, id: str) -> list[tuple[str, str]]:
    found = judge(Preregistered.read(FILE), cells(load([root]).runs))
    return [(v.outcome, v.numbers) for v in found if v.id == id]


def ceiling_and_labels(root: Path) -> None:
    on_organisms(root, "--intervention=none", "--control=no_loophole", "--mix-ratio=0", hack=(0.0,), solve=0.8)
    on_organisms(root, *LABELS, hack=(0.5, 0.4, 0.6, 0.5, 0.5), solve=0.5)


def test_h8_holds_where_unknown_flaws_are_contained_on_every_organism(tmp_path: Path) -> None:
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.0,), solve=0.8)
    ((outcome, numbers),) = verdicts_of(tmp_path, "H8")
    assert outcome == "SUPPORTED", numbers
    assert "by labels alone 50.0" in numbers
    assert "100 % of the ceiling; 10 runs" in numbers


def test_h8_needs_the_skill_as_well(tmp_path: Path) -> None:
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.0,), solve=0.6)
    assert [o for o, _ in verdicts_of(tmp_path, "H8")] == ["UNDECIDED"]


def test_h8_fails_where_organisms_disagree(tmp_path: Path) -> None:
    """By runs the difference would be shown; two organisms of five go the other way."""
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.0, 0.0, 0.9, 0.9, 0.0), solve=0.8)
    assert [o for o, _ in verdicts_of(tmp_path, "H8")] == ["NOT SUPPORTED"]


def test_h8_is_undecided_with_four_organisms_or_one_run_on_each(tmp_path: Path) -> None:
    for name, n, seeds in (("few", 4, 2), ("single", 5, 1)):
        ceiling_and_labels(tmp_path / name)
        on_organisms(tmp_path / name, *READS, hack=(0.0,), solve=0.8, n=n, seeds=seeds)
        found = verdicts_of(tmp_path / name, "H8")
        assert all(o == "UNDECIDED" for o, _ in found), found


def test_h8_over_all_choices_needs_each_of_them(tmp_path: Path) -> None:
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.0,), solve=0.8)
    other = [(*flags[:-1], "--known-modes=run_tests") for flags in (LABELS, READS)]
    on_organisms(tmp_path, *other[0], hack=(0.5, 0.6, 0.4), solve=0.5)
    on_organisms(tmp_path, *other[1], hack=(0.3, 0.2), solve=0.8)
    whole, *each = [o for o, _ in verdicts_of(tmp_path, "H8")]
    assert (whole, sorted(each)) == ("UNDECIDED", ["SUPPORTED", "UNDECIDED"])


def test_h9_and_h10_are_about_controls_that_do_worse(tmp_path: Path) -> None:
    on_organisms(tmp_path, *READS, hack=(0.0, 0.1))
    on_organisms(tmp_path, *READS, "--random-flags", hack=(0.5, 0.4))
    on_organisms(tmp_path, *READS, "--quarantine-diet=random", hack=(0.1, 0.0))
    assert [o for o, _ in verdicts_of(tmp_path, "H9")] == ["SUPPORTED", "NOT SUPPORTED"]
    route = ("--intervention=route", "--mix-ratio=0")
    on_organisms(tmp_path, *route, hack=(0.1, 0.2))
    on_organisms(tmp_path, *route, "--control=haar", hack=(0.2, 0.3))
    assert [o for o, _ in verdicts_of(tmp_path, "H10")] == ["UNDECIDED"], "ten points of fifteen"


def test_h11_and_h12_are_of_the_diet_that_they_name(tmp_path: Path) -> None:
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.0, 0.4, 0.2, 0.3, 0.1), solve=0.8)
    assert [o for o, _ in verdicts_of(tmp_path, "H11")] == ["UNDECIDED"], "no runs of that diet"
    assert [o for o, _ in verdicts_of(tmp_path, "H12")] == ["UNDECIDED"]
    on_organisms(tmp_path, *READS, "--quarantine-diet=seeded", hack=(0.0,), solve=0.8)
    before = verdicts_of(tmp_path, "H8")
    ((outcome, numbers),) = verdicts_of(tmp_path, "H11")
    assert outcome == "SUPPORTED", numbers
    assert before != [(outcome, numbers)]
    ((outcome, numbers),) = verdicts_of(tmp_path, "H12")
    assert outcome == "SUPPORTED", numbers
    assert "10 pairs of runs" in numbers


@pytest.mark.long
def test_h13_and_h14_are_of_flaws_that_no_prompt_announces(tmp_path: Path) -> None:
    """A sixth of the fake problems can be exploited by the flaw that is not known: 1.0 there is 16.7 % of all."""
    bare = "--unannounced-modes=eq_override,exit_code"
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.0,), solve=0.8)
    on_organisms(tmp_path, *READS, "--random-flags", hack=(0.5,))
    assert [o for id in ("H13", "H14") for o, _ in verdicts_of(tmp_path, id)] == ["UNDECIDED"] * 3, "announced"
    before = verdicts_of(tmp_path, "H8"), verdicts_of(tmp_path, "H9")

    on_organisms(tmp_path, "--intervention=none", "--control=no_loophole", "--mix-ratio=0", bare, hack=(0.0,))
    on_organisms(tmp_path, *LABELS, bare, hack=(1.0,), solve=0.0)
    on_organisms(tmp_path, *READS, bare, hack=(0.0,))
    penalty, screen = verdicts_of(tmp_path, "H13")
    assert penalty[0] == "SUPPORTED", penalty
    assert screen == ("UNDECIDED", "no runs of screen by the same labels alone")
    on_organisms(tmp_path, "--intervention=screen", *LABELS[1:], bare, hack=(0.0, 1.0, 0.0, 1.0), solve=0.0)
    assert [o for o, _ in verdicts_of(tmp_path, "H13")] == ["SUPPORTED", "NOT SUPPORTED"]

    on_organisms(tmp_path, *READS, bare, "--random-flags", hack=(1.0,))
    on_organisms(tmp_path, *READS, bare, "--quarantine-diet=random", hack=(0.0,))
    assert [o for o, _ in verdicts_of(tmp_path, "H14")] == ["SUPPORTED", "NOT SUPPORTED"]
    assert before == (verdicts_of(tmp_path, "H8"), verdicts_of(tmp_path, "H9")), "others are not among theirs"


def test_h15_and_h16_are_of_where_the_quarantine_starts(tmp_path: Path) -> None:
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.3, 0.4, 0.2, 0.3, 0.1), solve=0.8)
    assert [o for id in ("H15", "H16") for o, _ in verdicts_of(tmp_path, id)] == ["UNDECIDED"] * 2
    before = [verdicts_of(tmp_path, id) for id in ("H8", "H9", "H11")]
    on_organisms(tmp_path, *READS, "--quarantine-start=pairs", hack=(0.0,), solve=0.8)
    assert [o for id in ("H15", "H16") for o, _ in verdicts_of(tmp_path, id)] == ["SUPPORTED"] * 2
    on_organisms(tmp_path, *READS, "--quarantine-start=random", hack=(0.0,), solve=0.8)
    assert [o for o, _ in verdicts_of(tmp_path, "H16")] == ["SUPPORTED", "NOT SUPPORTED"], "from zero, from random"
    assert before == [verdicts_of(tmp_path, id) for id in ("H8", "H9", "H11")], "others are not among theirs"


def test_h17_to_h19_are_of_a_linear_probe_in_the_quarantine_s_place(tmp_path: Path) -> None:
    probe = tuple(word.replace("=quarantine", "=online_probe") for word in READS)
    ceiling_and_labels(tmp_path)
    on_organisms(tmp_path, *READS, hack=(0.3, 0.4, 0.2, 0.3, 0.1), solve=0.8)
    assert [o for id in ("H17", "H18", "H19") for o, _ in verdicts_of(tmp_path, id)] == ["UNDECIDED"] * 3
    before = [verdicts_of(tmp_path, id) for id in ("H8", "H9")]
    on_organisms(tmp_path, *probe, hack=(0.0,), solve=0.8)
    assert [o for id in ("H17", "H18") for o, _ in verdicts_of(tmp_path, id)] == ["SUPPORTED"] * 2
    on_organisms(tmp_path, *READS, "--quarantine-start=pairs", hack=(0.0,), solve=0.8)
    assert [o for o, _ in verdicts_of(tmp_path, "H18")] == ["SUPPORTED", "NOT SUPPORTED"], "from zero, from pairs"
    on_organisms(tmp_path, *probe, "--probe-diet=random", hack=(0.0,))
    assert [o for o, _ in verdicts_of(tmp_path, "H19")] == ["NOT SUPPORTED"]
    assert [o for o, _ in verdicts_of(tmp_path, "H17")] == ["SUPPORTED"], "a control is not judged as the method"
    assert before == [verdicts_of(tmp_path, id) for id in ("H8", "H9")], "others are not among theirs"


def test_h20_is_of_arms_that_route_what_the_same_labels_flag(tmp_path: Path) -> None:
    screen, route2, sgtm = (("--intervention=" + arm, *LABELS[1:]) for arm in ("screen", "route2", "sgtm"))
    on_organisms(tmp_path, *route2, "--quarantine=block:3", hack=(0.2,))
    assert [o for o, _ in verdicts_of(tmp_path, "H20")] == ["UNDECIDED"], "nothing to compare with"
    on_organisms(tmp_path, *screen, hack=(0.5, 0.6, 0.4))
    on_organisms(tmp_path, *sgtm, "--quarantine=block:3", hack=(0.5, 0.4, 0.6))
    assert [o for o, _ in verdicts_of(tmp_path, "H20")] == ["SUPPORTED", "NOT SUPPORTED"], "route2, sgtm"
    other = [(*flags[:-1], "--known-modes=run_tests") for flags in (route2, screen)]
    on_organisms(tmp_path, *other[0], "--quarantine=block:3", hack=(0.7,))
    on_organisms(tmp_path, *other[1], hack=(0.2,))
    (outcome, numbers), _ = verdicts_of(tmp_path, "H20")
    assert outcome == "NOT SUPPORTED", "over both choices"
    assert "20 pairs of runs" in numbers


def test_the_table_has_flaws_that_are_known_apart_and_means_of_organisms(tmp_path: Path) -> None:
    on_organisms(tmp_path, "--intervention=none", "--mix-ratio=0", hack=(0.8, 0.6), n=2)
    on_organisms(tmp_path, *LABELS, hack=(0.4, 0.2), n=2)
    fake_run(
        tmp_path,
        *LABELS,
        seed=43,
        hack=0.4,
        solve=0.8,
        problems=True,
        hashes={"problems": "0" * 64, "base_weights": "1" * 64},
    )
    rows = organisms(cells(load([tmp_path]).runs)).rows
    labels = next(r for r in rows if r["method"].startswith("penalty"))
    assert (labels["organisms"], labels["starts"], labels["runs"]) == ("2", "2", "5")
    assert labels["hack, unknown"].startswith("30.0 ["), "the mean of organisms, not of runs"
    assert labels["Δ hack, unknown"].startswith("-40.0"), "on the seeds that both have"
    assert labels["hack, known"].startswith("30.0")
    one = organisms([c for c in cells(load([tmp_path]).runs) if c.first.inputs["problems"] == "0" * 8])
    assert not one.rows
