"""The moving picture in the README: `python -m pagedkv.teach.site.picture`, after `make site`.

It opens the built lesson 04 in Chromium, steps its PagePlayer from the question to the end, and joins what it sees to
an animated GIF. Needs the `test` extra and a Chromium.
"""

import argparse
import io
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LESSON = "04_copy_on_write.html"
SECONDS = 1.6  # a frame
COLOURS = 48


def frames(site: Path, chromium: str) -> list[bytes]:
    """PNGs of the player, from the frame of the question on.

    Args: site: the built site's folder; chromium: the browser's path.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 760, "height": 900}, color_scheme="light")
        page.goto((site / LESSON).resolve().as_uri())
        player = page.locator(".live").first
        pictures = [player.screenshot()]
        player.get_by_role("button", name="Show me").click()
        forward = player.get_by_role("button", name="Forward")
        while forward.is_enabled():
            forward.click()
            page.mouse.move(0, 0)
            pictures.append(player.screenshot())
        browser.close()
    return pictures


def joined(pictures: Sequence[bytes]) -> bytes:
    """An animated GIF of PNGs, all as high as the highest."""
    from PIL import Image

    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    width, height = (max(sizes) for sizes in zip(*(image.size for image in images), strict=True))
    same: list[Any] = []
    for image in images:
        sheet = Image.new("RGB", (width, height), image.getpixel((5, image.height - 5)))
        sheet.paste(image)
        same.append(sheet.quantize(COLOURS, dither=Image.Dither.NONE))
    out = io.BytesIO()
    times = [int(1000 * SECONDS * (2 if i in (0, len(same) - 1) else 1)) for i in range(len(same))]
    same[0].save(out, "GIF", save_all=True, append_images=same[1:], duration=times, loop=0, optimize=True)
    return out.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pagedkv.teach.site.picture", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--site", type=Path, default=Path("site"), help="the built site (default: site)")
    parser.add_argument("--out", type=Path, default=Path(".github/page_player.gif"))
    options = parser.parse_args(arguments)
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None or not (options.site / LESSON).exists():
        print("needs chromium (CHROMIUM=path) and a built site (make site)", file=sys.stderr)
        return 1
    picture = joined(frames(options.site, chromium))
    options.out.write_bytes(picture)
    print(f"{options.out}: {len(picture) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
