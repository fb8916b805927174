"""Every example runs, on a real model."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import uvicorn

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, model: Path, *more: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, model, *more],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_every_example_has_a_test() -> None:
    tested = {"quickstart", "many_streams", "cancel", "chat_loop", "fastapi_app", "__init__"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested


def test_quickstart(smollm2_path: Path) -> None:
    out = run("quickstart.py", smollm2_path)
    assert "Paris" in out.splitlines()[0]
    assert len(out.splitlines()[1]) > 20


def test_many_streams(smollm2_path: Path) -> None:
    out = run("many_streams.py", smollm2_path, "4")
    assert out.count("tokens") == 5
    assert "over 4 streams" in out


def test_cancel(smollm2_path: Path) -> None:
    lines = run("cancel.py", smollm2_path).splitlines()
    assert lines[-3:] == ["left the block: cancelled", "cancelled the task: True", lines[-1]]
    assert lines[-1] == "blocks in use: 0"


def test_chat_loop(smollm2_path: Path) -> None:
    out = run(
        "chat_loop.py", smollm2_path, "12", stdin="What is the capital of Germany?\nThanks.\n\n"
    )
    assert "Berlin" in out
    assert "(0 of " in out
    assert out.count("tokens cached") == 2


async def test_a_client_that_disconnects_frees_its_blocks(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.fastapi_app import app

    monkeypatch.setenv("MODEL", str(smollm2_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.05)
        async with httpx.AsyncClient(timeout=30) as client:
            request: dict[str, str | int] = {"prompt": "Once upon a time", "max_tokens": 2000}
            async with client.stream("GET", f"{url}/generate", params=request) as response:
                async for text in response.aiter_text():
                    if text:
                        break
                used = (await client.get(f"{url}/stats")).json()
            assert used["running"] == 1
            assert used["kv_blocks_used"] > 0
            for _ in range(100):
                left = (await client.get(f"{url}/stats")).json()
                if left["running"] == 0:
                    break
                await asyncio.sleep(0.05)
            assert left == {"running": 0, "kv_blocks_used": 0}
            for bad in ({"prompt": ""}, {"prompt": "a", "max_tokens": "0"}):
                assert (await client.get(f"{url}/generate", params=bad)).status_code == 422
            short: dict[str, str | int] = {"prompt": "The capital of France is", "max_tokens": 4}
            assert "Paris" in (await client.get(f"{url}/generate", params=short)).text
        server.should_exit = True
        await serving
