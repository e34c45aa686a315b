"""Files of an adapter: safetensors with one order of metadata, and the fingerprint of the basis in them."""

import json
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vgrout.ground.errors import Refused
from vgrout.ground.files import regular

Fingerprint = Float[Tensor, "modules k"]


def fingerprint_to_string(fingerprint: Fingerprint) -> str:
    """A basis fingerprint for a file's metadata.

    Numbers have six digits, a ten thousandth of the difference that counts.
    """
    rounded: list[list[float]] = []
    for row in fingerprint.tolist():
        rounded.append([float(f"{x:.6g}") for x in row])
    return json.dumps(rounded, separators=(",", ":"))


def fingerprint_from_string(text: str, where: str) -> Fingerprint:
    """Read what `fingerprint_to_string` wrote. Raises Refused, one line, on damaged metadata."""
    try:
        return torch.tensor(json.loads(text), dtype=torch.float32)
    # torch's own message has many lines
    except (ValueError, TypeError, RuntimeError, RecursionError, OverflowError):
        raise Refused(f"{where}: its basis fingerprint cannot be read") from None


def canonical(content: bytes) -> bytes:
    """A safetensors file with its metadata in alphabetical order.

    The library shuffles the metadata, and one state should be one file. Offsets count from the
    header's end, which stays aligned to 8 bytes.
    """
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    metadata = header.pop("__metadata__", {})
    ordered = {"__metadata__": dict(sorted(metadata.items()))} | header
    text = json.dumps(ordered, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + n :]


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and string metadata of a file, on the CPU.

    Raises:
        Refused: no such file, or not a safetensors file.
    """
    try:
        with open(path, "rb", opener=regular), safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise Refused(f"{path}: not a readable safetensors file ({error})") from error
