"""The shipped lists are found whichever way the package was installed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from amp_graph.oplists import load_lists

ROOT = Path(__file__).resolve().parent.parent
FORGET_OTHER_INSTALLS = """
import site, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
for name in [m for m in sys.modules if "editable" in m]:
    del sys.modules[name]
sys.path = [p for p in sys.path if p != {root!r}]
sys.path.insert(0, {place!r})
site.addsitedir({place!r})
from amp_graph.oplists import __file__, _shipped_folder, load_lists
print(__file__, _shipped_folder(), len(load_lists(strict=True).entries), sep="\\n")
"""
PIP = "-m pip -q --disable-pip-version-check install --no-deps --no-build-isolation"
PIP += " --ignore-installed --prefix"  # else pip takes this environment's own install out
INSTALL = {"bare checkout": None, "wheel": [], "editable install": ["-e"]}


@pytest.mark.parametrize("way", INSTALL)
def test_the_lists_are_found(tmp_path, way):
    copy = tmp_path / "checkout"
    for folder in ("amp_graph", "allow_deny_lists"):
        shutil.copytree(ROOT / folder, copy / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    place = copy
    if INSTALL[way] is not None:
        prefix = tmp_path / "prefix"
        subprocess.check_call([sys.executable, *PIP.split(), prefix, *INSTALL[way], copy])
        place = next(prefix.glob("lib/python*/site-packages"))
    script = FORGET_OTHER_INSTALLS.format(root=str(ROOT), place=str(place))
    out = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, text=True)
    file, shipped, count = out.split("\n")[:3]
    home = place if way == "wheel" else copy
    assert Path(file).is_relative_to(home)
    assert Path(shipped).is_relative_to(home)
    assert int(count) == len(load_lists(strict=True).entries)
