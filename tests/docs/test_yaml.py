"""Every YAML file in the documentation is one that its command takes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.command import PENSTOCK
from docs.blocks import PAGES, yaml_blocks
from penstock.core.config import load_config
from penstock.protocols.jrtc.config import ForwarderConfig
from penstock.workers.deployment import load_deployment
from support.certificates import Authority

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = [
    pytest.param(page, text, id=f"{page}-{number}")
    for page in PAGES
    for number, text in enumerate(yaml_blocks(page))
]
#: A part of a file, with the rest that it needs: the names are those that the part has.
PIPELINE = {
    "pipeline": "part",
    "sources": {"pulses": {"url": "iwrf:/data/ts"}, "moments": {"url": "log:/data/moments"}},
    "sinks": {},
}
GRAPH = {
    "graph": "part",
    "vertices": {
        "double": {"use": "functions:double", "from": "a", "to": "b"},
        "end": {"use": "functions:double", "from": ["b", "words"]},
    },
    "edges": {"a": {}, "b": {}, "words": {}},
}


def whole(part: dict[str, Any]) -> dict[str, Any]:
    """Return a file that a part of one belongs to."""
    keys = part.keys()
    if "pipeline" not in keys and keys & {"settings", "sources", "stages", "sinks"}:
        file = {**PIPELINE, **part}
        sources = file["sources"] | part.get("stages", {})
        file["sinks"] = part.get("sinks") or {
            f"of_{name}": {"from": name, "url": f"log:/data/out/{name}"} for name in sources
        }
        return file
    if keys == {"double"}:
        return {**GRAPH, "vertices": {**GRAPH["vertices"], **part}}  # type: ignore[dict-item]
    if keys == {"words"}:
        return {**GRAPH, "edges": {**GRAPH["edges"], **part}}  # type: ignore[dict-item]
    return part


@pytest.mark.parametrize(("page", "text"), BLOCKS)
def test_a_block_is_what_its_command_takes(
    page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILD", str(tmp_path))
    if page == "jrtc":
        shutil.copytree(EXAMPLES / "jrtc", tmp_path, dirs_exist_ok=True)
    (tmp_path / "my_stages.py").write_text(
        "def __getattr__(name):\n    return lambda frame: frame\n"
    )
    (tmp_path / "functions.py").write_text("def double(message):\n    yield message * 2\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "site.yaml").write_text("settings: {trigger: 1s}\n")
    (tmp_path / "worker.py").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "worker.py").chmod(0o700)
    if "ca.pem" in text:
        authority = Authority(tmp_path)
        issued = authority.issue("c")
        for made, name in (
            (authority.certificate, "ca.pem"),
            (issued.certificate, "c.pem"),
            (issued.key, "k.pem"),
        ):
            (tmp_path / name).write_bytes(Path(made).read_bytes())
    for number, part in enumerate(yaml.safe_load_all(text)):
        file = whole(part)
        path = tmp_path / f"part{number}.yaml"
        path.write_text(yaml.safe_dump(file, sort_keys=False))
        keys = file.keys()
        if "pipeline" in keys:
            check("plan", str(path))
        elif "graph" in keys:
            check("graph", "check", str(path))
        elif "relays" in keys:
            check("relay", str(path), "--check")
        elif "dispatcher" in keys:
            check("dispatch", "run", str(path), "--check")
        elif "destinations" in keys:
            load_config(path, ForwarderConfig)
        elif "app" in keys:
            load_deployment(path)
        else:
            assert keys == {"cases"}, page
            pipeline = next(iter(yaml.safe_load_all(yaml_blocks("pipelines")[0])))
            assert {name for case in file["cases"] for name in case["given"]} <= {
                *pipeline["sources"],
                *pipeline["stages"],
            }


def check(*arguments: str) -> None:
    done = subprocess.run(
        [PENSTOCK, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
