"""`shoal view RUN…`: runs, episodes, skills and samples in a browser of this machine, or in one static file."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shoal.cli.command import Command, Positional
from shoal.cli.grammar import refuse_below, refuse_idle
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import write_text
from shoal.viewer.runs import Run, run_folders


@dataclass(frozen=True)
class ViewOptions:
    """Look at runs in a browser: curves, advice, episodes turn by turn, groups side by side, skills, split samples.

    RUN is a run folder, or a folder of run folders such as runs/. The page is served on 127.0.0.1, needs the token in
    its address, and only reads. It follows running runs, and lists those that begin later.
    """

    runs: Annotated[tuple[Path, ...], Positional("RUN")] = (Path("runs"),)
    """run folders, or folders that hold them; by default runs"""
    port: int = 0
    """on which to answer; 0 takes that of the last time for these folders, or a free one"""
    token: str | None = None
    """what addresses begin with, 22 letters or more; by default one that is drawn once and kept for these folders"""
    open: bool = False
    """also open the page in the browser"""
    export: Path | None = None
    """write one static file instead, which needs no server and no network"""
    episodes: int = 60
    """with --export: how many episodes of each run it holds, the worst, the best, failed ones and the newest"""


MORE = """\
The token and the port are kept for each folder in ~/.local/state/shoal/view (XDG_STATE_HOME moves it), readable by you
alone, so bookmarks last; remove the file there to draw a new token.

examples:
  shoal view runs/demo
  shoal view runs/seed1 runs/seed2 --open
  shoal view runs/demo --export demo.html
"""


def view(options: ViewOptions) -> None:
    """Serve until interrupted, or write the file."""
    if options.export is not None:
        refuse_idle(options, "with --export, which writes a file and serves nothing", "port", "token", "open")
        _export(options, options.export)
        return
    refuse_idle(options, "without --export", "episodes")
    from shoal.viewer import server

    with contextlib.ExitStack() as ending:
        asked = tuple(path.absolute() for path in options.runs)
        for path in asked:
            if not path.is_dir() and options.runs != ViewOptions().runs:
                raise DataError(f"{path} is not a folder")
        kept = server.kept_address(asked)
        token, before = server.read_address(kept)
        if options.token is not None and not server.TOKEN.fullmatch(options.token):
            raise ConfigError(
                f"--token must be 22 to 200 letters, digits, - or _, got {len(options.token)} characters; leave it out "
                "for one that is drawn and kept"
            )

        def find() -> list[Path]:
            return run_folders([path for path in asked if path.is_dir()], empty=True)

        app = server.make_app([], options.token or token, find)
        site = app.state.site
        site.look()
        ending.callback(server.index_in_background(lambda: site.runs))

        def ready(address: str, port: int) -> None:
            if options.token is None and (options.port or not (token and before)):
                with contextlib.suppress(OSError):  # without a home, links end with the server
                    server.keep_address(kept, app.state.token, port)
            n = len(site.runs)
            print(f"{n} run{'s' * (n != 1)} at {address}", flush=True)
            if not n:
                print(f"there are no runs in {', '.join(map(str, options.runs))} yet", flush=True)
            print(
                "the address has a token: anyone who has it can read these runs; Ctrl-C ends the server",
                flush=True,
            )
            if options.open:
                webbrowser.open(address)

        with contextlib.suppress(KeyboardInterrupt):  # how a server is ended
            server.serve(app, options.port, ready, before)


COMMAND = Command(ViewOptions, view, MORE)


def _export(options: ViewOptions, place: Path) -> None:
    from shoal.viewer.export import export

    refuse_below(options, episodes=1)
    runs = [Run(folder) for folder in run_folders(options.runs)]
    for run in runs:
        run.index.refresh()
    text = export(runs, options.episodes)
    write_text(place, text)
    print(f"{place}: {len(text.encode()) / 2**20:.1f} MiB, open it in any browser", file=sys.stderr)
