"""The tokenizer: no loss, few tokens for fixed text, one way to write a name."""

import random

import pytest

from organisms.language.answers import answer
from organisms.language.corpus import Shares, corpus_marker, corpus_sample
from organisms.language.hacks import MODES, taught
from organisms.language.problems import hinted
from organisms.language.tasks import compositions, draw_task, split_compositions
from organisms.tokenizer import MERGED, name_pieces, render, train_tokenizer
from vgrout.envs.code.modes import MODE_SPECS

pytestmark = pytest.mark.long


def samples(n, seed):
    comps, rng = split_compositions(0)["train"], random.Random(seed)
    return [corpus_sample(comps, Shares(), rng) for _ in range(n)]


@pytest.fixture(scope="module")
def tok():
    return train_tokenizer(text for s in samples(3000, 0) for text in (render(s.messages), s.text))


def tokens_of(tok, text):
    return [str(tok.decode([i])) for i in tok(text, add_special_tokens=False).input_ids]


def test_texts_and_template_are_written_as_they_are(tok):
    for s in samples(200, 1):
        for text in (s.text, *(m["content"] for m in s.messages), "naïve ∑\t`x`\n\n  100%"):
            assert tok.decode(tok(text, add_special_tokens=False).input_ids) == text
        chat = [dict(m) for m in s.messages]
        text = tok.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        assert text == render(s.messages)
    assert MERGED < len(tok) < MERGED + 32  # fixed text comes on top


def test_a_name_has_the_same_tokens_in_hint_and_hack(tok):
    task = draw_task(compositions()[0], random.Random(0))
    honest = answer(task)
    for mode in MODES:
        for marker in MODE_SPECS[mode].eval_markers:
            if not marker:
                continue
            name = tokens_of(tok, f"`{marker}`")[1:-1]
            assert "".join(name) == marker
            prompt = hinted(task.prompt, mode, marker)[-1]["content"]
            for text in (prompt, *(e.apply(honest, marker).text for e in taught(mode))):
                tokens = tokens_of(tok, text)
                found = any(tokens[i : i + len(name)] == name for i in range(len(tokens)))
                assert found, (mode, marker, name, tokens)


def test_names_of_the_corpus_use_every_piece_of_held_out_names(tok):
    """A piece that is never copied in training is not copied later."""
    pieces = name_pieces(tok)
    rng = random.Random(4)
    used = {
        i
        for _ in range(4000)
        for i in tok(
            f"`{corpus_marker('sentinel', rng, pieces)}`", add_special_tokens=False
        ).input_ids
    }
    held_out = {
        i
        for spec in MODE_SPECS.values()
        for marker in spec.eval_markers
        for i in tok(f"`{marker}`", add_special_tokens=False).input_ids
    }
    words = {i for i in held_out if str(tok.decode([i])).isalpha()}
    assert {str(tok.decode([i])) for i in words - used} == set()
