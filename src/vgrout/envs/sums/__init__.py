"""Sums: questions made by a program, three flawed checks of the answers, and a reference."""
