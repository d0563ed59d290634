"""`run`: a script whose models are converted, as with AMP_GRAPH_ENABLE=1."""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import signal
import sys
import textwrap
import types
import zipfile
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from amp_graph import autopatch
from amp_graph.autopatch.settings import VARIABLES
from amp_graph.commands.command import Command
from amp_graph.errors import AmpGraphError

HELP_WIDTH = 78


def _run_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "script",
        help="a Python file, a folder or archive with a __main__.py, or a module's name after -m",
    )
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module")
    own = parser.add_argument("arguments", nargs=REMAINDER, help="the script's own arguments")
    own.required = False  # else they are asked for, too, where the script is missing
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", HELP_WIDTH)
    width = max(map(len, VARIABLES))
    others = {name: about for name, about in VARIABLES.items() if name != "AMP_GRAPH_ENABLE"}
    lines = (f"  {name:<{width}}  {about}" for name, about in others.items())
    parser.epilog = "\n".join(["environment variables:", *lines])


def _run(args: Namespace) -> int:
    if not args.is_module and not Path(args.script).exists():
        raise AmpGraphError(f"there is no file {args.script!r}; give the path of a script")
    interrupted: list[KeyboardInterrupt] = []
    atexit.register(_end_by_signal, interrupted)  # before others, so that it runs after them
    autopatch.enable()
    sys.argv = [args.script, *args.arguments]
    try:
        if args.is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        elif Path(args.script).is_dir() or zipfile.is_zipfile(args.script):
            del sys.path[0]  # it puts the folder or archive there
            runpy.run_path(str(Path(args.script).absolute()), run_name="__main__")
        else:
            _run_file(Path(args.script))
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt):
            interrupted.append(error)
        traceback = error.__traceback__
        while traceback is not None and _is_ours(traceback):
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return 1
    return 0


def _end_by_signal(interrupted: list[KeyboardInterrupt]) -> None:
    """End as Python ends a script that was interrupted: by the signal, after all exit handlers."""
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _run_file(script: Path) -> None:
    """Run a file as `python script` would: in a `__main__` that stays, its folder first on the
    path."""
    file = str(script.absolute())
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.path[0] = str(script.resolve().parent)
    # Not under the future imports of this file.
    exec(compile(script.read_bytes(), file, "exec", dont_inherit=True), main.__dict__)


def _is_ours(traceback: types.TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file in (__file__, runpy.__file__) or file.startswith("<frozen runpy")


RUN = Command(
    "run",
    "run a script with its models converted",
    "The script's arguments, exit code and tracebacks are its own. The AMP_GRAPH_ variables apply.",
    _run_arguments,
    _run,
)
