"""Grading of untrusted answers: text and Problem in, Grade out. Stdlib only; never imports torch."""
