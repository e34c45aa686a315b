"""The organism's language: problems that select, map and fold, in English and in Python.

`tasks` are made of `operations`; `assertions` test them; `answers` solve or misread them, in one
of several styles; `hacks` change an answer; `problems` are the rows of a problem file, and the
`corpus` is what an organism is pretrained on. The standard library only.
"""
