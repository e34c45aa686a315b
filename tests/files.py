"""What a file holds."""

import json


def loaded(path):
    """Its JSON."""
    return json.loads(path.read_text())
