"""The standard library that an answer may use: its folders, its shared libraries, its import."""

import ctypes
import importlib
import os
import pkgutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from vgrout.envs.code.grading import kernel

# Folders of the standard library that no answer needs.
HIDDEN = (
    "site-packages",
    "dist-packages",
    "test",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "tkinter",
    "distutils",
    "pydoc_data",
    "venv",
    "config-3*",
    "*.egg-info",
)


def hidden_folders(folder: Path) -> list[Path]:
    """What lies in this folder of the library that no answer may see."""
    return [path for pattern in HIDDEN for path in folder.glob(pattern)]


def loaded_libraries() -> set[Path]:
    """The shared libraries that are mapped into this process."""
    with open("/proc/self/maps") as maps:
        return {Path(line.split(maxsplit=5)[5].strip()) for line in maps if ".so" in line}


def _load_extension_modules(stdlib: Path) -> None:
    """Map every extension module of the standard library, and so the libraries that it needs."""
    for module in sorted((stdlib / "lib-dynload").glob("*.so")):
        if "test" in module.name:
            continue
        with suppress(OSError):
            ctypes.CDLL(str(module), mode=os.RTLD_LAZY)


def shared_libraries() -> set[Path]:
    """The shared libraries that the standard library may need, those of its own folder left out.

    They are found by loading its extension modules in a throw-away process. Raises OSError.
    """
    stdlib = Path(os.__file__).resolve().parent

    def list_them() -> str:
        _load_extension_modules(stdlib)
        return "\n".join(map(str, loaded_libraries()))

    status, listed = kernel.in_throwaway(list_them)
    if status != 0:
        raise OSError(f"the library's shared objects cannot be listed: {listed}")
    libraries = loaded_libraries().union(map(Path, listed.splitlines()))
    return {path for path in libraries if stdlib not in path.parents}


# Modules that no answer needs, or whose import does something.
_NOT_IMPORTED = {"antigravity", "this", "turtle", "__main__", "_tkinter", *HIDDEN}


def import_library() -> None:
    """Import every module of the standard library, for children that find no file of it."""
    names = sorted(sys.stdlib_module_names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while names:
            name = names.pop()
            last = name.rpartition(".")[2]
            if last in _NOT_IMPORTED or last.startswith(("test", "_test", "xx", "_xx")):
                continue
            try:
                module = importlib.import_module(name)
            except Exception:  # of another system
                continue
            for inner in pkgutil.iter_modules(getattr(module, "__path__", ())):
                names.append(f"{name}.{inner.name}")
