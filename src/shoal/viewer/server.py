"""The site on 127.0.0.1: it answers requests that have its token, and only reads.

Every address begins with the token, so links keep it and nothing is stored in the browser. Token and port are kept for
each folder of runs in a file that only its user can read, so links last. Requests under another host
name (DNS rebinding), from another origin, or with a method that writes are refused before anything is looked up.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import MsgspecError

from shoal.core.errors import ConfigError, DataError, MissingExtraError, ShoalError, format_error, needs_extra
from shoal.core.files import state_folder, write_json
from shoal.core.ports import listening
from shoal.viewer import pages
from shoal.viewer.episode_lists import episodes
from shoal.viewer.episode_pages import one_episode
from shoal.viewer.group_pages import group
from shoal.viewer.markup import Html, tag
from shoal.viewer.pages import Page, Site, not_here
from shoal.viewer.runs import FILMS, PICTURES, Run
from shoal.viewer.skill_pages import skill_page
from shoal.viewer.split_pages import sample_page

logger = logging.getLogger(__name__)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ICON = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAOUlEQVR42mPgjllLEmIYBBr+//+PXcN/DICpGqHhP15ADRvI8QNF"
    "oYTHeQzEqEb2OjVsGPxpCQ0BAJxgb8BPEADjAAAAAElFTkSuQmCC"
)
"""Two fish, 16 pixels wide."""
SCRIPTS = ("view.js", "runs.js", "curves.js", "episodes.js")
STATIC = {
    "static/view.css": "text/css; charset=utf-8",
    **{f"static/{name}": "text/javascript; charset=utf-8" for name in SCRIPTS},
}
PAGES: dict[str, Callable[[Site, Run, Mapping[str, str]], Page]] = {
    "log": pages.log, "episodes": episodes, "episode": one_episode, "group": group, "skill": skill_page,
    "sample": sample_page,
}  # fmt: skip
"""The pages of a run behind that of all of it, by the last part of their address."""
READING = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, MsgspecError)
"""What a file can raise that says something else than runs write."""
LOCAL = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]+)?")
"""The Host header of a request to this machine."""
TOKEN = re.compile(r"[A-Za-z0-9_-]{22,200}")
"""What may be a token: letters of addresses, so many that nobody guesses it."""


def static(name: str) -> str:
    """The text of a file that comes with the viewer."""
    return (resources.files("shoal.viewer") / "static" / name).read_text("utf-8")


def document(page: Page, base: str, version: str = "") -> str:
    """The whole HTML of a page."""
    ways = {"prev": page.previous, "next": page.next, "up": page.up}
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{page.title} · shoal"),
        tag("link", rel="icon", href=ICON),
        tag("link", rel="stylesheet", href=f"{base}static/view.css"),
        [tag("script", Html(""), type="module", src=f"{base}static/{name}") for name in SCRIPTS],
        [tag("link", rel=rel, href=href) for rel, href in ways.items() if href],
    )
    lost = tag("p", "", id="lost", role="status", hidden=True)
    main = tag("main", page.body, id="main", data_version=version or None)
    body = tag("body", bar(page), lost, main, keys())
    return "<!doctype html>\n" + tag("html", head, body, lang="en")


def bar(page: Page) -> Html:
    """Where one is, and the buttons of every page."""
    mark = tag("li", tag("img", src=ICON, alt="", class_="mark"))
    trail = [
        tag("li", tag("a", name, href=link) if link else tag("span", name, aria_current="page"))
        for name, link in page.trail
    ]
    buttons = [
        tag("button", "theme", type="button", data_do="theme", title="dark or light (t)"),
        tag("button", "keys", type="button", data_do="help", title="what the keys do (?)"),
    ]
    return tag("nav", tag("ol", mark, trail), tag("div", buttons), class_="bar")


def keys() -> Html:
    """The list of keys, which opens over any page."""
    known = (
        ("j k", "next, previous line"),
        ("Enter", "open it"),
        ("n p", "next, previous of the list: episode, group or page"),
        ("u", "up to the list"),
        ("f v", "fold all turns, short turns"),
        ("h", "all runs"),
        ("\N{LEFTWARDS ARROW} \N{RIGHTWARDS ARROW}", "along the curves of a panel that Tab has reached"),
        ("t", "dark or light"),
        ("a", "tokens by advantage or by probability"),
        ("c", "copy the command"),
        ("?", "this list"),
    )
    rows = [
        tag("div", tag("dt", [tag("kbd", k) for k in keys.split()]), tag("dd", what)) for keys, what in known
    ]
    close = tag("button", "close", type="button", data_do="help")
    return tag("dialog", tag("h2", "Keys"), tag("dl", rows, class_="keys"), close, id="keys")


def page_for(site: Site, path: str, query: dict[str, str]) -> Page:
    """The page at an address, without the token.

    Raises:
        DataError: there is none, or it cannot be made of what the files of the run say.
    """
    try:
        return _page_for(site, path, query)
    except ShoalError:
        raise
    except READING as error:  # whatever a file says, the other pages are shown
        raise DataError(
            f"a file of this run says what no run writes ({format_error(error)}); restore it or remove it"
        ) from error


def _page_for(site: Site, path: str, query: dict[str, str]) -> Page:
    parts = path.strip("/").split("/")
    if parts == [""]:
        return pages.home(site)
    if parts == ["compare"]:
        return pages.compare(site, query)
    if parts[0] != "run" or len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in PAGES):
        raise DataError("there is no such page")
    run = site.run(parts[1])
    return PAGES[parts[2]](site, run, query) if len(parts) == 3 else pages.overview(site, run)


def make_app(
    runs: Sequence[Run], token: str | None = None, find: Callable[[], Sequence[Path]] | None = None
) -> Any:
    """The Starlette application; `app.state.token` is what addresses begin with.

    Args:
        runs: to be looked at.
        find: gives the run folders that are there at each look; None for `runs` alone.
        token: 22 or more letters that nobody guesses; drawn if not given.
    """
    with needs_extra("shoal view", "web"):
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.requests import Request
        from starlette.responses import FileResponse, PlainTextResponse, Response
        from starlette.routing import Route
    token = token or secrets.token_urlsafe(24)
    site = Site(runs, f"/{token}/", find=find)

    async def answer(request: Request) -> Response:
        refused = refusal(request.headers, request.path_params.get("token", ""), token)
        if refused is not None:
            return PlainTextResponse(refused + "\n", 403, headers=HEADERS)
        path, query = request.path_params.get("path", ""), dict(request.query_params)
        shown = path.strip("/").split("/")

        def make() -> Response:
            if path in STATIC:
                text = static(path.removeprefix("static/"))
                return Response(text, media_type=STATIC[path], headers=HEADERS)
            site.look()
            known = site.run(shown[1]) if shown[0] == "run" and len(shown) > 1 else None
            if shown[2:] == ["file"] and known is not None:
                place, media = known.file(query.get("name", ""), PICTURES | FILMS)
                if media in FILMS.values():
                    return FileResponse(place, media_type=media, headers=HEADERS)  # read in parts
                return Response(place.read_bytes(), media_type=media, headers=HEADERS)
            version = known.version() if known is not None else _version_of(site.runs)
            if version and request.headers.get("x-have") == version:
                return Response(status_code=204, headers=HEADERS)
            text = document(page_for(site, path, query), site.base, version)
            return Response(text, media_type="text/html; charset=utf-8", headers=HEADERS)

        try:
            return await run_in_threadpool(make)
        except MissingExtraError as error:
            return _told(str(error), 501)
        except (ShoalError, OSError) as error:
            return _told(str(error), 404)

    def _told(text: str, status: int) -> Response:
        shown = document(not_here(text, site.base), site.base)
        return Response(shown, status, media_type="text/html; charset=utf-8", headers=HEADERS)

    places = ("/{token}", "/{token}/{path:path}", "/{path:path}")  # the last is refused, for it has no token
    app = Starlette(routes=[Route(place, answer, methods=["GET"]) for place in places])
    app.state.token = token
    app.state.site = site
    return app


def _version_of(runs: Sequence[Run]) -> str:
    """A word that changes when a run comes, goes or changes."""
    told = "".join(f"{run.path} {run.version()}\n" for run in runs)
    return hashlib.sha256(told.encode()).hexdigest()[:20]


def refusal(headers: Any, given: str, token: str) -> str | None:
    """Why a request is refused; None if it may be answered."""
    if not LOCAL.fullmatch(headers.get("host", "")):
        return "this server only answers as 127.0.0.1 or localhost"
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return "requests of other sites are refused"
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    if site in ("cross-site", "same-site") and mode != "navigate":
        return "requests of other sites are refused"
    if not hmac.compare_digest(given.encode(), token.encode()):
        return "the token is missing or wrong: use the whole address that shoal view printed"
    return None


def index_in_background(runs: Callable[[], Sequence[Run]], every: float = 2.0) -> Callable[[], None]:
    """Keep the indexes of the `runs()` of each moment up to date in a thread; returns what ends it."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            for run in runs():
                try:
                    run.index.refresh()
                except (ShoalError, OSError) as error:
                    logger.warning("the episodes of %s cannot be indexed now: %s", run.path, error)
            ended.wait(every)

    thread = threading.Thread(target=work, name="shoal-view-index", daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join(5)

    return end


def kept_address(runs: Sequence[Path]) -> Path:
    """The file that keeps the token and port of these folders, so that links to their pages last."""
    name = hashlib.sha256("\n".join(str(path.resolve()) for path in runs).encode()).hexdigest()[:32]
    return state_folder() / "view" / f"{name}.json"


def read_address(file: Path) -> tuple[str | None, int]:
    """The kept token and port; none, and 0, where nothing that can be used is kept."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, str | int])
    except (OSError, MsgspecError):
        return None, 0
    token, port = str(kept.get("token")), kept.get("port")
    return token if TOKEN.fullmatch(token) else None, port if isinstance(port, int) else 0


def keep_address(file: Path, token: str, port: int) -> None:
    """Keep them where only the user can read them."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    write_json(file, {"token": token, "port": port})


def serve(app: Any, port: int, on_ready: Callable[[str, int], None], before: int = 0) -> None:
    """Answer on 127.0.0.1 until interrupted.

    Args:
        app: of `make_app`.
        port: 0 takes a free one, `before` if it is free.
        on_ready: told the whole address, and the port.
        before: the port of the last time.
    """
    with needs_extra("shoal view", "web"):
        import uvicorn
    try:
        listener = listening(port or before)
    except ConfigError:
        if port:
            raise
        listener = listening(0)
    with listener:
        taken = listener.getsockname()[1]
        on_ready(f"http://127.0.0.1:{taken}/{app.state.token}/", taken)
        config = uvicorn.Config(app, log_level="error", access_log=False, server_header=False)
        uvicorn.Server(config).run(sockets=[listener])
