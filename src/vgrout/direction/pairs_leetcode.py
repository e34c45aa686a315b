from vgrout.direction.pairs import PLACEBOS  # for direction/__main__.py until it imports it from there

__all__ = ["PLACEBOS"]
