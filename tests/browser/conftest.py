"""One real JupyterLab and one real Chromium for all browser tests; a fresh page for each.

A test takes `lab` and `page`, opens a notebook of the course with `open_notebook(page, lab, name)`, runs it with
`run_all(page)` and then acts like a person: keys and mouse. What it saves goes to a copy, never to the checkout.
Requests that leave the machine and errors in the page fail the test when it ends.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
from needs import ROOT, need_module, need_program

HERE = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "about:")
CHROMIUM_ARGS = [
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address, its token, and the folder it serves (a copy of notebooks/)."""

    url: str
    token: str
    root: Path


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def private_settings(folder):
    """Environment that keeps JupyterLab's files in `folder` and its news fetching off."""
    settings = folder / "settings"
    quiet = settings / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    (quiet / "notification.jupyterlab-settings").write_text(
        json.dumps({"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True})
    )
    return {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "IPYTHONDIR": str(folder / "ipython"),
    }


def wait_until_it_answers(process, url, log, seconds=90):
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).read()
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"JupyterLab did not start: {log.read_text()[-3000:]}") from error
            time.sleep(0.1)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """A real JupyterLab on a random port of the loopback interface, over a copy of notebooks/."""
    need_module("jupyterlab", "course")
    folder = tmp_path_factory.mktemp("lab")
    root, log = folder / "course", folder / "lab.log"
    root.mkdir()
    if (ROOT / "notebooks").is_dir():
        ignore = shutil.ignore_patterns(".ipynb_checkpoints", "__pycache__")
        shutil.copytree(ROOT / "notebooks", root, ignore=ignore, dirs_exist_ok=True)
    port, token = free_port(), secrets.token_hex(16)
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}",
        f"--ServerApp.root_dir={root}",
        "--LabApp.expose_app_in_browser=True",  # gives the page window.jupyterapp, which run_all uses
    ]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **private_settings(folder)},
            cwd=root,
            start_new_session=True,  # so that its kernels can be ended with it
        )
        try:
            wait_until_it_answers(process, f"http://127.0.0.1:{port}/api?token={token}", log)
            yield Lab(f"http://127.0.0.1:{port}", token, root)
        finally:
            process.send_signal(signal.SIGTERM)  # JupyterLab shuts its kernels down and leaves
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="session")
def browser():
    """A real Chromium without a window."""
    playwright = need_module("playwright.sync_api", "test")
    chromium = need_program("chromium")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, headless=True, args=CHROMIUM_ARGS)
        yield running
        running.close()


@pytest.fixture
def page(browser, request, tmp_path):
    """A page that remembers in `offsite` what it asked of other machines and in `problems` what went wrong."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.offsite, page.problems = [], []
    page.on("request", lambda asked: asked.url.startswith(HERE) or page.offsite.append(asked.url))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    yield page
    failed = getattr(request.node, "call_failed", True)
    if failed:
        picture = tmp_path / "failed.png"
        page.screenshot(path=picture)
        print(f"what the page showed: {picture}")
    context.close()
    if not failed:
        assert page.offsite == []
        assert page.problems == []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        item.call_failed = report.failed
    return report


def pytest_collection_modifyitems(items):
    """Everything in this folder needs the browser."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


# ---- what tests call


@pytest.fixture
def open_notebook(lab, page):
    """Call with a file name of the course: opens it in JupyterLab and waits for its kernel."""

    def open_one(name):
        # /doc shows one document without side bars; &reset forgets an earlier layout
        page.goto(f"{lab.url}/doc/tree/{name}?token={lab.token}&reset")
        page.wait_for_function(
            "() => window.jupyterapp?.shell?.currentWidget?.sessionContext?.session?.kernel", timeout=60_000
        )

    return open_one


@pytest.fixture
def run_all(page):
    """Call to run every cell of the open notebook; returns whether all of them succeeded."""
    script = """async () => {
        const app = window.jupyterapp;
        await app.restored;
        const panel = app.shell.currentWidget;
        await panel.context.ready;
        await panel.sessionContext.ready;              // otherwise a dialog asks for a kernel
        await panel.sessionContext.session.kernel.info;
        return await app.commands.execute("notebook:run-all-cells");
    }"""
    return lambda: page.evaluate(script)


@pytest.fixture
def expect():
    """Playwright's, patient: the machine may do much else at once."""
    from playwright.sync_api import expect

    expect.set_options(timeout=60_000)
    return expect


@pytest.fixture
def photograph(page):
    """photograph(path): the page in the dark theme and in the light one."""

    def take(path):
        for theme in ("Dark", "Light"):
            name = f"JupyterLab {theme}"
            page.evaluate(
                "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name
            )
            page.wait_for_function("name => document.body.dataset.jpThemeName === name", arg=name)
            page.locator("#jupyterlab-splash").wait_for(state="detached")
            page.screenshot(path=path.with_stem(f"{path.stem}_{theme.lower()}"))

    return take
