"""A page in a real browser: headless Chromium opens it from a file and works it.

The page is driven by a script appended to a copy of it, which leaves what it saw in the document.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_graph

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

DRIVER = """<script>
const result = document.createElement("pre");
result.id = "result";
const wait = () => new Promise((done) => setTimeout(done, 60));
const shown = () => [...document.querySelectorAll("#rows .row")].map((r) => r.textContent);
const button = (where, text) =>
  [...document.querySelectorAll(where)].find((b) => b.textContent.startsWith(text));
const press = (key) => get("scroll").dispatchEvent(new KeyboardEvent("keydown", {{ key }}));
const type = (text) => {{
  get("search").value = text;
  get("search").dispatchEvent(new Event("input"));
}};
(async () => {{
  const seen = {{}};
  try {{ {script} }} catch (error) {{ seen.error = String(error.stack); }}
  result.textContent = JSON.stringify(seen);
  document.body.append(result);
}})();
</script></body>"""


def work(text: str, script: str, folder: Path, place: str = "") -> dict[str, Any]:
    """What a script saw that worked the page."""
    path = folder / "driven.html"
    driver = DRIVER.format(script=script)
    path.write_text(text.replace("</body>", driver), encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1500,900",
        "--virtual-time-budget=20000",
        "--dump-dom",
        f"file://{path}{place}",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = re.search(r'<pre id="result">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert found is not None, ran.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert "error" not in seen, seen["error"]
    return seen


def page_of(model: nn.Module, folder: Path, *inputs: Any) -> str:
    torch._dynamo.reset()
    amp_graph.convert(model, policy="bfloat16")
    model(*inputs)
    amp_graph.dump(model, folder)
    return (folder / "index.html").read_text()
